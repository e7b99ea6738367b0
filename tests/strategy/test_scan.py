"""scan: each rank gets the combination of the values of the ranks up to its own, in rank order."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import DTYPES, INTEGERS, RANK, RANKS, SIXTEEN_BITS, SIZE, OnNodes, bits, context, part_of, value_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.reduction import collectives as module

pytestmark = pytest.mark.mpi
OPS = ("SUM", "MIN", "MAX", "PROD")
NEUTRAL: dict[str, Any] = {"SUM": 0, "PROD": 1, "MIN": np.inf, "MAX": -np.inf}


def scan(strategy: ms.Strategy, *arguments: Any, **named: Any) -> Any:
    return strategy.run(lambda: context().scan(*arguments, **named))


def neutral(op: str, dtype: Any) -> Any:
    if dtype.kind in "iu" and op in ("MIN", "MAX"):
        return getattr(np.iinfo(dtype), {"MIN": "max", "MAX": "min"}[op])
    return NEUTRAL[op]


def expected(op: str, dtype: Any, parts: list[Array], exclusive: bool) -> Array:
    """Return what this rank gets, by the definition."""
    wide = np.dtype(np.float32) if dtype in SIXTEEN_BITS else dtype
    with np.errstate(all="ignore"):
        totals = list(accumulate([part.astype(wide) for part in parts], COMBINE[op]))
        if exclusive:
            totals = [np.full(parts[0].shape, neutral(op, dtype), wide), *totals]
        return np.asarray(totals[RANK]).astype(dtype)


@settings(max_examples=part_of(90))
@given(
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype.kind != "c"]),
    shape=st.sampled_from([(), (0,), (1,), (5,), (7, 3), (40_001,)]),
    op=st.sampled_from(OPS),
    exclusive=st.booleans(),
    piece=st.sampled_from([2**23, 1000]),
)
def test_values_of_the_ranks_before_in_rank_order(
    strategy: ms.Strategy, dtype: Any, shape: tuple[int, ...], op: str, exclusive: bool, piece: int
) -> None:
    parts = [value_of(rank, dtype, shape) for rank in RANKS]
    mine = parts[RANK].copy()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PIECE_BYTES", piece)
        found = scan(strategy, op, mine, exclusive)
    right = expected(op, dtype, parts, exclusive)
    assert (found.dtype, np.shape(found)) == (dtype, shape)
    assert bits(np.asarray(found)) == bits(right)
    assert bits(mine) == bits(parts[RANK])
    assert not np.may_share_memory(found, mine)
    if not exclusive:  # what all ranks have together is the last one's
        last = strategy.broadcast(found, root=SIZE - 1)
        if dtype.kind in "iu" or op in ("MIN", "MAX"):
            whole = strategy.run(lambda: context().all_reduce(op, mine))
            assert bits(np.asarray(last)) == bits(np.asarray(whole))


def test_zeros_and_nan_are_those_of_all_reduce(strategy: ms.Strategy) -> None:
    zeros = np.array([-0.0, 0.0, np.nan, 1.0]) if RANK == 0 else np.array([0.0, -0.0, 1.0, -np.nan])
    for op in ("MIN", "MAX"):
        last = strategy.broadcast(scan(strategy, op, zeros), root=SIZE - 1)
        if SIZE > 1:
            assert bits(last) == bits(strategy.run(lambda: context().all_reduce(op, zeros)))  # noqa: B023


def test_a_nest_with_a_variable_numbers_and_none(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.arange(3.0))
    value = {"v": variable, "none": None, "n": [RANK + 1, float(RANK), np.float32(2)], "z": 1 + 2j}
    found = scan(strategy, "SUM", value)
    np.testing.assert_array_equal(found["v"], np.arange(3.0) * (RANK + 1))
    assert found["none"] is None
    assert [type(each) for each in found["n"]] == [np.int64, np.float64, np.float32]
    assert found["n"] == [sum(range(1, RANK + 2)), sum(range(RANK + 1)), 2 * (RANK + 1)]
    assert found["z"] == (RANK + 1) * (1 + 2j)
    assert scan(strategy, "SUM", {"a": None}) == {"a": None}


@pytest.mark.parametrize(
    ("op", "value", "exclusive", "error", "words"),
    [
        ("MEAN", 1.0, False, errors.ReduceOpError, "divide a SUM by rank"),
        ("SUM", np.array([True]), False, errors.DTypeError, "numeric dtype"),
        ("SUM", 1.0, 1, errors.OptionTypeError, "True or False"),
        ("SUM", 1.0, np.ones(2), errors.OptionTypeError, "True or False"),
        ("MAX", 1j, False, errors.DTypeError, "have an order"),
        ("SUM", ms.IndexedSlices(np.ones((1, 2)), np.array([0]), (2, 2)), False, errors.UnsupportedError, "to_dense"),
    ],
)
@pytest.mark.parametrize("who", ["all ranks", "the last rank"])
def test_bad_input_is_refused_on_every_rank(
    strategy: ms.Strategy, op: Any, value: Any, exclusive: Any, error: Any, words: str, who: str
) -> None:
    is_odd = who == "all ranks" or RANK == SIZE - 1
    with pytest.raises(error, match=words):
        scan(strategy, op, value, exclusive) if is_odd else scan(strategy, "SUM", 1.0)
    assert scan(strategy, "SUM", 1) == RANK + 1


@pytest.mark.mpi(min_size=2)
def test_an_exclusive_scan_is_another_call(strategy: ms.Strategy) -> None:
    with pytest.raises(errors.CollectiveMismatchError, match="SUM, exclusive"):
        scan(strategy, "SUM", 1.0, RANK == 1)


def test_on_nodes_and_simulated_replicas() -> None:
    with OnNodes(RANKS, ms.MpiAllReduce()) as apart:
        for number in INTEGERS[:4]:
            assert scan(apart, "SUM", np.full(2, RANK + 1, number)).tolist() == 2 * [(RANK + 1) * (RANK + 2) // 2]

    def program() -> Any:
        strategy = ms.MirroredStrategy()
        return scan(strategy, "SUM", strategy.rank + 1).tolist(), scan(strategy, "MIN", 3, exclusive=True).tolist()

    assert ms.testing.run_replicas(program, 3) == [(1, 2**63 - 1), (3, 3), (6, 3)]
