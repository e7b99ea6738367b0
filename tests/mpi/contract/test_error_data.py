"""Errors carry what their texts say as data: the same on all ranks, and through copies and pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, gather_texts, several

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


def raised(call: Callable[[], Any]) -> errors.MpiStrategyError:
    with pytest.raises(errors.MpiStrategyError) as caught:
        call()
    return caught.value


def test_the_parts_of_an_error() -> None:
    error = raised(lambda: ms.CommunicationOptions(timeout_seconds=-1))
    assert (error.where, error.found) == ("CommunicationOptions", "timeout_seconds=-1")
    assert error.expected == "seconds >= 0, or None"
    assert (errors.OptionError("a text").where, errors.OptionError("a text").fix) == ("", "")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@several
def test_calls_that_differ(strategy: ms.MirroredStrategy) -> None:
    odd = RANK == SIZE - 1
    value = {"w": np.ones((2, 3), "f4" if odd else "f8"), "n": 1}
    error = raised(lambda: strategy.reduce("MAX" if odd else "SUM", value))
    assert isinstance(error, errors.CollectiveMismatchError)
    assert [*error.calls] == list(range(SIZE))
    assert error.differ == ("op", "values")
    first, last = error.calls[0], error.calls[SIZE - 1]
    assert (first.call, first.op, first.structure) == ("Strategy.reduce", "SUM", "{'n':*,'w':*}")
    assert (first.dtypes, first.shapes) == (("int64", "float64"), ((), (2, 3)))
    assert (last.op, last.dtypes) == ("MAX", ("int64", "float32"))
    assert "test_error_data.py" in first.place
    assert "test_error_data.py" in first.site
    assert not first.left
    assert len(set(gather_texts(repr((error.calls, error.differ))))) == 1
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (again.calls, again.differ) == (error.calls, error.differ)


@several
def test_copies_that_differ(strategy: ms.MirroredStrategy) -> None:
    with strategy.scope():
        variables = [ms.Variable(np.zeros(3), name=name) for name in ("one", "two", "three")]
        variables[1].assign(np.full(3, float(RANK == SIZE - 1)))
    error = raised(lambda: strategy.assert_mirrored(variables))
    assert isinstance(error, errors.ReplicasDivergedError)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (one.variables, one.ranks) == (("two",), (SIZE - 1,))


@several
def test_a_rank_that_cannot_make_the_call(strategy: ms.MirroredStrategy) -> None:
    error = raised(lambda: strategy.reduce("SUM", "text" if RANK == SIZE - 1 else 1.0))
    assert error.rank == (None if RANK == SIZE - 1 else SIZE - 1)

    def failing() -> Any:
        if RANK == 0:
            raise KeyError("of rank 0")
        return 1.0

    with strategy.scope(), pytest.raises((KeyError, errors.RemoteError)) as caught:
        ms.Variable(failing)
    if RANK:
        told = caught.value
        assert isinstance(told, errors.RemoteError)
        assert (told.rank, told.error) == (0, "KeyError: 'of rank 0'")
