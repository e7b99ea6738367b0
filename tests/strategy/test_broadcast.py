"""Strategy.broadcast, and the short names of what a strategy knows."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, OnNodes, in_step, outcomes, part_of, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)

DTYPES = ["?", "i1", "u8", "f2", ml_dtypes.bfloat16, "f4", "f8", "c16", "S3", "U2", "M8[s]", [("a", "i4"), ("b", "f8")]]


@pytest.mark.parametrize("root", RANKS)
def test_every_rank_gets_the_value_of_one(strategy: ms.MirroredStrategy, root: int) -> None:
    with strategy.scope():
        variable = ms.Variable(np.zeros(3))
    strategy.extended.update(variable, lambda v: v.assign(np.full(3, RANK + 1.0)))
    given = {"n": RANK, "x": RANK / 2, "large": np.full((300, 300), RANK), "v": variable, "more": [np.arange(3) + RANK]}
    found = strategy.broadcast(given, root)
    assert [type(each) for each in found.values()] == [np.int64, np.float64, np.ndarray, np.ndarray, list]
    assert (found["n"], found["x"], found["v"].tolist()) == (root, root / 2, [root + 1.0] * 3)
    np.testing.assert_array_equal(found["large"], np.full((300, 300), root))
    assert found["more"][0].tolist() == [root, root + 1, root + 2]
    found["more"][0][:] = -1  # plain memory of its own
    assert np.all(variable.numpy() == RANK + 1)


@settings(max_examples=part_of(60), deadline=None)
@given(data=st.data())
def test_any_dtypes_and_shapes(strategy: ms.MirroredStrategy, data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 5), max_size=3)
    layouts = data.draw(st.lists(st.tuples(st.sampled_from(range(len(DTYPES))), shapes), max_size=5), label="layouts")
    root = data.draw(st.sampled_from(RANKS), label="root")
    dtypes = [(np.dtype(DTYPES[number]), tuple(shape)) for number, shape in layouts]

    def value(rank: int) -> list[Any]:
        random = np.random.default_rng(rank)
        return [
            np.frombuffer(random.integers(0, 2, int(np.prod(shape)) * dtype.itemsize, np.uint8).tobytes(), dtype)
            .reshape(shape)
            .copy("F")
            for dtype, shape in dtypes
        ]

    found = strategy.broadcast(value(RANK), root)
    for one, wanted in zip(found, value(root), strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def test_in_any_context_and_across_nodes(strategy: ms.MirroredStrategy) -> None:
    assert in_step(strategy, lambda _: strategy.broadcast(RANK, SIZE - 1)) == SIZE - 1
    assert in_step(strategy, lambda ctx: ctx.merge_call(lambda s: s.broadcast(RANK + 1.0))) == 1.0
    with strategy.scope():
        assert strategy.broadcast(RANK) == 0
    nodes = OnNodes([rank % 2 for rank in RANKS], ms.MpiAllReduce())
    assert nodes.broadcast([np.full(5, RANK), RANK], SIZE - 1)[0].tolist() == [SIZE - 1] * 5
    nodes.close()
    assert ms.OneDeviceStrategy().broadcast({"a": 3}) == {"a": 3}


SLICES = ms.IndexedSlices(np.ones((1, 2)), np.zeros(1, int), (3, 2))
BAD: dict[str, Any] = {
    "no rank": (lambda s: s.broadcast(1.0, SIZE), errors.OptionError),
    "below 0": (lambda s: s.broadcast(1.0, -1), errors.OptionError),
    "no int": (lambda s: s.broadcast(1.0, 0.5), errors.OptionTypeError),
    "a bool": (lambda s: s.broadcast(1.0, True), errors.OptionTypeError),
    "an object": (lambda s: s.broadcast({"a": object()}), errors.LeafError),
    "slices": (
        lambda s: s.broadcast(ms.IndexedSlices(np.ones((1, 2)), np.zeros(1, int), (3, 2))),
        errors.UnsupportedError,
    ),
    "a name": (lambda s: s.broadcast(1.0, name=3), errors.OptionTypeError),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_raises_on_every_rank(strategy: ms.MirroredStrategy, what: str) -> None:
    call, error = BAD[what]
    assert {one.error for one in outcomes(call, strategy)} == {error}
    if SIZE > 1:
        ended = outcomes(call, strategy) if RANK == SIZE - 1 else outcomes(strategy.broadcast, 1.0)
        assert {one.error for one in ended} == {error}
    assert still_works(strategy)


@several
@pytest.mark.parametrize("what", ["shape", "dtype", "structure", "root"])
def test_calls_that_differ_raise_on_every_rank(strategy: ms.MirroredStrategy, what: str) -> None:
    odd = RANK == SIZE - 1
    value: dict[str, Any] = {
        "shape": np.ones(3 if odd else 4),
        "dtype": np.ones(3, "f4" if odd else "f8"),
        "structure": [1.0] if odd else (1.0,),
        "root": 1.0,
    }
    ended = outcomes(strategy.broadcast, value[what], int(odd and what == "root"))
    assert {one.error for one in ended} == {errors.CollectiveMismatchError}
    assert still_works(strategy)


@settings(max_examples=part_of(30))
@given(
    value=st.recursive(
        st.one_of(
            st.none(),
            st.integers(-9, 9),
            st.floats(-9, 9),
            st.booleans(),
            st.text("ab\0é", min_size=1, max_size=3),
            st.builds(
                np.ones,
                st.tuples(st.integers(0, 3)),
                st.sampled_from(["f4", "i1", ">i8", ml_dtypes.bfloat16, "S3", "c8"]),
            ),
            st.builds(np.float32, st.floats(0, 1, width=16)),
        ),
        lambda each: st.one_of(
            st.lists(each, max_size=3),
            st.tuples(each, each),
            st.dictionaries(st.one_of(st.text("ab", max_size=2), st.integers(0, 9)), each, max_size=3),
        ),
        max_leaves=6,
    ).filter(lambda value: value is not None),
    root=st.integers(0, 3),
    has=st.integers(0, 3),
)
def test_ranks_that_give_none_get_what_the_root_has(strategy: ms.Strategy, value: Any, root: int, has: int) -> None:
    root, is_known = root % SIZE, RANK in (root % SIZE, has % SIZE)
    wanted = strategy.broadcast(value, root)
    found = strategy.broadcast(value if is_known else None, root)
    assert repr(found) == repr(wanted)
    assert [getattr(leaf, "dtype", None) for leaf in nest.flatten(found)[0]] == [
        getattr(leaf, "dtype", None) for leaf in nest.flatten(wanted)[0]
    ]


@pytest.mark.skipif(SIZE == 1, reason="one rank has its own value")
def test_what_cannot_be_told_to_ranks_that_give_none_raises_everywhere(strategy: ms.Strategy) -> None:
    def of_root(value: Any) -> Any:
        return value if RANK == 0 else None

    record = namedtuple("record", "x")
    for value in (record(1), {frozenset({1}): 1.0}, np.zeros(1, [("a", int)]), OrderedDict(a=1)):
        with pytest.raises(errors.UnsupportedError, match="Give every rank a value of this structure"):
            strategy.broadcast(of_root(value))
        assert still_works(strategy)
    for value in (object(), None):
        with pytest.raises(errors.LeafError, match="the value"):
            strategy.broadcast(of_root(value))
    if SIZE > 2:  # the ranks that have values compare theirs
        with pytest.raises(errors.CollectiveMismatchError, match=r"float64\[3\]"):
            strategy.broadcast(None if RANK == 1 else np.ones(2 + (SIZE - 1 == RANK)))
    with pytest.raises(errors.CollectiveMismatchError, match="collective"):
        strategy.broadcast(None) if RANK else strategy.reduce("SUM", 1.0)
    assert still_works(strategy)
