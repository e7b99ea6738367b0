"""DistributedOptimizer: the same parameters as one process on the global batch, and one story on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from replicas import RANK, SIZE

import mpistrategy as ms
from mpistrategy import errors

torch: Any = pytest.importorskip("torch")
mst: Any = pytest.importorskip("mpistrategy.torch")

ROWS = 12 * SIZE
ONES = torch.ones(2, 6, dtype=torch.float64)
Loop = Callable[[Any, Any, Callable[[int], Any]], None]


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def rows() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 6, generator=generator, dtype=torch.float64), torch.randint(
        0, 3, (ROWS,), generator=generator
    )


def train(loop: Loop, strategy: ms.Strategy | None, make: Callable[[Any], Any], **options: Any) -> Any:
    """Train on this rank's rows, or without a strategy on all; return the parameters."""
    net = network(RANK if strategy else 0)
    optimizer = make(net.parameters())
    if strategy is not None:
        optimizer = mst.DistributedOptimizer(optimizer, net.named_parameters(), strategy=strategy, **options)
    x, y = rows()
    part = slice(RANK, None, SIZE) if strategy is not None else slice(None)

    def loss(number: int, parts: int = 1, at: int = 0) -> Any:
        mine = slice(at * 12 // parts * (1 if strategy else SIZE), (at + 1) * 12 // parts * (1 if strategy else SIZE))
        return torch.nn.functional.cross_entropy(net(x[part][mine] * (1 + number / 9)), y[part][mine])

    loop(net, optimizer, loss)
    return [tensor.detach().clone() for tensor in net.parameters()]


def plain(net: Any, optimizer: Any, loss: Any) -> None:
    for number in range(5):
        optimizer.zero_grad()
        loss(number).backward()
        optimizer.step()


def in_place(net: Any, optimizer: Any, loss: Any) -> None:
    for number in range(5):
        optimizer.zero_grad(set_to_none=False)
        loss(number).backward()
        optimizer.step()


def accumulating(net: Any, optimizer: Any, loss: Any) -> None:
    for number in range(4):
        optimizer.zero_grad()
        with optimizer.no_sync() if hasattr(optimizer, "no_sync") else torch.enable_grad():
            for at in range(2):
                (loss(number, 3, at) / 3).backward()
        (loss(number, 3, 2) / 3).backward()
        optimizer.step()


def never_syncing(net: Any, optimizer: Any, loss: Any) -> None:
    for number in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if hasattr(optimizer, "no_sync") else torch.enable_grad():
            loss(number).backward()
        optimizer.step()


def twice(net: Any, optimizer: Any, loss: Any) -> None:
    for number in range(3):
        optimizer.zero_grad()
        loss(number).backward()
        loss(number + 1).backward()
        optimizer.step()


def clipping(net: Any, optimizer: Any, loss: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for number in range(5):
        optimizer.zero_grad()
        loss(number).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        scheduler.step()


def freezing(net: Any, optimizer: Any, loss: Any) -> None:
    net[0].weight.requires_grad_(False)
    plain(net, optimizer, loss)
    net[0].weight.requires_grad_(True)
    net[2].bias.requires_grad_(False)
    plain(net, optimizer, loss)


def scaling(net: Any, optimizer: Any, loss: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(5):
        optimizer.zero_grad()
        value = loss(number)
        if number == 2 and RANK == 0:
            value = value * float("inf")  # on one rank: all must leave this step out
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("loop", [plain, in_place, accumulating, never_syncing, twice, clipping, freezing, scaling])
@pytest.mark.parametrize("early", [False, True])
def test_as_one_process(strategy: ms.Strategy, loop: Any, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if early:
        started = start_early(monkeypatch)

    def make(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 0.5, momentum=0.9)

    found = train(loop, strategy, make, bytes_per_bucket=64)
    wanted = train(loop, None, make) if loop is not scaling or RANK == 0 else found
    for mine, one, first in zip(found, wanted, strategy.broadcast(found), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-12)
        assert (mine == first).all()
    assert not early or started or loop is never_syncing


def start_early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let buckets start during backward on one node, too."""
    from mpistrategy.training import gradient_buckets

    started: list[int] = []
    begin, start = gradient_buckets.GradientBuckets.__init__, gradient_buckets.GradientBuckets._start_next

    def init(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.__dict__["starts_early"] = True

    def start_next(self: Any, context: Any) -> None:
        started.append(len(self._missing))
        start(self, context)

    monkeypatch.setattr(gradient_buckets.GradientBuckets, "__init__", init)
    monkeypatch.setattr(gradient_buckets.GradientBuckets, "_start_next", start_next)
    return started


def test_gradients_live_in_shared_memory_and_are_the_same_everywhere(strategy: ms.Strategy) -> None:
    net = network()
    optimizer = mst.DistributedOptimizer(torch.optim.Adam(net.parameters()), strategy=strategy)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.full((2, 6), RANK + 1.0, dtype=torch.float64)).sum().backward()
        optimizer.step()
    arena = optimizer._gradients._arena
    for tensor, array in zip(net.parameters(), arena.values, strict=True):
        assert tensor.grad.data_ptr() == array.ctypes.data
    gathered = mst.all_gather(net[2].bias.grad[None], strategy=strategy)
    assert (gathered == gathered[0]).all()


def test_what_a_hook_of_the_program_does_to_a_gradient_is_summed(strategy: ms.Strategy) -> None:
    net = network()
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)

    def doubled(tensor: Any) -> None:
        tensor.grad.mul_(2)

    def replaced(tensor: Any) -> None:
        tensor.grad = tensor.grad * 3

    net[0].weight.register_post_accumulate_grad_hook(doubled)
    net[0].bias.register_post_accumulate_grad_hook(replaced)
    for _ in range(3):
        optimizer.zero_grad()
        (net(ONES).sum() * (RANK + 1)).backward()
        found = [tensor.grad.clone() for tensor in net.parameters()]
        wanted = torch.autograd.grad(net(ONES).sum() * (SIZE + 1) / 2, list(net.parameters()))
        for mine, one, times in zip(found, wanted, (2, 3, 1, 1), strict=True):
            torch.testing.assert_close(mine, one * times)


def test_sums_and_closures(strategy: ms.Strategy) -> None:
    def loop(net: Any, optimizer: Any, loss: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            value = loss(1)
            value.backward()
            return value

        for _ in range(3):
            optimizer.step(closure)
            optimizer.step(closure=closure)

    def make(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, 0.1, max_iter=4, line_search_fn="strong_wolfe")

    for mine, one in zip(train(loop, strategy, make), train(loop, None, make), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-6, atol=1e-9)

    def summed(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 0.5 / SIZE)

    def meant(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 0.5)

    for mine, one in zip(train(plain, strategy, summed, aggregation="SUM"), train(plain, None, meant), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-12)


def test_half_the_bytes_between_nodes(strategy: ms.Strategy) -> None:
    def make(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 0.5)

    def single(net: Any, optimizer: Any, loss: Any) -> None:
        plain(net.float(), optimizer, lambda number: net(torch.ones(2, 6) * (RANK + number + 1) / 9).sum())

    found = train(single, strategy, make, wire="bfloat16")
    for mine, first in zip(found, strategy.broadcast(found), strict=True):
        assert (mine == first).all()
    exact = train(single, strategy, make)
    for mine, one in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, one, rtol=0.03, atol=0.03)


def test_a_sum_is_not_summed_again(strategy: ms.Strategy) -> None:
    net = network()
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, aggregation="SUM")
    assert isinstance(optimizer, mst.Distributed)
    net(ONES).sum().backward()
    with pytest.raises(errors.OptionError, match="no_sync"):
        net(ONES).sum().backward()


def test_sparse_gradients_stay_sparse(strategy: ms.Strategy) -> None:
    torch.manual_seed(1)
    table = torch.nn.Embedding(7, 3, sparse=True)
    head = torch.nn.Linear(3, 1)
    optimizer = mst.DistributedOptimizer(
        torch.optim.SGD([*table.parameters(), *head.parameters()], 1.0), strategy=strategy
    )
    before, weight = table.weight.detach().clone(), head.weight.detach().clone()
    head(table(torch.tensor([RANK, RANK, 6]))).sum().backward()
    assert table.weight.grad.is_sparse
    optimizer.step()
    wanted = before.clone()
    for rank in range(SIZE):
        wanted[rank] -= 2 * weight[0] / SIZE
        wanted[6] -= weight[0] / SIZE
    torch.testing.assert_close(table.weight.detach(), wanted)


def test_parameters_without_gradients(strategy: ms.Strategy) -> None:
    net, unused = network(), torch.nn.Linear(2, 2)
    parameters = [*net.parameters(), *unused.parameters()]
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(parameters, 0.1), strategy=strategy)
    for _ in range(2):
        optimizer.zero_grad()
        net(ONES).sum().backward()
        optimizer.step()
    assert unused.weight.grad is None
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.full((2,), float(RANK)))], "lr": 1.0})
    added = optimizer.param_groups[1]["params"][0]
    with torch.no_grad():
        added.fill_(0)
    (added * float(RANK)).sum().backward()
    optimizer.step()
    assert added.tolist() == [-(SIZE - 1) / 2] * 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_that_differs_by_rank_is_named(strategy: ms.Strategy, steps: int) -> None:
    net = network()
    optimizer = mst.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), strategy=strategy
    )
    for _ in range(steps):
        optimizer.zero_grad()
        net(ONES).sum().backward()
        optimizer.step()
    if RANK == 1:
        net[0].weight.requires_grad_(False)
    with pytest.raises(errors.CollectiveMismatchError, match=r"none of 0\.weight"):
        net(ONES).sum().backward()
    net[0].weight.requires_grad_(True)
    optimizer.zero_grad()
    net(ONES).sum().backward()  # a failed sum leaves nothing behind
    optimizer.step()
    other = torch.nn.Linear(2, 3 if RANK == 0 else 4)
    with pytest.raises(errors.CollectiveMismatchError, match="parameter 0 of group 0"):
        mst.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), strategy=strategy)


@pytest.mark.mpi(min_size=2)
def test_a_step_that_one_rank_leaves_out(strategy: ms.Strategy) -> None:
    net = network()
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    net(ONES).sum().backward()
    optimizer.step()
    if RANK == 1:
        optimizer.step()
    with pytest.raises(errors.CollectiveMismatchError, match="step 2"):
        net(ONES).sum().backward()


@pytest.mark.mpi(min_size=2)
def test_a_gradient_that_is_sparse_on_one_rank(strategy: ms.Strategy) -> None:
    table = torch.nn.Embedding(7, 3)
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), strategy=strategy)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([RANK, 6])).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    table.sparse = RANK == 1
    with pytest.raises(errors.CollectiveMismatchError):
        table(torch.tensor([RANK, 6])).sum().backward()


def test_wrong_arguments(strategy: ms.Strategy) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(errors.OptionTypeError):
        mst.DistributedOptimizer(net, strategy=strategy)
    with pytest.raises(errors.OptionError, match="MAX"):
        mst.DistributedOptimizer(optimizer, strategy=strategy, aggregation="MAX")
    with pytest.raises(errors.OptionError, match="wire"):
        mst.DistributedOptimizer(optimizer, strategy=strategy, wire="float8")
    mst.DistributedOptimizer(optimizer, strategy=strategy)
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)
    with pytest.raises(errors.OptionError, match="already"):
        mst.DistributedOptimizer(optimizer, strategy=strategy)
