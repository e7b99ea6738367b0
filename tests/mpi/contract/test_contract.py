"""The contract between the ranks where it is easily broken: threads, user code, equal names, kept errors, ends."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from replicas import RANK, SIZE, new_variable, several, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.mpi_channel import MpiControlChannel

pytestmark = pytest.mark.mpi


def test_threads_with_a_strategy_each_do_not_meet() -> None:
    made = [ms.MirroredStrategy() for _ in range(2)]

    def totals(which: int) -> list[float]:
        return [float(made[which].reduce("SUM", 10.0**which)) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(totals, range(2))] == [[SIZE] * 20, [10.0 * SIZE] * 20]
    for strategy in made:
        strategy.close()


class Declares(ms.optimizers.SGD):
    """An optimizer with a setting of its own."""

    shrinking: float = 1.0


@several
def test_attributes_of_the_program_on_an_optimizer_are_not_compared(strategy: ms.MirroredStrategy) -> None:
    with strategy.scope():
        weights, optimizer = ms.Variable(np.zeros(2)), Declares(0.1)
    optimizer.last_loss = 0.5 + RANK  # type: ignore[attr-defined]
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
    assert (weights.numpy() == -0.1 * SIZE).all()
    optimizer.shrinking = 1.0 + RANK
    with pytest.raises(errors.CollectiveMismatchError, match="shrinking"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
    assert (weights.numpy() == -0.1 * SIZE).all()


@several
def test_variables_of_one_name_are_told_apart(strategy: ms.MirroredStrategy) -> None:
    first, second = (new_variable(strategy, 0.0, name="same", aggregation="SUM") for _ in range(2))
    mine = first if RANK == 0 else second
    with pytest.raises(errors.CollectiveMismatchError, match="name"):
        strategy.run(lambda: mine.assign(1.0))
    with strategy.scope():
        metrics = [ms.metrics.Mean(), ms.metrics.Mean()]
    with pytest.raises(errors.CollectiveMismatchError, match="name"):
        metrics[min(RANK, 1)].result()


@several
def test_an_error_object_raised_twice_is_told_twice(strategy: ms.MirroredStrategy) -> None:
    mine = ValueError("kept")

    def initial_value() -> float:
        if RANK == 0:
            raise mine
        return 1.0

    for _ in range(2):
        with pytest.raises(ValueError if RANK == 0 else errors.RemoteError, match="kept"):
            new_variable(strategy, initial_value)


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
def test_the_default_strategy_stays_open() -> None:
    ms.get_strategy().close()
    assert ms.get_strategy().reduce("SUM", 1.0) == 1.0


@several
def test_a_close_that_not_all_make_is_no_hang() -> None:
    strategy = ms.MirroredStrategy()
    call = strategy.close if RANK == 0 else lambda: strategy.reduce("SUM", 1.0)
    with pytest.raises(errors.CollectiveMismatchError, match=r"Strategy\.close"):
        call()
    assert still_works(strategy)
    strategy.close()


@pytest.mark.parametrize("name", [["a"], 3])
def test_names_are_strings(strategy: ms.MirroredStrategy, name: Any) -> None:
    for call in (lambda: strategy.reduce("SUM", 1.0, name=name), lambda: new_variable(strategy, 1.0, name=name)):
        with pytest.raises(errors.OptionTypeError, match="name"):
            call()


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), "soon", True])
def test_the_seconds_of_long_work_are_above_0(strategy: ms.MirroredStrategy, seconds: Any) -> None:
    with pytest.raises((errors.OptionError, errors.OptionTypeError), match="expected a number above 0"):
        strategy.expect_long(seconds)


class MpiBeforeVersion4(MPI.Intracomm):
    """A communicator without persistent collectives."""

    def Dup(self, info: Any = None) -> MpiBeforeVersion4:  # noqa: N802  # MPI's name
        return MpiBeforeVersion4(super().Dup())

    def Allreduce_init(self, *arguments: object) -> Any:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError


@pytest.mark.parametrize("kind", [MPI.Intracomm, MpiBeforeVersion4])
def test_a_channel_compares_and_exchanges_texts(comm: MPI.Intracomm, kind: type[MPI.Intracomm]) -> None:
    channel = MpiControlChannel(kind(comm))
    for number in (5, -3, 2**62 - 1):
        assert channel.all_equal(number)
        assert channel.all_equal(number + comm.rank) == (comm.size == 1)
    channel.start(7)
    while (answer := channel.finished()) is None:
        pass
    assert answer
    assert channel.allgather_text(f"é{comm.rank}") == [f"é{rank}" for rank in range(comm.size)]
    channel.close()


class Interrupted:
    """A request in whose start the handler of a signal raises: before or after the message has begun."""

    def __init__(self, request: Any, begins: bool) -> None:
        self.request, self.begins = request, begins

    def Start(self) -> None:  # noqa: N802  # MPI's name
        if self.begins:
            self.request.Start()
        raise KeyboardInterrupt


@pytest.mark.parametrize("begins", [False, True])
def test_a_comparison_that_is_interrupted_as_it_begins_is_answered_or_replaced(
    comm: MPI.Intracomm, begins: bool
) -> None:
    channel = MpiControlChannel(comm)
    assert channel.all_equal(4)
    if comm.rank == 0:
        request = channel._request
        channel._request = Interrupted(request, begins)
        with pytest.raises(KeyboardInterrupt):
            channel.all_equal(5)
        channel._request = request
        channel.start(-1)
        while (answer := channel.finished()) is None:
            pass
        assert answer is (comm.size == 1)
    else:
        assert channel.all_equal(5) is begins
        assert not (begins and channel.all_equal(6))
    channel.close()


def test_a_rank_that_loses_its_patience_while_it_tells_of_a_failure_goes_on_when_it_ends(comm: MPI.Intracomm) -> None:
    """Its later messages would be taken for the texts that the others wait for."""
    channel = MpiControlChannel(comm)
    guard = Guard(channel, comm.rank, comm.size, contains_errors=True)
    if comm.rank == 0:
        guard.break_off("a call", KeyboardInterrupt())
        for _ in range(2):
            guard.tell_of_failure(0.5)  # the others have no text yet, or have not come at all
            assert guard.is_untold is (comm.size > 1)
        comm.Barrier()
        guard.tell_of_failure(60)
        assert not guard.is_untold
    else:
        channel.start(5)
        while channel.finished() is None:
            pass
        comm.Barrier()
        guard.tell_peers()
        assert str(guard.broken) == "rank 0 failed in a call: KeyboardInterrupt"
    comm.Barrier()
    channel.close()


def test_the_memory_of_messages_that_may_still_come_is_kept() -> None:
    """MPI would write them into memory of others, and be it in MPI_Finalize."""
    seen = weakref.ref(MpiControlChannel(MPI.COMM_WORLD))
    kept = seen()
    assert kept is not None
    kept.close()
    del kept
    assert seen() is None
