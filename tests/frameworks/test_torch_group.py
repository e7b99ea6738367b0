"""The process group of torch.distributed over MPI: its collectives, what torch builds on them, and mistakes."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpistrategy as ms

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
mst: Any = pytest.importorskip("mpistrategy.torch")

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
HAS_BACKENDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
several = pytest.mark.mpi(min_size=2)
# torch's own words about names of another version, sparse tensors, narrow complex ones, and its cache
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore:Sparse", "ignore:ComplexHalf", "ignore:Specified kernel"
    ),
    pytest.mark.usefixtures("group"),
]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]


def of(rank: int, dtype: Any = torch.float32, shape: tuple[int, ...] = (2, 3)) -> Any:
    """Return what a rank gives: small whole numbers, other ones on each rank."""
    count = int(np.prod(shape))
    values = torch.arange(count).reshape(shape) % 5 + rank + 1
    return (values % 2 == 0) if dtype is torch.bool else values.to(dtype)


def added(number: float = 1.0, group: Any = None) -> float:
    """Return the sum of a number of each rank of a group."""
    mine = torch.full((1,), float(number))
    dist.all_reduce(mine, group=group)
    return float(mine.item())


def stacked(dtype: Any = torch.float32, shape: tuple[int, ...] = (2, 3)) -> Any:
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    return torch.stack([of(rank, dtype, shape).to(wide) for rank in range(SIZE)])


REDUCED: dict[str, Callable[[Any], Any]] = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.sum(0) / SIZE,
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
}


@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("dtype", WHOLE + FLOATS, ids=str)
def test_all_reduce(op: str, dtype: Any) -> None:
    mine = of(RANK, dtype)
    work = dist.all_reduce(mine, op=getattr(dist.ReduceOp, op), async_op=True)
    assert work.wait()
    expected = REDUCED[op](stacked(dtype))
    if not dtype.is_floating_point:
        expected = expected.trunc()
    torch.testing.assert_close(mine, expected.to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_sums(dtype: Any) -> None:
    mine = of(RANK, dtype) * (1 + 2j)
    dist.all_reduce(mine)
    assert torch.equal(mine, (stacked(dtype).sum(0) * (1 + 2j)).to(dtype))
    lazy = (torch.ones(2, dtype=dtype) * 1j * (RANK + 1)).conj()
    rows = [torch.empty(2, dtype=dtype) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(lazy, rows, 0)
    assert rows is None or [row[0].item() for row in rows] == [-1j * (rank + 1) for rank in range(SIZE)]
    with pytest.raises((ms.errors.DTypeError, ValueError)):
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    mine = of(RANK)
    dist.all_reduce(mine, op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(mine, stacked().sum(0).float() / 2)


#: What an operation is of two bits, or of two truth values.
BITWISE: dict[str, Callable[[Any, Any], Any]] = {
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
    "SUM": operator.or_,
    "MAX": operator.or_,
    "PRODUCT": operator.and_,
    "MIN": operator.and_,
}


@pytest.mark.parametrize("op", BITWISE)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool], ids=str)
def test_bits_and_truth_values(op: str, dtype: Any) -> None:
    if dtype is not torch.bool and not op.startswith("B"):
        pytest.skip("no operation of bits")
    mine = of(RANK, dtype)
    dist.all_reduce(mine, op=getattr(dist.ReduceOp, op))
    assert torch.equal(mine, functools.reduce(BITWISE[op], [of(rank, dtype) for rank in range(SIZE)]))
    with pytest.raises(ms.errors.DTypeError):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)


def test_layouts() -> None:
    total = float(sum(range(1, SIZE + 1)))
    for made in (
        torch.ones(()),
        torch.ones(3, 4).t(),
        torch.ones(4, 6)[:, ::2],
        torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.ones(2, requires_grad=True),
        torch.ones(300_000),
        torch.ones(2**21 + 1),
        torch.ones(2**11, 2**11).t(),
    ):
        mine = made.detach() * (RANK + 1)
        mine.requires_grad_(made.requires_grad)
        before = mine.stride()
        dist.all_reduce(mine)
        assert (mine == total).all()
        assert mine.stride() == before
    dist.all_reduce(torch.empty(0, 3))
    with pytest.raises(ms.errors.ShapeError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(3))


def test_sparse() -> None:
    twice = [[0, RANK + 1, RANK + 1]]  # of which one row is made
    mine = torch.sparse_coo_tensor(twice, torch.ones(3, 3), (SIZE + 1, 3))
    dist.all_reduce(mine)
    expected = torch.full((SIZE + 1, 3), 2.0)
    expected[0] = SIZE
    assert torch.equal(mine.to_dense(), expected)


NARROW = [
    getattr(torch, name)
    for name in ("complex32", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    if hasattr(torch, name)
]


@pytest.mark.parametrize("dtype", [dtype for dtype in NARROW if "uint" in str(dtype)], ids=str)
def test_averages_that_torch_cannot_divide_are_refused(dtype: Any) -> None:
    with pytest.raises(ms.errors.DTypeError, match="AVG"):
        dist.all_reduce(torch.ones(3).to(dtype), op=dist.ReduceOp.AVG)
    assert added() == SIZE


def test_results_that_are_not_waited_for_yet() -> None:
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    lazy = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    dist.all_reduce(lazy)
    assert lazy.tolist() == [SIZE**2] * 2


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_dtypes_that_torch_itself_cannot_add(dtype: Any) -> None:
    mine = torch.full((3,), RANK + 1.0).to(dtype)
    dist.all_reduce(mine)
    assert mine.to(torch.complex64).tolist() == [SIZE * (SIZE + 1) / 2] * 3
    mine = torch.full((3,), RANK + 1.0).to(dtype)
    dist.broadcast(mine, SIZE - 1)
    assert mine.to(torch.complex64).tolist() == [SIZE] * 3


@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16], ids=str)
def test_roots(root: int, dtype: Any) -> None:
    mine = of(RANK, dtype)
    dist.broadcast(mine, root)
    assert torch.equal(mine, of(root, dtype))
    mine = of(RANK, dtype)
    gathered = [torch.empty_like(mine) for _ in range(SIZE)] if root == RANK else None
    dist.gather(mine, gathered, root)
    assert gathered is None or all(torch.equal(each, of(rank, dtype)) for rank, each in enumerate(gathered))
    scattered = torch.empty_like(mine)
    dist.scatter(scattered, [of(rank, dtype) for rank in range(SIZE)] if root == RANK else None, root)
    assert torch.equal(scattered, mine)
    if dtype is torch.float32:
        dist.reduce(mine, root)
        assert torch.equal(mine, stacked().sum(0).float() if root == RANK else of(RANK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_gathers(dtype: Any) -> None:
    uneven = [torch.empty(rank, 2, dtype=dtype) for rank in range(SIZE)]
    dist.all_gather(uneven, of(RANK, dtype, (RANK, 2)))
    assert all(torch.equal(each, of(rank, dtype, (rank, 2))) for rank, each in enumerate(uneven))
    together = torch.empty(SIZE * 2, 3, dtype=dtype)
    dist.all_gather_into_tensor(together, of(RANK, dtype))
    expected = torch.cat([of(rank, dtype) for rank in range(SIZE)])
    assert torch.equal(together, expected)
    in_place = torch.zeros(SIZE * 2, 3, dtype=dtype)
    part = in_place[2 * RANK : 2 * RANK + 2]
    part.copy_(of(RANK, dtype))
    dist.all_gather_into_tensor(in_place, part)
    assert torch.equal(in_place, expected)
    crossed = torch.zeros(SIZE * 2, 3, dtype=dtype)
    crossed[:2].copy_(of(RANK, dtype))
    dist.all_gather_into_tensor(crossed, crossed[:2])  # another part of the result than this rank's
    assert torch.equal(crossed, expected)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_reduce_scatter(op: str) -> None:
    rows = stacked(torch.float32, (SIZE, 4))
    expected = REDUCED[op](rows)[RANK].float()
    out = torch.empty(4)
    dist.reduce_scatter_tensor(out, of(RANK, torch.float32, (SIZE, 4)), op=getattr(dist.ReduceOp, op))
    torch.testing.assert_close(out, expected)
    whole = of(RANK, torch.float32, (SIZE, 4))
    dist.reduce_scatter_tensor(whole[RANK], whole, op=getattr(dist.ReduceOp, op))
    torch.testing.assert_close(whole[RANK], expected)
    uneven = [of(RANK, torch.float32, (rank + 1,)) for rank in range(SIZE)]
    out = torch.empty(RANK + 1)
    dist.reduce_scatter(out, uneven, op=getattr(dist.ReduceOp, op))
    torch.testing.assert_close(out, REDUCED[op](stacked(torch.float32, (RANK + 1,))).float())


def test_all_to_all() -> None:
    sent = torch.arange(SIZE) + SIZE * RANK
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [rank * SIZE + RANK for rank in range(SIZE)]
    counts, taken = list(range(SIZE)), [RANK] * SIZE
    received = torch.empty(sum(taken), 2)
    dist.all_to_all_single(received, torch.full((sum(counts), 2), float(RANK)), taken, counts)
    assert received[:, 0].tolist() == [rank for rank in range(SIZE) for _ in range(RANK)]
    outputs = [torch.empty(RANK, dtype=torch.bfloat16) for _ in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((rank,), RANK, dtype=torch.bfloat16) for rank in range(SIZE)])
    assert [each.tolist() for each in outputs] == [[rank] * RANK for rank in range(SIZE)]


@several
def test_messages() -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = of(RANK, torch.bfloat16)
    work = dist.isend(sent, after, tag=3)
    got = torch.empty_like(sent)
    assert dist.recv(got, before, tag=3) == before
    work.wait()
    assert torch.equal(got, of(before, torch.bfloat16))
    for _ in range(20):  # MPICH itself loses such messages between nodes now and then
        if RANK == 0 and HAS_BACKENDS:  # which forgets who has sent
            for _ in range(SIZE - 1):
                dist.irecv(torch.empty(2), tag=5).wait()
        elif RANK == 0:
            found = sorted(dist.recv(torch.empty(2), tag=5) for _ in range(SIZE - 1))
            assert found == list(range(1, SIZE))
        else:
            dist.send(torch.ones(2), 0, tag=5)
        dist.barrier()
    mine = torch.empty(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((3,), float(RANK)), after), dist.P2POp(dist.irecv, mine, before)]
    )
    for each in works:
        each.wait()
    assert mine.tolist() == [before] * 3
    dist.isend(torch.full((300_000,), float(RANK)), after)  # which nobody holds
    large = torch.empty(300_000)
    dist.recv(large, before)
    assert (large == before).all()
    to_self, mine = dist.isend(torch.ones(1), RANK, tag=9), torch.zeros(1)
    dist.irecv(mine, RANK, tag=9).wait()
    to_self.wait()
    assert mine.item() == 1


@several
@pytest.mark.parametrize(("room", "sent"), [(3, "of 8 bytes"), (1, "of more bytes")])
def test_a_message_of_another_length_is_refused(room: int, sent: str) -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    work = dist.isend(torch.ones(2), after)
    with pytest.raises(ms.errors.ShapeError, match=f"{sent} from rank {before}.*expected {4 * room} bytes"):
        dist.recv(torch.zeros(room), before)
    work.wait()


def test_a_group_has_its_methods_by_the_names_of_all_versions(group: Any) -> None:
    """Libraries call them without torch.distributed in between."""
    ours = group._get_backend(torch.device("cpu"))
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    mine, all_rows = of(RANK), torch.cat([of(rank) for rank in range(SIZE)])
    rows, wholes = [mine, -mine], [all_rows, -all_rows]
    parts = [SIZE * whole.chunk(SIZE)[RANK] for whole in wholes]
    gathers = "all_gather_single _allgather_base all_gather_single_coalesced allgather_into_tensor_coalesced"
    reductions = (
        "reduce_scatter_single _reduce_scatter_base reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced"
    )
    for names, given, wanted in ((gathers, rows, wholes), (reductions, wholes, parts)):
        for name in names.split():
            found = [torch.empty_like(each) for each in wanted]
            for pair in [(found, given)] if name.endswith("coalesced") else zip(found, given, strict=True):
                getattr(ours, name)(*pair).wait()
            assert torch.equal(torch.stack(found), torch.stack(wanted))
    columns = [[torch.empty(2, 3) for _ in "ab"] for _ in range(SIZE)]
    ours.allgather_coalesced(columns, [mine, -mine]).wait()
    assert all(torch.equal(two[1], -of(rank)) for rank, two in enumerate(columns))
    for name in ("all_to_all_single", "alltoall_base"):
        got = torch.empty(SIZE)
        getattr(ours, name)(got, torch.full((SIZE,), float(RANK)), [], []).wait()
        assert got.tolist() == list(range(SIZE))


def test_objects_and_coalescing() -> None:
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": rank} for rank in range(SIZE)]
    values = [RANK, "x"]
    dist.broadcast_object_list(values, SIZE - 1)
    assert values == [SIZE - 1, "x"]
    gathered = [None] * SIZE if RANK == SIZE - 1 else None
    dist.gather_object({"rank": RANK}, gathered, SIZE - 1)
    assert gathered is None or gathered == found
    scattered = [None]
    dist.scatter_object_list(scattered, found if RANK == 0 else None, 0)
    assert scattered == [{"rank": RANK}]
    some, others = torch.ones(2), torch.ones(3)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(some)
        dist.all_reduce(others)
    assert some.tolist() == [SIZE] * 2
    assert others.tolist() == [SIZE] * 3


@several
def test_groups_of_some_ranks() -> None:
    takes_order = "sort_ranks" in inspect.signature(dist.new_group).parameters  # not before torch 2.13
    part = dist.new_group([0, 1])
    backwards = dist.new_group(list(range(SIZE))[::-1], **({"sort_ranks": False} if takes_order else {}))
    alone = [dist.new_group([rank]) for rank in range(SIZE)]
    gc.collect()  # what only torch's C++ holds is still ours
    if RANK < 2:
        assert added(RANK + 1, part) == 3
        dist.destroy_process_group(part)
    assert dist.get_rank(backwards) == (SIZE - 1 - RANK if takes_order else RANK)
    together = torch.empty(SIZE)
    dist.all_gather_into_tensor(together, torch.full((1,), float(RANK)), group=backwards)
    assert together.tolist() == [dist.get_global_rank(backwards, number) for number in range(SIZE)]
    assert added(group=alone[RANK]) == 1


@several
@pytest.mark.slow
@pytest.mark.timeout(280)  # Open MPI polls, and takes its time where ranks share cores
def test_many_groups_are_made_and_freed() -> None:
    for number in range(200):
        made = dist.new_group()
        if not number % 20:
            assert added(group=made) == SIZE
        dist.destroy_process_group(made)


@several
def test_calls_that_differ_raise_on_all_ranks_before_data_move() -> None:
    for number, call in enumerate(
        (
            lambda: dist.all_reduce(torch.ones(2 + (RANK == 1))),
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64 if RANK else torch.float32)),
            lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if RANK else dist.ReduceOp.SUM),
            lambda: dist.all_reduce(torch.ones(2)) if RANK else dist.broadcast(torch.ones(2), 0),
            lambda: dist.broadcast(torch.ones(2), min(RANK, 1)),
        )
    ):
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"test_torch_group\.py"):
            call()
        assert added(number) == number * SIZE


@several
def test_errors_keep_their_type_through_torch() -> None:
    functional = pytest.importorskip("torch.distributed._functional_collectives")

    def coalesced() -> None:
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2 + (RANK == 1)))

    def in_a_hook() -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 1))
        model.register_comm_hook(None, lambda state, bucket: dist.all_reduce(torch.ones(2 + (RANK == 1))))
        model(torch.ones(2, 6)).sum().backward()

    for call in (
        coalesced,
        in_a_hook,
        lambda: functional.all_reduce(torch.ones(2 + (RANK == 1)), "sum", dist.group.WORLD).sum(),
        lambda: dist.all_reduce(torch.ones(2 + (RANK == 1)), async_op=True).wait(),
    ):
        with pytest.raises(ms.errors.CollectiveMismatchError):
            call()
        assert added() == SIZE


@several
def test_an_error_on_one_rank_is_raised_on_all() -> None:
    outputs = [torch.empty(2) for _ in range(SIZE - (RANK == 0))]
    with pytest.raises((ms.errors.ShapeError, ms.errors.RemoteError)):
        dist.all_gather(outputs, torch.ones(2))
    taken = [2 if RANK == 0 and rank == SIZE - 1 else 1 for rank in range(SIZE)]
    with pytest.raises(ms.errors.OptionError, match="parts of"):
        dist.all_to_all_single(torch.empty(sum(taken)), torch.ones(SIZE), taken, [1] * SIZE)
    dist.barrier()


def test_a_second_default_group_and_a_copy_are_refused(group: Any) -> None:
    with pytest.raises(ms.errors.ContextError):
        mst.init_process_group()
    with pytest.raises((TypeError, RuntimeError, ms.errors.MpiStrategyError)):
        copy.deepcopy(group)
