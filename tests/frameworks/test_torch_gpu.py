"""Tensors in GPU memory, without a GPU: real tensors and autograd, whose memory the double of CuPy takes for a GPU's.

Torch works on such a tensor when its current stream has done what was put there before, and its copies are done when
somebody waits for that stream.  What is not in the order of the stream is not there when somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy_double
import cupy_here
import numpy as np
import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE

import mpistrategy as ms

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
mst: Any = pytest.importorskip("mpistrategy.torch")
python_dispatch: Any = pytest.importorskip("torch.utils._python_dispatch")
pytestmark = [
    cupy_here.double_only,
    pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="this torch makes no subclasses in dispatch modes"),
]
LAST = SIZE - 1
TOTAL = SIZE * (SIZE + 1) / 2
#: Torch's current stream.
STREAM = cupy_double.Stream(non_blocking=True)


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """A tensor that says that it is in GPU memory."""

    is_cuda, is_cpu = True, False
    #: How often torch has copied one to the host.
    copies = 0

    @property
    def device(self) -> Any:
        return torch.device("cuda", RANK)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to and args[1] == args[0].device:
            return args[0].to(*args[2:]) if args[2:] else args[0]
        if function in (torch.Tensor.to, torch.Tensor.cpu) and args[1:2] in ((), ("cpu",)):
            STREAM.synchronize()
            OnGpu.copies += 1
            return args[0].as_subclass(torch.Tensor).clone().to(*args[2:3] or [args[0].dtype])
        if function is torch.Tensor.tolist:  # reads the memory itself
            STREAM.synchronize()
        return super().__torch_function__(function, kinds, args, kwargs or {})

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        memory = memory_of(self)
        consumer = next(each for each in cupy_double._streams() if each.ptr == stream)
        consumer.wait_event(STREAM.record(cupy_double.Event()))
        return cupy_double.asarray(SimpleNamespace(__cuda_array_interface__=memory.__array_interface__, memory=memory))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, RANK)


def memory_of(tensor: Any) -> np.ndarray:
    with torch._C.DisableTorchFunctionSubclass():
        memory: np.ndarray = tensor.detach().as_subclass(torch.Tensor).numpy()
    return memory


class InOrder(python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Let all that torch computes, during backward as well, come after what is on its stream, and copies when asked."""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and isinstance(args[0], OnGpu):
            target, source = map(memory_of, args[:2])
            STREAM.put(lambda: np.copyto(target, source, casting="unsafe"), target)
            return args[0]
        STREAM.synchronize()
        return function(*args, **(kwargs or {}))


def to_gpu(module: Any) -> Any:
    """Move a module's parameters and buffers there."""
    for inner in module.modules():
        for name, tensor in inner._parameters.items():
            inner._parameters[name] = torch.nn.Parameter(tensor.detach().as_subclass(OnGpu))
        for name, tensor in inner._buffers.items():
            inner._buffers[name] = tensor.as_subclass(OnGpu)
    return module


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ms.MirroredStrategy]:
    """A strategy whose ranks have a GPU each, which torch and the double of CuPy see."""
    real = torch.from_dlpack

    def from_dlpack(array: Any) -> Any:
        if not isinstance(array, cupy_double.ndarray):
            return real(array)
        STREAM.wait_event(cupy_double.get_current_stream().record())
        tensor = torch.from_numpy(array._view).as_subclass(OnGpu)
        tensor.memory = array
        return tensor

    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=STREAM.ptr))
    with cupy_here.gpus() as strategy, InOrder():
        STREAM.device_id = RANK
        yield strategy


@pytest.fixture
def group(gpu: ms.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process group over such a strategy."""
    future = torch.futures.Future  # in C++ it asks CUDA
    monkeypatch.setattr(torch.futures, "Future", lambda *, devices: future())
    mst.init_process_group(gpu)
    yield
    dist.destroy_process_group()


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).double()


def trained(strategy: ms.Strategy | None, batches: int = 1, **options: Any) -> list[Any]:
    """Train on this rank's rows in GPU memory, or without a strategy on everybody's; return the parameters."""
    net = to_gpu(network()) if strategy else network()
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    if strategy:
        optimizer = mst.DistributedOptimizer(optimizer, net.named_parameters(), strategy=strategy, **options)
    x = torch.randn(4, SIZE, batches, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for rows in x[:, RANK : RANK + 1] if strategy else x:
        optimizer.zero_grad()
        for number in range(batches):
            (net(rows[:, number]).square().mean() / batches).backward()
        if strategy:
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return [tensor.detach().as_subclass(torch.Tensor).clone() for tensor in net.parameters()]


@pytest.mark.parametrize("batches", [1, 3])
def test_gradients_are_summed_there(gpu: ms.MirroredStrategy, batches: int) -> None:
    for mine, one in zip(trained(gpu, batches), trained(None, batches), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-12)


def test_starts_and_collectives(gpu: ms.MirroredStrategy) -> None:
    torch.manual_seed(RANK)
    net = to_gpu(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    memory = net[0].weight.data_ptr()
    mst.broadcast(net, LAST, strategy=gpu)
    torch.manual_seed(LAST)
    assert (net[0].weight == torch.nn.Linear(2, 3).weight).all()
    assert net[0].weight.data_ptr() == memory
    own = torch.full((2,), RANK + 1.0).as_subclass(OnGpu)
    total = mst.all_reduce({"x": own}, "SUM", strategy=gpu)["x"]
    assert isinstance(total, OnGpu)
    assert total.tolist() == [TOTAL, TOTAL]
    gathered = mst.all_gather(own, strategy=gpu)
    assert isinstance(gathered, OnGpu)
    assert gathered.tolist() == [rank + 1.0 for rank in range(SIZE) for _ in "ab"]
    mst.all_reduce(own, "SUM", strategy=gpu, out=own)
    assert own.tolist() == [TOTAL, TOTAL]
    nest = mst.broadcast({"a": torch.full((2,), float(RANK)).as_subclass(OnGpu)}, LAST, strategy=gpu)
    assert isinstance(nest["a"], OnGpu)
    assert nest["a"].tolist() == [LAST, LAST]


def test_checkpoints_are_restored_in_place(gpu: ms.MirroredStrategy, tmp_path: Path) -> None:
    folder = shared_folder(tmp_path) / "c"
    saved, extra = to_gpu(network()), torch.arange(3.0).as_subclass(OnGpu)
    with gpu.scope():
        ms.Checkpoint(net=saved, extra=extra).save(folder)
    resumed, other = to_gpu(network()), torch.zeros(3).as_subclass(OnGpu)
    memory = [tensor.data_ptr() for tensor in (*resumed.parameters(), other)]
    with torch.no_grad():
        for tensor in resumed.parameters():
            tensor.fill_(RANK)
    with gpu.scope():
        ms.Checkpoint(net=resumed, extra=other).restore(folder)
    assert memory == [tensor.data_ptr() for tensor in (*resumed.parameters(), other)]
    for mine, wanted in zip((*resumed.parameters(), other), (*saved.parameters(), extra), strict=True):
        assert (mine == wanted).all()


class Verbs:
    """The collectives, by the methods of the group: torch's functions hide from them what class a tensor has."""

    @staticmethod
    def all_reduce(*tensors: Any, op: Any = None) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op is None else op
        dist.group.WORLD.allreduce(list(tensors), options).wait()

    @staticmethod
    def reduce(tensor: Any, root: int) -> None:
        options = dist.ReduceOptions()
        options.rootRank = root
        dist.group.WORLD.reduce([tensor], options).wait()

    @staticmethod
    def broadcast(tensor: Any, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        dist.group.WORLD.broadcast([tensor], options).wait()

    @staticmethod
    def all_gather(found: list[Any], mine: Any) -> None:
        dist.group.WORLD.allgather([found], [mine]).wait()

    @staticmethod
    def reduce_scatter(part: Any, whole: Any) -> None:
        dist.group.WORLD.reduce_scatter([part], [list(whole.chunk(SIZE))]).wait()

    @staticmethod
    def all_to_all(found: list[Any], sent: list[Any]) -> None:
        dist.group.WORLD.alltoall(found, sent).wait()


def later(value: Any) -> Any:
    """Return a tensor there, which gets its numbers when the stream comes to them."""
    found = torch.zeros_like(value).as_subclass(OnGpu)
    found.copy_(value)
    return found


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.int8, torch.bool, torch.complex64]
)
def test_collectives_of_a_process_group_work_there(dtype: Any) -> None:
    """None goes by the host in torch's hands, and all wait for what the stream has still to write."""
    own = [(torch.arange(6) % 3 + rank).to(dtype).view(2, 3) for rank in range(SIZE)]
    total = torch.stack(own).any(0) if dtype is torch.bool else torch.stack(own).sum(0).to(dtype)
    OnGpu.copies = 0
    mine = later(own[RANK])
    Verbs.all_reduce(mine)
    crossed = later(own[RANK]).t()
    Verbs.all_reduce(crossed)
    from_last = later(own[RANK])
    Verbs.broadcast(from_last, LAST)
    together = later(torch.zeros(2 * SIZE, 3, dtype=dtype))
    Verbs.all_gather(list(together.chunk(SIZE)), later(own[RANK]))
    uneven = [later(torch.zeros(rank, 3, dtype=dtype)) for rank in range(SIZE)]
    Verbs.all_gather(uneven, later(own[0].repeat(SIZE, 1)[:RANK]))
    part = later(torch.zeros(2, 3, dtype=dtype))
    Verbs.reduce_scatter(part, later(own[RANK].repeat(SIZE, 1)))
    others = [later(own[RANK][0]), later(own[RANK][1])]
    Verbs.all_reduce(*others)
    assert OnGpu.copies == 0
    STREAM.synchronize()
    for found, wanted in (
        *((mine, total), (crossed, total.t()), (from_last, own[LAST]), (together, torch.cat(own)), (part, total)),
        *((each, own[0].repeat(SIZE, 1)[:rank]) for rank, each in enumerate(uneven)),
        *zip(others, total, strict=True),
    ):
        assert isinstance(found, OnGpu)
        assert torch.equal(found.as_subclass(torch.Tensor), wanted)


@pytest.mark.usefixtures("group")
def test_other_operations_and_verbs_there() -> None:
    for op, wanted in (
        (dist.ReduceOp.AVG, TOTAL // SIZE),
        (dist.ReduceOp.MAX, SIZE),
        (dist.ReduceOp.BOR, max(RANK, SIZE, 3 if SIZE > 1 else 1) if SIZE < 3 else 3),
    ):
        mine = later(torch.full((3,), RANK + 1))
        Verbs.all_reduce(mine, op=op)
        assert mine.tolist() == [wanted] * 3
    mine = later(torch.full((3,), RANK + 1.0))
    Verbs.all_reduce(mine, op=dist._make_nccl_premul_sum(0.5))
    assert mine.tolist() == [TOTAL / 2] * 3
    mine = later(torch.full((3,), RANK + 1.0))
    Verbs.reduce(mine, LAST)
    assert mine.tolist() == [TOTAL if RANK == LAST else RANK + 1.0] * 3
    found = [later(torch.zeros(2)) for _ in range(SIZE)]
    Verbs.all_to_all(found, [later(torch.full((2,), RANK + rank / 8)) for rank in range(SIZE)])
    assert [each.tolist() for each in found] == [[rank + RANK / 8] * 2 for rank in range(SIZE)]


@pytest.mark.usefixtures("group")
@pytest.mark.mpi(min_size=2)
def test_calls_that_differ_raise_on_all_ranks_before_data_move() -> None:
    for call in (
        lambda: Verbs.all_reduce(later(torch.ones(2 + (RANK == 1)))),
        lambda: Verbs.all_reduce(torch.ones(2) if RANK else later(torch.ones(2))),
        lambda: Verbs.all_reduce(later(torch.ones(2)), op=dist.ReduceOp.AVG if RANK else dist.ReduceOp.SUM),
        lambda: Verbs.broadcast(later(torch.ones(2, dtype=torch.int32 if RANK else torch.float32)), 0),
        lambda: Verbs.all_gather([later(torch.ones(2 + (RANK == 0)))] * SIZE, later(torch.ones(2 + (RANK == 0)))),
    ):
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"test_torch_gpu\.py"):
            call()
        mine = later(torch.ones(1))
        Verbs.all_reduce(mine)
        assert mine.tolist() == [SIZE]
