"""Tensors in the memory of a real GPU, which all ranks share: collectives and trainings beside the same on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gpu_here
import pytest
from replicas import RANK, SIZE

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
mst: Any = pytest.importorskip("mpistrategy.torch")
pytestmark = [
    pytest.mark.skipif(not gpu_here.IS_GPU or not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Sparse", "ignore:Specified kernel"),
]
#: So many cycles of its clock the GPU does nothing: some 50 ms.
A_WHILE = 100_000_000
LAST = SIZE - 1
Collective = Callable[[Any], Any]


def reduced(op: str, *, is_async: bool = False) -> Collective:
    def call(mine: Any) -> Any:
        work = dist.all_reduce(mine, getattr(dist.ReduceOp, op), async_op=is_async)
        if is_async:
            work.wait()
        return mine

    return call


def broadcast(mine: Any) -> Any:
    dist.broadcast(mine, LAST)
    return mine


def reduced_to_one(mine: Any) -> Any:
    dist.reduce(mine, LAST)
    return mine if RANK == LAST else torch.zeros_like(mine)


def gathered(mine: Any) -> Any:
    together = mine.new_empty(SIZE * mine.numel())
    dist.all_gather_into_tensor(together, mine.reshape(-1))
    return together


def part_of_the_sum(mine: Any) -> Any:
    part = mine.new_empty(mine.numel())
    dist.reduce_scatter_tensor(part, mine.reshape(-1).repeat(SIZE))
    return part


def exchanged(mine: Any) -> Any:
    found = mine.new_empty(SIZE * mine.numel())
    dist.all_to_all_single(found, mine.reshape(-1).repeat(SIZE))
    return found


def sent(mine: Any) -> Any:
    found = torch.empty_like(mine)
    works = [dist.isend(mine, (RANK + 1) % SIZE), dist.irecv(found, (RANK - 1) % SIZE)]
    for each in works:
        each.wait()
    return found


def coalesced(mine: Any) -> Any:
    others = [mine, mine.new_empty(0, 2), mine.reshape(-1)[:3].clone()]
    with dist.distributed_c10d._coalescing_manager():
        for each in others:
            dist.all_reduce(each)
    return torch.cat([each.reshape(-1) for each in others])


SUM, IN_BACKGROUND = reduced("SUM"), reduced("SUM", is_async=True)
#: One of each way: what is gathered or scattered by one rank goes as in all_to_all.
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": SUM,
    "async": IN_BACKGROUND,
    "broadcast": broadcast,
    "reduce": reduced_to_one,
    "all_gather_into_tensor": gathered,
    "reduce_scatter_tensor": part_of_the_sum,
    "all_to_all_single": exchanged,
    "isend": sent,
    "coalescing": coalesced,
}


def values(dtype: Any, device: str, count: int = 24) -> Any:
    """Return numbers whose sums are exact in each dtype, other ones on each rank."""
    return (torch.arange(count, device=device) % 5 + RANK + 1).to(dtype).reshape(4, -1)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("is_aside", [False, True], ids=["current", "side"])
def test_what_is_still_computed_is_waited_for(name: str, *, is_aside: bool) -> None:
    """The GPU writes the tensor long after the call, in the order of the stream, which reads the result there."""
    stream = torch.cuda.Stream() if is_aside else torch.cuda.current_stream()
    wanted = COLLECTIVES[name](values(torch.float32, "cpu"))
    for _ in range(3):
        mine, given = torch.full((4, 6), -1.0), values(torch.float32, "cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(A_WHILE)
            mine.copy_(given)
            found = COLLECTIVES[name](mine).clone()
            mine.fill_(-2)
        stream.synchronize()
        assert torch.equal(found.cpu(), wanted)


def test_a_work_lets_another_stream_wait() -> None:
    made, read = torch.cuda.Stream(), torch.cuda.Stream()
    mine = torch.zeros(1000)
    torch.cuda.synchronize()
    with torch.cuda.stream(made):
        torch.cuda._sleep(A_WHILE)
        mine.fill_(RANK + 1)
        work = dist.all_reduce(mine, async_op=True)
        torch.cuda._sleep(A_WHILE)
    with torch.cuda.stream(read):
        work.wait()
        found = mine.clone()
    read.synchronize()
    assert (found == SIZE * (SIZE + 1) / 2).all()


def by_fsdp(model: Any) -> Any:
    fsdp: Any = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no public FSDP2")
    mesh = dist.device_mesh.init_device_mesh("cuda", (SIZE,))
    for part in (model[0], model[2], model):
        fsdp.fully_shard(part, mesh=mesh)
    return model


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("wrap", [torch.nn.parallel.DistributedDataParallel, by_fsdp])
def test_a_wrapped_model_trains_as_one_process_with_all_rows(wrap: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    wrapped = wrap(copy.deepcopy(alone))
    for model, mine in ((alone, slice(None)), (wrapped, slice(4 * RANK, 4 * RANK + 4))):
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for step in range(20):
            rows = torch.randn(4 * SIZE, 6, generator=torch.Generator("cuda").manual_seed(step))
            optimizer.zero_grad()
            model(rows[mine]).square().mean().backward()
            optimizer.step()
    for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one), other, rtol=1e-4, atol=1e-5)
