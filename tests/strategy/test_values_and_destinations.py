"""What reduce_to, batch_reduce_to and broadcast_to take as values and destinations, and words for what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from replicas import RANK, RANKS, SIZE, new_variable, several

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi
TOTAL = sum(RANKS) + SIZE


OPS: list[tuple[Any, str]] = [(MPI.SUM, "'SUM'"), ("MPI.MAX", "'MAX'"), ("MAXLOC", "mpi4py"), (MPI.LAND, "mpi4py")]
SLICES = ms.IndexedSlices(np.ones(1), [0])


def plain(value: Any) -> Any:
    """Return a result without its containers, as lists and numbers."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if value is None:
        return None
    assert isinstance(value, ms.Mirrored)
    return np.asarray(value).tolist()


def nest_of(number: float) -> Any:
    return {"b": [np.full(2, number), (number, None)], "a": 1}


def test_numbers_and_nests_are_reduced(strategy: ms.Strategy) -> None:
    to, mine = strategy.extended, RANK + 1.0
    with strategy.scope():
        v = ms.Variable(np.zeros(2))
        sums = {"b": [[TOTAL] * 2, (TOTAL, None)], "a": SIZE}
        for where in (nest_of(mine), v, "task:0"):
            reduced = to.reduce_to("SUM", nest_of(mine), where)
            if RANK == 0 or not isinstance(where, str):
                assert plain(reduced) == sums
                continue
            with pytest.raises(errors.PlacementError):
                plain(reduced)
        same = nest_of(mine)
        assert plain(to.reduce_to("SUM", same, same)) == sums
        assert plain(to.reduce_to("SUM", mine, float(mine))) == TOTAL
        assert plain(to.reduce_to("MEAN", RANK, 0)) == sum(RANKS) / SIZE
        assert plain(to.reduce_to("SUM", [1.0, 2.0], [1.0, 2.0])) == [SIZE, 2.0 * SIZE]
        assert plain(to.broadcast_to(RANK, RANK)) == 0
        batch = [(mine, mine), (None, v), (nest_of(mine), v), (np.ones(1), v)]
        assert plain(to.batch_reduce_to("SUM", batch)) == [TOTAL, None, sums, [SIZE]]
        assert to.batch_reduce_to("SUM", [(None, v)]) == [None]
        assert plain(strategy.extended.cross_device_ops.reduce("SUM", mine, mine)) == TOTAL
        with pytest.raises(errors.DestinationError, match="task:0"):
            to.reduce_to("SUM", np.ones(2), 0)  # rank 0, or every rank?


@several
@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda s: s.extended.reduce_to("SUM", np.ones(2), s.extended.worker_devices), "strategy.devices_by_rank"),
        (lambda s: s.extended.broadcast_to(np.ones(2), s.extended.worker_devices[0]), "strategy.devices_by_rank"),
        (lambda s: s.reduce("SUM", sum([0.5] if RANK == 0 else [])), r"sum\(parts, start=0.0\)"),
        (lambda s: s.reduce("SUM", {"a": 1.5, "b": 1 if RANK else 1.5}), r"float\(x\)"),
    ],
)
def test_calls_that_differ_name_the_usual_cure(
    strategy: ms.Strategy, call: Callable[[ms.Strategy], Any], cure: str
) -> None:
    with strategy.scope(), pytest.raises(errors.CollectiveMismatchError, match=cure):
        call(strategy)


def test_words_for_what_is_written_elsewhere(strategy: ms.Strategy) -> None:
    objects = np.array([1, None], object)
    v = new_variable(strategy, np.zeros(2))
    to: Any = strategy.extended
    words: list[tuple[Callable[[], Any], type[Exception], str]] = [
        *((lambda op=op: strategy.reduce(op, 1.0), errors.ReduceOpError, word) for op, word in OPS),
        (lambda: to.broadcast_to({"a": np.ones(2)}, "CPU:0"), errors.LeafError, "of dtype object"),
        (lambda: strategy.reduce("SUM", objects), errors.LeafError, "of dtype object"),
        (lambda: v.assign(objects), errors.LeafError, "of dtype object"),
        (lambda: ms.Variable(objects), errors.LeafError, "of dtype object"),
        (lambda: v.assign(np.ones(2), use_locking=True), TypeError, "use_locking"),  # type: ignore[call-arg]
        (lambda: v.scatter_add(SLICES, use_locking=True), TypeError, "use_locking"),  # type: ignore[call-arg]
        (lambda: ms.optimizers.SGD(0.1, use_locking=True), TypeError, "Leave it out"),  # type: ignore[call-arg]
        (lambda: ms.DistributionStrategy, AttributeError, "MirroredStrategy"),  # type: ignore[attr-defined]
    ]
    for call, error, word in words:
        with strategy.scope(), pytest.raises(error, match=word):
            call()
