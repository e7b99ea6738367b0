"""run_replicas never hangs: calls that do not fit, replicas that leave or fail, impossible arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import SIZE

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas


@pytest.fixture
def alone() -> None:
    """What needs no MPI runs once, in the session on 1 rank."""
    if SIZE > 1:
        pytest.skip("runs in the session on 1 rank")


def caught(rank_does: Callable[[int, ms.Strategy], Any], n: int = 3) -> list[Any]:
    """What came of a program on each replica: an exception that it caught, or a result."""

    def program() -> Any:
        strategy = ms.MirroredStrategy()
        try:
            return rank_does(strategy.extended.communicator.rank, strategy)
        except Exception as error:
            return error

    return run_replicas(program, n)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("odd_one", range(3))
def test_a_mismatch_raises_on_every_replica_and_is_over_then(odd_one: int) -> None:
    def program(rank: int, strategy: ms.Strategy) -> Any:
        with pytest.raises(errors.CollectiveMismatchError, match=r"replica|rank") as raised:
            strategy.reduce("MEAN" if rank == odd_one else "SUM", np.ones(2))
        assert "test_over_threads_mistakes.py" in str(raised.value)
        return float(strategy.reduce("SUM", rank))

    assert caught(program) == [3.0] * 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("leaves", range(3))
def test_who_waits_for_one_that_has_left_is_told(leaves: int) -> None:
    endings = caught(lambda rank, strategy: "left" if rank == leaves else strategy.reduce("SUM", 1))
    for rank, ending in enumerate(endings):
        if rank == leaves:
            assert ending == "left"
        else:
            assert isinstance(ending, errors.CollectiveMismatchError)
            assert f"replica {leaves}: has come to its end" in str(ending)
            assert "waits at" in str(ending)


@pytest.mark.usefixtures("alone")
def test_replicas_that_wait_in_different_places_are_told() -> None:
    def program(rank: int, strategy: ms.Strategy) -> Any:
        other = ms.MirroredStrategy()
        with pytest.raises(errors.CollectiveMismatchError, match="no replica can go on"):
            (other if rank else strategy).barrier()
        strategy.barrier()
        other.barrier()
        return "met again"

    assert caught(program) == ["met again"] * 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_an_exception_comes_out_with_a_note(error: BaseException) -> None:
    def program() -> None:
        strategy = ms.MirroredStrategy()
        strategy.barrier()
        if strategy.extended.communicator.rank == 1:
            raise error
        strategy.barrier()

    with pytest.raises(type(error)) as raised:
        run_replicas(program, 3)
    assert raised.value is error
    assert error.__notes__ == ["raised on replica 1 of 3"]


@pytest.mark.usefixtures("alone")
def test_of_several_the_first_that_is_no_consequence() -> None:
    def program() -> None:
        rank = ms.MirroredStrategy().extended.communicator.rank
        if rank == 0:
            ms.MirroredStrategy().barrier()
        raise ValueError(f"of replica {rank}")

    with pytest.raises(ValueError, match="of replica 1") as raised:
        run_replicas(program, 3)
    assert "replica 1 of 3" in raised.value.__notes__[0]
    with pytest.raises(errors.CollectiveMismatchError) as mismatch:
        run_replicas(lambda: ms.MirroredStrategy().barrier(str(threading.get_ident())), 2)
    assert "replica 0 of 2" in mismatch.value.__notes__[-1]


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"fn": 5, "n": 2}, errors.OptionTypeError),
    ({"n": 0}, errors.OptionError),
    ({"n": -1}, errors.OptionError),
    ({"n": 2.5}, errors.OptionTypeError),
    ({"n": "3"}, errors.OptionTypeError),
    ({"n": None}, errors.OptionTypeError),
    ({"n": True}, errors.OptionTypeError),
    ({"n": 2, "nodes": [0]}, errors.OptionError),
    ({"n": 2, "nodes": 2}, errors.OptionTypeError),
]


@pytest.mark.parametrize(("arguments", "kind"), BAD, ids=lambda value: str(value))
def test_impossible_arguments(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="run_replicas"):
        run_replicas(**{"fn": lambda: None, **arguments})
