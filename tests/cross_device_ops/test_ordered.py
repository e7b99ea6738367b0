"""OrderedAllReduce: the bits depend on the values alone, and the sums are as near as it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import islice, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replicas import (
    BFLOAT16,
    INTEGERS,
    RANK,
    RANKS,
    SIZE,
    OnNodes,
    all_raise,
    bits,
    context,
    made,
    part_of,
    rows,
    same_everywhere,
    value_of,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.reduction import collectives
from mpistrategy.testing import run_replicas

FLOATS = [np.dtype(dtype) for dtype in ("float16", BFLOAT16, "float32", "float64", "complex64", "complex128")]
REALS = [dtype for dtype in FLOATS if dtype.kind != "c"]
COUNT = 13

#: An unsigned integer as long as the real numbers of a dtype.
PATTERNS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
ORDERS: dict[str, Callable[[int], int]] = {
    "as they are": lambda rank: rank,
    "the other way": lambda rank: SIZE - 1 - rank,
    "turned": lambda rank: (rank + 1) % SIZE,
}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    """Strategies of all ranks, on one node and on made-up nodes."""
    makers: dict[str, Callable[[], ms.Strategy]] = {
        "one node": lambda: ms.MirroredStrategy(cross_device_ops=ms.OrderedAllReduce()),
        "each its node": lambda: OnNodes(RANKS, ms.OrderedAllReduce()),
        "two nodes": lambda: OnNodes([rank // 2 for rank in RANKS], ms.OrderedAllReduce()),
        "tiny packs": lambda: ms.MirroredStrategy(
            cross_device_ops=ms.OrderedAllReduce(), communication_options=ms.CommunicationOptions(bytes_per_pack=1)
        ),
    }
    yield from made(makers)


def random_floats(seed: Any, dtype: np.dtype[Any], size: int, kind: str = "all") -> Array:
    """Return floats of the whole range of exponents, of a narrow one, or any bits at all: NaN, infinities, zeros."""
    random = np.random.default_rng(seed)
    part = np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
    count = 2 * size if dtype.kind == "c" else size
    numbers = random.integers(0, 2 ** (8 * part.itemsize), count, PATTERNS[part.itemsize]).view(part)
    if kind == "narrow":
        numbers = random.standard_normal(count).astype(part)
    elif kind == "finite":  # a sum of a few stays finite
        most = 2.0**100 if part == BFLOAT16 else float(np.finfo(part).max) / 16
        with np.errstate(all="ignore"):
            numbers = np.where(np.abs(numbers.astype(np.float64)) <= most, numbers, part.type(1.5))
    else:
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]).astype(part)
        numbers = np.where(random.random(count) < 0.3, random.choice(special, count), numbers)
    return np.asarray(numbers.astype(part)).view(dtype)


def as_reals(array: Array) -> Array:
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def by_definition(arrays: Sequence[Array]) -> Array:
    """Return the sum as the documentation defines it: the values of a place, from the least on, into 64 bits."""
    dtype = arrays[0].dtype
    wire = wire_dtype(as_reals(arrays[0]).dtype)
    rows = np.sort(np.stack([as_reals(array).astype(wire) for array in arrays]), axis=0)
    with np.errstate(all="ignore"):
        total = np.zeros(rows.shape[1:], np.float64 if wire == np.float32 else wire)
        for row in rows:
            total += row
        real = np.where(np.isnan(total), wire.type(np.nan), total.astype(wire)).astype(as_reals(arrays[0]).dtype)
    return real.view(dtype)


def reduced(values: Any, op: str = "SUM", **options: Any) -> Any:
    hints = ms.CommunicationOptions(**options) if options else None
    return context().all_reduce(op, values, options=hints)


def on_replicas(contributions: Sequence[Any], op: str = "SUM", bytes_per_pack: int = 0) -> list[Any]:
    """Return what `all_reduce` gives on simulated replicas, one for each contribution."""

    def program() -> Any:
        strategy = ms.MirroredStrategy(cross_device_ops=ms.OrderedAllReduce())
        mine = contributions[strategy.extended.communicator.rank]
        return strategy.run(lambda: reduced(mine, op, bytes_per_pack=bytes_per_pack))

    return run_replicas(program, len(contributions))


# --------------------------------------------------------------------------------- simulated: any number of replicas


@pytest.mark.one_rank
@settings(max_examples=part_of(150))
@given(
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(["all", "finite", "narrow"]),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 5),
    zeros=st.integers(0, 5),  # of more than 8 values another method sorts
    cuts=st.lists(st.integers(0, COUNT), max_size=3),
    bytes_per_pack=st.sampled_from([0, 1, 24, 64]),
    data=st.data(),
)
def test_the_same_contributions_give_the_same_bits(
    dtype: np.dtype[Any],
    kind: str,
    seed: int,
    count: int,
    zeros: int,
    cuts: list[int],
    bytes_per_pack: int,
    data: st.DataObject,
) -> None:
    given_ = [random_floats([seed, number], dtype, COUNT, kind) for number in range(count)]
    wanted = bits(by_definition(given_))
    for total in on_replicas(given_):
        assert bits(total) == wanted
    more = [*given_, *[np.zeros(COUNT, dtype)] * zeros]
    order = data.draw(st.permutations(range(len(more))))
    for total in on_replicas([np.split(more[number], sorted(cuts)) for number in order], bytes_per_pack=bytes_per_pack):
        assert bits(np.concatenate(total)) == wanted


@pytest.mark.one_rank
@settings(max_examples=part_of(150))
@given(
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(["finite", "narrow"]),
    seed=st.integers(0, 2**32),
    n=st.integers(1, 8),
)
def test_the_sum_is_within_the_bound(dtype: np.dtype[Any], kind: str, seed: int, n: int) -> None:
    arrays = [random_floats([seed, number], dtype, COUNT, kind) for number in range(n)]
    with np.errstate(all="ignore"):
        scaled = [array if kind == "narrow" else (array / dtype.type(8)).astype(dtype) for array in arrays]
    total = as_reals(on_replicas(scaled)[0])
    for place, result in enumerate(total):
        values = [Fraction(float(as_reals(array)[place])) for array in scaled]
        exact, magnitudes = sum(values, Fraction()), sum(map(abs, values), Fraction())
        error, u = abs(Fraction(float(result)) - exact), Fraction(1, 2**53)
        if total.dtype == np.float64:
            bound = (n - 1) * u / (1 - (n - 1) * u) * magnitudes
        else:
            bound = abs(exact) / 2**24 + (n - 1) * magnitudes / 2**52 + Fraction(1, 2**150)
        if total.dtype.itemsize == 2:  # rounded once more: half a unit in the last of 8 or 11 digits
            digits, least = (8, 2**134) if total.dtype == BFLOAT16 else (11, 2**25)
            bound += (abs(exact) + bound) / 2**digits + Fraction(1, least)
        assert error <= bound


@pytest.mark.one_rank
@settings(max_examples=part_of(100))
@given(st.permutations(range(6)), st.integers(0, 2**32))
@example([0, 1, 2, 3, 4, 5], 0)
@pytest.mark.slow
def test_the_other_operations(order: list[int], seed: int) -> None:
    """Whatever the order, and however many ones a product has."""
    arrays = [random_floats([seed, number], np.dtype(np.float32), COUNT) for number in range(6)]
    for op, others in (("MIN", []), ("MAX", []), ("MEAN", []), ("PROD", [np.ones(COUNT, np.float32)] * 2)):
        wanted = bits(on_replicas(arrays, op)[0])
        assert bits(on_replicas([*others, *(arrays[number] for number in order)], op)[-1]) == wanted


@pytest.mark.one_rank
def test_zeros_infinities_and_nan() -> None:
    odd = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0]  # a NaN with something in it
    tiny = np.float64(5e-324)
    cases = [
        ([-0.0], 0.0), ([-0.0, -0.0], 0.0), ([-0.0, 0.0, -0.0], 0.0), ([tiny, -tiny, -0.0], 0.0),
        ([np.inf, 1.0, 2.0], np.inf), ([1.0, -np.inf], -np.inf), ([np.inf, 0.0, -np.inf], np.nan),
        ([odd], np.nan), ([1.0, odd, -np.inf], np.nan), ([-odd, odd, 0.0, 0.0], np.nan),
        ([tiny, tiny, tiny], 3 * tiny), ([1e308, 1e308, 1e308], np.inf),
    ]  # fmt: skip
    for values, wanted in cases:
        for turned in (values, values[::-1]):
            for total in on_replicas([np.array([value]) for value in turned]):
                assert bits(total) == bits(np.array([wanted])), values


# ------------------------------------------------------------------------------------------------------ real MPI


@pytest.mark.parametrize("where", ["one node", "each its node", "two nodes", "tiny packs"])
@pytest.mark.parametrize("size", [0, 1, 37, 300_017])
@pytest.mark.parametrize("order", ORDERS)
def test_under_mpi_the_bits_are_those_of_the_definition(
    strategies: dict[str, ms.Strategy], where: str, size: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first few of always the same contributions; as these do not know of ranks, so the sums do not."""
    monkeypatch.setattr(collectives, "PIECE_BYTES", 2**19)  # the largest goes in several pieces
    dtypes = FLOATS if size < 100 else FLOATS[2:3]
    turned = ORDERS[order](RANK)
    for dtype in dtypes:
        everyones = [random_floats([size, rank], dtype, size, "narrow") for rank in RANKS]
        mine = everyones[turned]
        before = mine.copy()
        total = strategies[where].run(lambda mine=mine: reduced(mine, wire="bfloat16"))  # which is not followed
        assert bits(mine) == bits(before)
        assert same_everywhere(total)
        sample = slice(None) if size < 100 else slice(size // 2 - 300, size // 2 + 300)
        assert bits(total[sample]) == bits(by_definition([array[sample] for array in everyones]))


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_weighted_mean_is_that_of_the_values(strategies: dict[str, ms.Strategy], size: int) -> None:
    found = set()
    for order in islice(permutations([0.1, 0.2, 0.3, 0.4][:SIZE]), 6):
        mine = np.full(size, order[RANK])
        found.add(bits(strategies["one node"].run(lambda mine=mine: context().all_reduce("MEAN", mine, weight=1.0))))
    assert len(found) == 1


@pytest.mark.parametrize(("op", "dtype"), rows(2, ["SUM", "MEAN", "MIN", "MAX", "PROD"], [*INTEGERS, *FLOATS]), ids=str)
def test_lists_destinations_and_out_give_the_same_bits(strategies: dict[str, ms.Strategy], op: str, dtype: Any) -> None:
    if np.dtype(dtype).kind == "c" and op not in ("SUM", "MEAN"):
        pytest.skip("no such operation")
    mine = [value_of(RANK, dtype, shape, seed) for seed, shape in enumerate([(3, 5), (), (70_001,), (0,), (7,)])]
    results: list[list[Any]] = []
    for strategy in strategies.values():
        together = strategy.run(lambda: reduced(mine, op))
        out = [np.empty_like(value) for value in together]
        strategy.run(lambda out=out: context().all_reduce(op, mine, out=out))
        pairs = [(ms.PerReplica((array,)), f"task:{SIZE - 1}") for array in mine]
        there = strategy.extended.batch_reduce_to(op, pairs)
        results += [together, out, [strategy.run(lambda array=array: reduced(array, op)) for array in mine]]
        results += [[np.asarray(value) for value in there]] if RANK == SIZE - 1 else []
    for result in results:
        assert [bits(value) for value in result] == [bits(value) for value in results[0]]
        assert [np.asarray(value).shape for value in result] == [each.shape for each in mine]


def test_rows_with_equal_indices_are_added(strategies: dict[str, ms.Strategy]) -> None:
    def slices(rank: int) -> ms.IndexedSlices:
        random = np.random.default_rng(rank)
        rows = rank + 2
        values = random_floats([11, rank], np.dtype(np.float64), rows * 30, "narrow").reshape(rows, 30)
        return ms.IndexedSlices(values, random.integers(0, 4, rows), (9, 3))

    everyones = [slices(rank) for rank in RANKS]
    for turned in (RANK, SIZE - 1 - RANK):
        mine = everyones[turned]
        for strategy in strategies.values():
            total = strategy.run(lambda mine=mine: reduced(mine))
            indices = np.concatenate([each.indices for each in everyones])
            values = np.concatenate([each.values for each in everyones])
            assert list(total.indices) == sorted(set(indices))
            for index, row in zip(total.indices, total.values, strict=True):
                assert bits(row) == bits(by_definition(list(values[indices == index])))
    for dtype, op, wanted in (("int8", "SUM", SIZE * (SIZE + 1)), ("complex128", "MEAN", SIZE + 1)):
        mine = ms.IndexedSlices(np.full((2, 2), RANK + 1).astype(dtype), np.array([3, 3]), (4, 2))
        row = strategies["one node"].run(lambda mine=mine, op=op: reduced(mine, op)).values
        assert np.array_equal(row, np.full((1, 2), wanted))
    none = ms.IndexedSlices(np.zeros((0, 2)), np.zeros(0, int), (4, 2))
    assert strategies["one node"].run(lambda: reduced(none)).values.shape == (0, 2)


def test_products_of_complex_numbers_are_refused(strategies: dict[str, ms.Strategy]) -> None:
    strategy = strategies["one node"]
    for value in (np.ones(3, complex), [1.0, np.ones(2, np.complex64)], 2j if RANK == 0 else 2.0):  # others are told
        all_raise(
            errors.UnsupportedError,
            lambda value=value: strategy.run(lambda: reduced(value, "PROD")),
            words=["MpiAllReduce()"],
        )
    assert float(strategy.run(lambda: reduced(2.0, "PROD"))) == 2.0**SIZE
