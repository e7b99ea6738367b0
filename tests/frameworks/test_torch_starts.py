"""Broadcasts, collectives of nests and the sampler of mpistrategy.torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE, outcomes

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
    nest = {
        "epoch": RANK,
        "a": [own, ("words" * (RANK + 1), None)],
        **{path: torch.tensor(RANK + number) for number, path in enumerate((3, "3", "b/c"))},
        "b": {"c": torch.tensor(RANK + 3)},
    }
    found = mst.broadcast(nest, LAST, strategy=strategy)
    assert found["epoch"] == LAST
    assert found["a"][1] == ("words" * SIZE, None)
    assert [found[3], found["3"], found["b/c"], found["b"]["c"]] == [LAST, LAST + 1, LAST + 2, LAST + 3]
    assert own.tolist() == [LAST, LAST]
    with pytest.raises(errors.OptionTypeError, match=r"a object at \['a'\]"):
        mst.broadcast({"a": object()}, strategy=strategy)
    with pytest.raises(errors.OptionError, match="root"):
        mst.broadcast({"a": 1}, SIZE, strategy=strategy)


def test_tensors_that_cannot_be_written_are_refused_on_all_ranks(strategy: ms.Strategy) -> None:
    net = torch.nn.BatchNorm1d(2)
    net.register_buffer("mask", torch.ones(1).expand(3))
    with pytest.raises(errors.ShapeError, match=r"'mask'.*share memory"):
        mst.broadcast(net, strategy=strategy)
    net.mask = torch.tensor([True, RANK == 0])
    assert mst.broadcast(net, strategy=strategy).mask.all()
    with pytest.raises(errors.OptionTypeError, match="containers"):
        mst.broadcast({(1, 2): 3}, strategy=strategy)
    whole = torch.tensor([RANK])
    with pytest.raises(errors.ShapeError, match="float64"):
        mst.all_reduce(whole, strategy=strategy, out=whole)  # a mean of integers is none
    half = torch.ones(2, dtype=torch.bfloat16)
    assert mst.all_reduce(half, "SUM", strategy=strategy, out=half).tolist() == [SIZE, SIZE]


def test_sync_batch_norm_is_refused_by_name(strategy: ms.Strategy) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.SyncBatchNorm(3))
    with pytest.raises(errors.UnsupportedError, match=r"SyncBatchNorm as '1'.*GroupNorm"):
        mst.broadcast(net, strategy=strategy)


def test_collectives_of_nests(strategy: ms.Strategy) -> None:
    value = {"loss": torch.tensor(RANK + 1.0), "n": 2}
    total = mst.all_reduce(value, "SUM", strategy=strategy)
    assert total["loss"] == SIZE * (SIZE + 1) / 2
    assert total["n"] == 2 * SIZE
    with strategy.scope():
        assert mst.all_reduce(torch.ones(2) * RANK).tolist() == [LAST / 2] * 2
    out = torch.zeros(2)
    assert strategy.run(lambda: mst.all_reduce(torch.ones(2), "SUM", out=out)) is out
    assert out.tolist() == [SIZE, SIZE]
    assert mst.all_gather(torch.full((RANK, 2), RANK), strategy=strategy).shape == (SIZE * LAST // 2, 2)


def test_gradients_flow_through_collectives_or_are_refused(strategy: ms.Strategy) -> None:
    mine = torch.full((2, SIZE), RANK + 1.0, requires_grad=True)
    weight = torch.arange(2.0 * SIZE).reshape(2, SIZE) + RANK
    for call, wanted in (
        (lambda: (mst.all_reduce(mine, "SUM", strategy=strategy) * weight).sum(), lambda w: w.sum(0)),
        (lambda: (mst.all_reduce({"a": [mine]}, strategy=strategy)["a"][0] * weight).sum(), lambda w: w.mean(0)),
        (lambda: (mst.all_gather(mine, strategy=strategy) * weight.repeat(SIZE, 1)).sum(), lambda w: w.sum(0)),
        (
            lambda: (mst.reduce_scatter(mine, "SUM", 1, strategy=strategy) * weight[:, :1]).sum(),
            lambda w: torch.stack([each[:, 0] for each in w], 1),
        ),
    ):
        mine.grad = None
        call().backward()
        everybody = torch.stack([torch.arange(2.0 * SIZE).reshape(2, SIZE) + rank for rank in range(SIZE)])
        torch.testing.assert_close(mine.grad, wanted(everybody))
    rows = torch.full((SIZE * (SIZE - 1) // 2, 2), RANK + 1.0, requires_grad=True)
    got, counts = mst.all_to_all(rows, torch.arange(SIZE), strategy=strategy)
    assert counts == [RANK] * SIZE
    assert got[:, 0].tolist() == [rank + 1 for rank in range(SIZE) for _ in range(RANK)]
    (got * (RANK + 1)).sum().backward()
    assert rows.grad[:, 0].tolist() == [rank + 1 for rank in range(SIZE) for _ in range(rank)]
    for refused in (
        lambda: mst.all_reduce(mine, "MAX", strategy=strategy),
        lambda: mst.all_reduce(mine, "SUM", strategy=strategy, out=torch.empty(2, SIZE)),
        lambda: mst.broadcast(mine * 2, strategy=strategy),
    ):
        with pytest.raises(errors.UnsupportedError, match="wants gradients"):
            refused()
    with torch.no_grad():
        assert (mst.all_reduce(mine, "MAX", strategy=strategy) == SIZE).all()


@pytest.mark.parametrize(("splits", "words"), [([5] * SIZE, "splits [5"), (3, "not iterable")])
def test_splits_of_one_rank_that_do_not_fit_are_refused_on_every_rank(
    strategy: ms.Strategy, splits: Any, words: str
) -> None:
    mine = splits if RANK == LAST else None
    for end in outcomes(lambda: mst.all_to_all(torch.ones(SIZE), mine, strategy=strategy)):
        assert words in end.text


def test_gradients_of_gradients_and_beside_truth_values(strategy: ms.Strategy) -> None:
    mine = torch.tensor([RANK + 1.0], requires_grad=True)
    everybody = torch.arange(SIZE) + 1.0
    squares = everybody.square().sum()
    total = mst.all_reduce(mine.square(), "SUM", strategy=strategy)
    [first] = torch.autograd.grad(total.square(), mine, create_graph=True)
    torch.testing.assert_close(first.detach(), 4 * SIZE * squares * mine.detach())
    [second] = torch.autograd.grad(first, mine)
    torch.testing.assert_close(second, 4 * SIZE * (2 * everybody.sum() * mine.detach() + squares))
    rows = mst.all_gather({"mask": torch.tensor([RANK == 0]), "x": mine}, strategy=strategy)
    rows["x"][rows["mask"]].sum().backward()
    assert mine.grad.tolist() == [SIZE * (RANK == 0)]


@pytest.mark.mpi(min_size=2)
def test_a_nest_that_does_not_fit_raises_on_all_ranks(strategy: ms.Strategy) -> None:
    mine = torch.zeros(2 + (RANK == 1))
    with pytest.raises(errors.CollectiveMismatchError, match=r"float32\[2\]"):
        mst.broadcast(mine, strategy=strategy)
    with pytest.raises(errors.CollectiveMismatchError, match="structure"):
        mst.broadcast({"a": torch.zeros(1)} if RANK else {"a": torch.zeros(1), "b": torch.zeros(1)}, strategy=strategy)
    assert mst.broadcast({"x": torch.ones(1)} if RANK == 0 else None, strategy=strategy)["x"] == 1


def test_every_row_comes_once_in_each_epoch(strategy: ms.Strategy) -> None:
    rows = 5 * SIZE + 1
    sampler = mst.Sampler(range(rows), strategy=strategy, pad=False, seed=3)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(sampler) == len(range(strategy.rank, rows, SIZE)), "of another epoch"
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
    one, rows = ms.OneDeviceStrategy("CPU:0"), torch.arange(12 * SIZE, device="cpu")  # workers read it

    def loader(sampler: Any, size: int, workers: int = 0) -> Any:
        return torch.utils.data.DataLoader(rows, batch_size=size, sampler=sampler, num_workers=workers)

    sampler, alone = mst.Sampler(rows, strategy=strategy), mst.Sampler(rows, strategy=one)
    whole = [set(batch.tolist()) for batch in alone.over(loader(alone, 3 * SIZE))]
    assert alone.epoch == 1
    folder = shared_folder(tmp_path) / "c"
    seen = []
    batches = loader(sampler, 3, workers=1)  # it reads ahead
    for batch in sampler.over(batches):
        assert len(batches) == 4, "the same through an epoch"
        seen.append(set(strategy.gather(batch, 0).tolist()))
        if len(seen) == 2:
            with strategy.scope():
                ms.Checkpoint(sampler=sampler).save(folder)
    assert seen == whole
    resumed = mst.Sampler(rows, strategy=one)
    with one.scope():
        ms.Checkpoint(sampler=resumed).restore(folder)
    assert [set(batch.tolist()) for batch in resumed.over(loader(resumed, 3 * SIZE))] == whole[2:]
    for other in ({"seed": 9}, {"shuffle": False}):
        with pytest.raises(errors.OptionError, match="seed"):
            mst.Sampler(rows, strategy=strategy, **other).load_state_dict(resumed.state_dict())
    for bad in ({"data": rows, "seed": -1}, {"data": -1}):
        with pytest.raises(errors.OptionError, match="expected 0 or more"):
            mst.Sampler(**bad, strategy=strategy)
