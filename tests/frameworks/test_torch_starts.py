"""Broadcasts, collectives of nests and the sampler of mpistrategy.torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE

import mpistrategy as ms
from mpistrategy import errors

torch: Any = pytest.importorskip("torch")
mst: Any = pytest.importorskip("mpistrategy.torch")
LAST = SIZE - 1


def test_a_module_and_an_optimizer_that_has_made_steps_on_one_rank(strategy: ms.Strategy) -> None:
    torch.manual_seed(RANK)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters(), 0.1 + RANK)
    if RANK == LAST:
        net(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    memory = net[0].weight.data_ptr()
    assert mst.broadcast(net, LAST, strategy=strategy) is net
    assert mst.broadcast(optimizer, LAST, strategy=strategy) is optimizer
    assert net[0].weight.data_ptr() == memory
    assert optimizer.param_groups[0]["lr"] == 0.1 + LAST
    state = [
        *net.state_dict().values(),
        *(optimizer.state[t][k] for t in net.parameters() for k in ("step", "exp_avg")),
    ]
    assert len(state) == 7 + 8
    for mine in state:
        gathered = mst.all_gather(mine[None], strategy=strategy)
        assert (gathered == gathered[LAST]).all()


def test_a_nest(strategy: ms.Strategy) -> None:
    own = torch.full((2,), float(RANK), requires_grad=True)
    nest = {"epoch": RANK, "a": [own, ("words" * (RANK + 1), None)], 3: torch.tensor(RANK)}
    found = mst.broadcast(nest, LAST, strategy=strategy)
    assert found["epoch"] == LAST
    assert found["a"][1] == ("words" * SIZE, None)
    assert found[3] == LAST
    assert own.tolist() == [LAST, LAST]
    with pytest.raises(errors.OptionTypeError, match="a object at /a"):
        mst.broadcast({"a": object()}, strategy=strategy)
    with pytest.raises(errors.OptionError, match="root"):
        mst.broadcast({"a": 1}, SIZE, strategy=strategy)


def test_sync_batch_norm_is_refused_by_name(strategy: ms.Strategy) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.SyncBatchNorm(3))
    with pytest.raises(errors.UnsupportedError, match=r"SyncBatchNorm as '1'.*GroupNorm"):
        mst.broadcast(net, strategy=strategy)


def test_collectives_of_nests(strategy: ms.Strategy) -> None:
    value = {"loss": torch.tensor(RANK + 1.0, requires_grad=True), "n": 2}
    total = mst.all_reduce(value, "SUM", strategy=strategy)
    assert total["loss"] == SIZE * (SIZE + 1) / 2
    assert total["n"] == 2 * SIZE
    assert not total["loss"].requires_grad
    with strategy.scope():
        assert mst.all_reduce(torch.ones(2) * RANK).tolist() == [LAST / 2] * 2
    out = torch.zeros(2)
    assert strategy.run(lambda: mst.all_reduce(torch.ones(2), "SUM", out=out)) is out
    assert out.tolist() == [SIZE, SIZE]
    assert mst.all_gather(torch.full((RANK, 2), RANK), strategy=strategy).shape == (SIZE * LAST // 2, 2)


def test_every_row_comes_once_in_each_epoch(strategy: ms.Strategy) -> None:
    rows = 5 * SIZE + 1
    sampler = mst.Sampler(range(rows), strategy=strategy, pad=False, seed=3)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(strategy.gather(torch.tensor(list(sampler)), 0).tolist())
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(rows))
    assert orders[0] != orders[1]
    padded = mst.Sampler(rows, strategy=strategy)
    assert len(list(padded)) == len(padded) == -(-rows // SIZE)
    assert set(strategy.gather(torch.tensor(list(padded)), 0).tolist()) == set(range(rows))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX, where other tests have used it
def test_global_batches_are_the_same_on_one_rank_and_on_many_and_an_epoch_goes_on(
    strategy: ms.Strategy, tmp_path: Path
) -> None:
    one, rows = ms.OneDeviceStrategy("CPU:0"), torch.arange(12 * SIZE)

    def loader(sampler: Any, size: int, workers: int = 0) -> Any:
        return torch.utils.data.DataLoader(rows, batch_size=size, sampler=sampler, num_workers=workers)

    sampler, alone = mst.Sampler(rows, strategy=strategy), mst.Sampler(rows, strategy=one)
    whole = [set(batch.tolist()) for batch in alone.over(loader(alone, 3 * SIZE))]
    assert alone.epoch == 1
    folder = shared_folder(tmp_path) / "c"
    seen = []
    for batch in sampler.over(loader(sampler, 3, workers=1)):  # it reads ahead
        seen.append(set(strategy.gather(batch, 0).tolist()))
        if len(seen) == 2:
            with strategy.scope():
                ms.Checkpoint(sampler=sampler).save(folder)
    assert seen == whole
    resumed = mst.Sampler(rows, strategy=one)
    with one.scope():
        ms.Checkpoint(sampler=resumed).restore(folder)
    assert [set(batch.tolist()) for batch in resumed.over(loader(resumed, 3 * SIZE))] == whole[2:]
    with pytest.raises(errors.OptionError, match="seed"):
        mst.Sampler(rows, strategy=strategy, seed=9).load_state_dict(resumed.state_dict())
