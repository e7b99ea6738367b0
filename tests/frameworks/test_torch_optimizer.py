"""DistributedOptimizer: the same parameters as one process on the global batch, and one story on all ranks."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from replicas import RANK, SIZE, raising

import mpistrategy as ms
from mpistrategy import errors

torch: Any = pytest.importorskip("torch")
mst: Any = pytest.importorskip("mpistrategy.torch")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # torch's own, of sparse tensors on a GPU
ROWS = 12 * SIZE
Loop = Callable[[Any, Any, Callable[[int], Any]], None]


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def ones() -> Any:
    return torch.ones(2, 6, dtype=torch.float64)


def rows() -> tuple[Any, Any]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
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


def accumulating(net: Any, optimizer: Any, loss: Any) -> None:
    for number in range(4):
        optimizer.zero_grad()
        for at in range(3):
            (loss(number, 3, at) / 3).backward()
        optimizer.step()


def clipping(net: Any, optimizer: Any, loss: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for number in range(5):
        optimizer.zero_grad()
        loss(number).backward()
        synchronize(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        scheduler.step()


def synchronize(optimizer: Any) -> None:
    if isinstance(optimizer, mst.DistributedOptimizer):
        optimizer.synchronize()


def freezing(net: Any, optimizer: Any, loss: Any) -> None:
    net[0].weight.requires_grad_(False)
    plain(net, optimizer, loss)
    net[0].weight.requires_grad_(True)
    net[2].bias.requires_grad_(False)
    plain(net, optimizer, loss)


def setting(net: Any, optimizer: Any, loss: Any) -> None:
    """Set gradients by hand, as meta-learning does."""
    for number in range(4):
        for tensor, grad in zip(net.parameters(), torch.autograd.grad(loss(number), [*net.parameters()]), strict=True):
            tensor.grad = grad
        optimizer.step()


def converted(net: Any, optimizer: Any, loss: Any) -> None:
    """Write the gradients' memory anew in each step, as conversions of a module do."""
    for number in range(4):
        optimizer.zero_grad()
        loss(number).backward()
        net._apply(lambda tensor: tensor.clone())
        optimizer.step()


def scaling(net: Any, optimizer: Any, loss: Any) -> None:
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    for number in range(5):
        optimizer.zero_grad()
        value = loss(number)
        if number == 2 and RANK == 0:
            value = value * float("inf")  # on one rank: all must leave this step out
        scaler.scale(value).backward()
        synchronize(optimizer)
        scaler.step(optimizer)
        scaler.update()


LOOPS = [plain, accumulating, clipping, freezing, setting, converted, scaling]


@pytest.mark.parametrize("aggregation", ["MEAN", "SUM"])
@pytest.mark.parametrize("loop", LOOPS)
def test_as_one_process(strategy: ms.Strategy, loop: Loop, aggregation: str) -> None:
    rate = 0.5 if aggregation == "MEAN" else 0.5 / SIZE
    if aggregation == "SUM" and loop is clipping:
        pytest.skip("another norm is clipped")
    found = train(loop, strategy, lambda p: torch.optim.SGD(p, rate, momentum=0.9), aggregation=aggregation)
    first = strategy.broadcast(found)
    wanted = found
    if loop is not scaling or RANK == 0:
        wanted = train(loop, None, lambda p: torch.optim.SGD(p, 0.5, momentum=0.9))
    for mine, one, other in zip(found, wanted, first, strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-12)
        assert (mine == other).all()


def test_gradients_are_this_ranks_until_they_are_combined_where_they_are(strategy: ms.Strategy) -> None:
    net = network()
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    (net(ones()).sum() * (RANK + 1)).backward()
    own = [tensor.grad for tensor in net.parameters()]
    values = [grad.clone() for grad in own]
    optimizer.synchronize()
    for tensor, grad, value in zip(net.parameters(), own, values, strict=True):
        assert tensor.grad is grad
        torch.testing.assert_close(grad, value * (SIZE + 1) / 2 / (RANK + 1))
    kept = [grad.clone() for grad in own]
    optimizer.step()  # combines no more
    optimizer.zero_grad()
    (net(ones()).sum() * 5).backward()
    optimizer.step()
    assert all(torch.equal(grad, value) for grad, value in zip(own, kept, strict=True))
    with optimizer.skip_synchronize():
        before = net[2].bias.detach().clone()
        net[2].bias.grad.fill_(float(RANK))
        optimizer.step()
    torch.testing.assert_close(net[2].bias.detach(), before - 0.1 * RANK)


@pytest.mark.parametrize("case", ["forgets", "adds", "is interrupted"])
def test_another_backward_after_synchronize_is_combined_too(strategy: ms.Strategy, case: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = mst.DistributedOptimizer(torch.optim.SGD([weight], 1.0), strategy=strategy)
    (weight * (RANK + 1.0)).sum().backward()
    with raising(KeyboardInterrupt(), "line", "_set_combined", 3 if case == "is interrupted" else 99):
        optimizer.synchronize()
    if case == "forgets":
        weight.grad = None  # as the zero_grad of a module does, of which the optimizer does not know
    (weight * (RANK + 1.0)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-(SIZE + 1) / 2]) * (1 if case == "forgets" else 2))


def test_a_gradient_that_is_a_conjugate_view_on_one_rank(strategy: ms.Strategy) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = mst.DistributedOptimizer(torch.optim.SGD([weight], 1.0), strategy=strategy, aggregation="SUM")
    view = torch.tensor([1 + 2j, 3 - 1j]).conj()
    weight.grad = view if RANK == 0 else view.resolve_conj()
    optimizer.step()
    assert weight.tolist() == [-SIZE * (1 - 2j), -SIZE * (3 + 1j)]


def test_closures(strategy: ms.Strategy) -> None:
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
    optimizer = mst.DistributedOptimizer(make(network().parameters()), strategy=strategy)
    assert optimizer.step(lambda: 2.0 * RANK) == SIZE - 1
    optimizer = mst.DistributedOptimizer(make(network().parameters()), aggregation="SUM", strategy=strategy)
    assert optimizer.step(lambda: 2.0 * RANK) == SIZE * (SIZE - 1), "as the gradients"
    with optimizer.skip_synchronize():
        assert optimizer.step(lambda: 2.0 * RANK) == 2.0 * RANK


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_gradients_stay_sparse_and_count_as_zeros_where_there_are_none(
    strategy: ms.Strategy, dtype: Any, aggregation: str
) -> None:
    table, other = (torch.nn.Embedding(SIZE + 1, 2, sparse=True, dtype=dtype) for _ in "ab")
    head, unused = torch.nn.Linear(2, 1, dtype=dtype), torch.nn.Linear(2, 1, dtype=dtype)
    parameters = [each for module in (table, other, head, unused) for each in module.parameters()]
    sgd = torch.optim.SGD(parameters, 1.0)
    optimizer = mst.DistributedOptimizer(sgd, strategy=strategy, aggregation=aggregation)
    wanted = [each.detach().clone() for each in (table.weight, other.weight, head.bias)]
    table(torch.tensor([RANK, RANK, SIZE])).sum().backward()
    if RANK == 0:
        (other(torch.tensor([SIZE])).sum() + head.bias.sum()).backward()
    optimizer.step()
    share = 1 / SIZE if aggregation == "MEAN" else 1
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-6
    wanted[0] -= share * torch.tensor([[2.0]] * SIZE + [[SIZE]])
    wanted[1][SIZE] -= share
    wanted[2] -= share
    for found, value in zip((table.weight, other.weight, head.bias), wanted, strict=True):
        torch.testing.assert_close(found.detach(), value, rtol=tolerance, atol=tolerance)
    assert table.weight.grad.is_sparse
    assert unused.weight.grad is None


def test_a_gradient_that_is_sparse_on_one_rank_is_dense(strategy: ms.Strategy) -> None:
    table = torch.nn.Embedding(7, 3)
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), strategy=strategy)
    table.sparse = RANK == 0
    table(torch.tensor([RANK, 6])).sum().backward()
    optimizer.synchronize()
    assert table.weight.grad.is_sparse == (SIZE == 1)
    found = table.weight.grad.to_dense()[:, 0] * SIZE
    torch.testing.assert_close(found, torch.tensor([1.0] * SIZE + [0.0] * (6 - SIZE) + [float(SIZE)]))


def test_frozen_parameters_of_any_dtype_and_a_group_that_is_added_later(strategy: ms.Strategy) -> None:
    net = network()
    for name, value in (("mask", torch.tensor([True, RANK == 0])), ("count", torch.tensor([RANK]))):
        net.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    added = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [added], "lr": 1.0})
    (net(ones()).sum() + (added * float(RANK)).sum()).backward()
    optimizer.step()
    assert net.mask.tolist() == [True, True]
    assert net.count.item() == 0
    assert added.tolist() == [-(SIZE - 1) / 2] * 2


def test_what_torch_asks_an_optimizer_for(strategy: ms.Strategy) -> None:
    """Schedulers, hooks and a GradScaler with a fused optimizer, which would unscale gradients itself."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = mst.DistributedOptimizer(torch.optim.Adam([weight], 0.5, fused=True), strategy=strategy)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 10)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    scaler.scale((weight * (RANK + 1.0)).sum()).backward()
    optimizer.synchronize()
    scaler.step(optimizer)
    scheduler.step()
    assert weight.grad.tolist() == [(SIZE + 1) / 2] * 3
    assert steps == [1]
    assert optimizer.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state = collections.defaultdict(dict)
    assert optimizer.state is optimizer.optimizer.state


@pytest.mark.mpi(min_size=2)
def test_models_and_steps_that_differ_are_named(strategy: ms.Strategy) -> None:
    other = torch.nn.Linear(2, 3 if RANK == 0 else 4)
    with pytest.raises(errors.CollectiveMismatchError, match=r"float32\[3, 2\]"):
        mst.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), strategy=strategy)
    net = network()
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    net(ones()).sum().backward()
    optimizer.step()
    if RANK == 1:
        net[0].weight.grad = torch.ones(()).double().expand(8, 6)
    with pytest.raises(errors.ShapeError, match="share memory"):
        optimizer.step()
    net[0].weight.grad = None
    twins = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1) for _ in "ab"]
    alike = [mst.DistributedOptimizer(each, strategy=strategy) for each in twins]
    with pytest.raises(errors.CollectiveMismatchError, match="optimizer"):
        alike[min(RANK, 1)].step()
    if RANK == 1:
        with pytest.raises(errors.CollectiveMismatchError, match="step 1"):
            optimizer.synchronize()
    else:
        with pytest.raises(errors.CollectiveMismatchError, match="step 1"):
            strategy.barrier()


def test_wrong_arguments_and_copies(strategy: ms.Strategy) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for refused, words, options in (
        (net, "optimizer", {}),
        (optimizer, "MAX", {"aggregation": "MAX"}),
        (optimizer, "wire", {"wire": "float8"}),
    ):
        with pytest.raises((errors.OptionTypeError, errors.OptionError), match=words):
            mst.DistributedOptimizer(refused, strategy=strategy, **options)
    made = mst.DistributedOptimizer(optimizer, strategy=strategy)
    with pytest.raises(errors.OptionTypeError, match="not distributed yet"):
        mst.DistributedOptimizer(made, strategy=strategy)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(errors.CopyError):
            copied(made)
