"""Helpers of the tests on several ranks: made-up values that every rank knows, and what came of a call everywhere."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from launching import a_row_a_rank
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.arrays import nest
from mpistrategy.arrays.devices import Device
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.over_mpi.ranks import MpiRanks

#: Whether to run all cases and examples (MPISTRATEGY_TEST_ALL=1), not the short lane's part of them.
ALL = bool(os.environ.get("MPISTRATEGY_TEST_ALL"))
long_lane = pytest.mark.skipif(not ALL, reason="not run: MPISTRATEGY_TEST_ALL=1 runs it")
#: For what is promised of the ranks of one node: MPICH can pretend that they are on several.
one_node = pytest.mark.skipif("MPIR_CVAR_NUM_CLIQUES" in os.environ, reason="of one node, and this pretends several")
several = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
INEXACT = ["float16", BFLOAT16, "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"]
DTYPES = [np.dtype(dtype) for dtype in [*INTEGERS, *INEXACT]]
SIXTEEN_BITS = [np.dtype(np.float16), BFLOAT16]
Made = TypeVar("Made")


def part_of(count: int) -> int:
    """Return how many of `count` examples to run: all with MPISTRATEGY_TEST_ALL=1, else a third or a sixth."""
    return count if ALL else count // (3 if SIZE <= 2 else 6)


def rows(every: int, *columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a table of cases: all with MPISTRATEGY_TEST_ALL=1, else each `every`-th of each direction.

    Of three columns or more, any two values of two of them meet in a row as long as another has `every` values.
    """
    table = itertools.product(*map(enumerate, columns))
    return [tuple(value for _, value in row) for row in table if ALL or sum(place for place, _ in row) % every == 0]


def context() -> ms.ReplicaContext:
    """Return the context of the step function that this is called in."""
    found = ms.get_replica_context()
    assert found is not None
    return found


# ------------------------------------------------------------------------------------- values that all ranks know


def value_of(rank: int, dtype: Any, shape: Sequence[int], seed: int = 0) -> Array:
    """Return rank's array: integers of the whole range; floats whose sums are exact in any order."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng([seed, rank])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(random.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    real = random.integers(-1000, 1000, shape) / 8
    if dtype.kind == "c":
        return np.asarray(real + 1j * random.integers(-1000, 1000, shape)).astype(dtype)
    return np.asarray(real).astype(dtype)


def expected(op: str, arrays: Sequence[Array]) -> Array:
    """Return the reduction of all ranks' arrays, in NumPy and by the definition."""
    dtype = arrays[0].dtype
    if dtype in SIXTEEN_BITS:  # summed and divided in float32, rounded once
        wide = [array.astype(np.float32) for array in arrays]
        with np.errstate(over="ignore"):
            return expected(op, wide).astype(dtype)
    summed = np.dtype(f"{dtype.kind}8") if op == "MEAN" and dtype.kind in "iu" else dtype
    with np.errstate(over="ignore"):
        total = np.sum(np.stack(arrays), axis=0, dtype=summed)
    if op == "SUM":
        return np.asarray(total)
    if dtype.kind in "iu":
        return np.asarray(np.true_divide(total, len(arrays)).astype(np.float32 if dtype.itemsize < 4 else np.float64))
    return np.asarray(total / dtype.type(len(arrays)))


def _every_second(array: Array) -> Array:
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


def _read_only(array: Array) -> Array:
    array = np.array(array)  # of NumPy's numbers, too, whose copies are numbers
    array.flags.writeable = False
    return array


def unaligned(array: Array) -> Array:
    """Return a copy that is contiguous and lies one byte behind where its dtype expects it; writeable."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    copied = memory[1:].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


#: The same values in other memory: a rank may bring each of these while its peers bring another.
LAYOUTS: list[Callable[[Array], Array]] = [
    np.ascontiguousarray,
    np.asfortranarray,
    _every_second,
    lambda array: np.flip(np.flip(array).copy()),  # negative strides
    lambda array: array if array.dtype == BFLOAT16 else array.astype(array.dtype.newbyteorder(">")),
    _read_only,
    unaligned,
]


def laid_out(array: Array, layout: int) -> Array:
    """Return `array` with another memory layout or byte order."""
    return np.asarray(LAYOUTS[layout % len(LAYOUTS)](array)).reshape(array.shape)


# ------------------------------------------------------------------------------------- what came of it, everywhere


def gather_texts(text: str) -> list[str]:
    """Return every rank's text, in rank order, on a path that is not the library's."""
    mine = np.frombuffer(text.encode() or b" ", np.uint8)
    counts = np.empty(SIZE, np.int64)
    MPI.COMM_WORLD.Allgather(np.array([mine.size], np.int64), counts)
    together = np.empty(int(counts.sum()), np.uint8)
    MPI.COMM_WORLD.Allgatherv(mine, [together, counts.tolist()])
    return [part.tobytes().decode() for part in np.split(together, np.cumsum(counts)[:-1])]


def bits(array: Any) -> bytes:
    """Return the bytes of an array; without the padding of an extended double, which is nobody's business."""
    array = np.asarray(array, order="C")
    if array.dtype.char not in "gG":
        return array.tobytes()
    places = array.reshape(-1, 1).view(np.longdouble).view(np.uint8)
    return places.reshape(-1, np.dtype("g").itemsize)[:, : 10 if np.finfo("g").nmant == 63 else None].tobytes()


def same_everywhere(value: Any) -> bool:
    """Return whether a nest has the same bits on every rank."""
    leaves, structure = nest.flatten(value)
    digest = hashlib.blake2b(structure.text.encode())
    for leaf in map(np.asarray, leaves):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(bits(leaf))
    return len(set(gather_texts(digest.hexdigest()))) == 1


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    error: type[Exception] | None
    text: str


def outcomes(function: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Call `function` and return how the call ended on every rank: an error class of ours, "RuntimeError", or None."""
    name, text = "", ""
    try:
        text = repr(function(*args))
    except Exception as error:
        name, text = type(error).__name__, a_row_a_rank(str(error))
    results = []
    for told in gather_texts(f"{name}\0{text}"):
        kind, _, words = told.partition("\0")
        results.append(Outcome(getattr(ms.errors, kind, Exception) if kind else None, f"{kind}: {words}"))
    return results


def all_refuse(
    kind: type[Exception], function: Callable[..., Any], *args: Any, words: Iterable[str] = ()
) -> list[Outcome]:
    """Check that a call raises an error of ours of some kind, also of Python's, with these words, on every rank."""
    ended = outcomes(function, *args)
    assert all(issubclass(end.error or object, kind) for end in ended), ended  # of others' errors no kind is known
    assert all(word in end.text for end in ended for word in words), ended
    return ended


def all_raise(error: type[Exception], function: Callable[..., Any], *args: Any, words: Iterable[str] = ()) -> str:
    """Check that a call raises an error of this class, with these words, on every rank; return the text of rank 0's."""
    ended = all_refuse(error, function, *args, words=words)
    assert {end.error for end in ended} == {error}, ended
    return ended[0].text


@contextmanager
def raising(error: BaseException, event: str, name: str, after: int = 0) -> Iterator[None]:
    """Raise in a function of this name, as the handler of a signal may, and say nothing where that comes out.

    Args:
        error: what is raised, once.
        event: "call", "return" or "line", as for `sys.settrace`.
        name: of functions of the package.
        after: how many such events come before.
    """
    before, left = sys.gettrace(), after

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal left
        if (what, frame.f_code.co_name) == (event, name) and "/mpistrategy/" in frame.f_code.co_filename:
            left -= 1
            if left < 0:
                sys.settrace(before)
                raise error
        return trace

    sys.settrace(trace)
    try:
        with suppress(type(error)):
            yield
    finally:
        sys.settrace(before)


def still_works(strategy: ms.Strategy) -> bool:
    """Return whether a reduction gives the right sum, here as on all ranks."""
    n = strategy.num_replicas_in_sync
    total = strategy.reduce("SUM", np.float64(strategy.extended.communicator.rank + 1))
    return float(total) == n * (n + 1) / 2


# ------------------------------------------------------------------------------------- strategies


def made(makers: Mapping[str, Callable[[], ms.Strategy]]) -> Iterator[dict[str, ms.Strategy]]:
    """Yield the strategies that were made, by name, and close them: what a fixture of several strategies does."""
    strategies = {name: make() for name, make in makers.items()}
    yield strategies
    for strategy in strategies.values():
        strategy.close()


def in_scope(strategy: ms.Strategy, make: Callable[[], Made]) -> Made:
    """Return what is made in the scope of a strategy."""
    with strategy.scope():
        return make()


def new_variable(strategy: ms.Strategy, value: Any, **options: Any) -> ms.Variable:
    """Make a variable of a strategy."""
    return in_scope(strategy, lambda: ms.Variable(value, **options))


class OnNodes(ms.Strategy):
    """All ranks, as if rank r sat on node ``node_of_rank[r]``; each on the processor, or on the first GPU."""

    def __init__(
        self,
        node_of_rank: Sequence[int],
        cross_device_ops: ms.CrossDeviceOps,
        kind: str = "CPU",
        *,
        contains_errors: bool = False,
    ) -> None:
        ranks = MpiRanks(MPI.COMM_WORLD, node_key=node_of_rank[RANK], contains_errors=contains_errors)
        ranks.devices = tuple(Device(rank, kind, 0) for rank in RANKS)
        super().__init__(ms.StrategyExtended(self, ranks, cross_device_ops))


@contextmanager
def pieces_of(strategy: ms.Strategy, max_count: int) -> Iterator[None]:
    """Make the transport cut its messages after `max_count` elements, as it does for real after 2^30."""
    ranks: Any = strategy.extended.communicator
    before, ranks.max_count = ranks.max_count, max_count
    try:
        yield
    finally:
        ranks.max_count = before


def in_step(strategy: ms.Strategy, function: Callable[[Any], Any]) -> Any:
    """Return what `function` makes of the replica context, in a step."""
    return strategy.run(lambda: function(ms.get_replica_context()))


def all_reduce(strategy: ms.Strategy, op: Any, value: Any, **more: Any) -> Any:
    """Return what all_reduce gives in a step."""
    return strategy.run(lambda: context().all_reduce(op, value, **more))


def numbers_of(shape: Any, dtype: str, rank: int = RANK) -> np.ndarray:
    """Return an array of small numbers, others on each rank."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 11 + rank + 1).astype(dtype)
