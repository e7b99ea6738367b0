"""A signal to one rank: all ranks save the same step, end with status 75, and go on as if nothing had been."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from checkpoints import Training, checkpoint_of
from replicas import RANK, SIZE, OnNodes, all_raise, context, gather_texts, new_variable, outcomes, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

Launch = Callable[..., launching.Finished]
Made = Callable[..., ms.PreemptionCheckpointHandler]
TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
ROOT = Path(__file__).resolve().parents[2]
LAST = SIZE - 1


class Stop(Exception):  # noqa: N818
    """What a test's program raises where another one ends."""


def stop() -> None:
    raise Stop


def tell(number: int = USR2, *ranks: int) -> None:
    """Send a signal to this rank if it is among `ranks`; to the last rank if there are none."""
    if RANK in (ranks or (LAST,)):
        os.kill(os.getpid(), number)


@pytest.fixture
def made(strategy: ms.MirroredStrategy, folder: Path) -> Iterator[Made]:
    """Make handlers that raise Stop; at the end the signals belong to who had them before."""
    handlers = []

    def make(
        checkpoint: ms.Checkpoint | None = None,
        on: ms.Strategy = strategy,
        every: int = 1,
        **config: Any,
    ) -> ms.PreemptionCheckpointHandler:
        saver = checkpoint or checkpoint_of(on, x=new_variable(on, 0.0))
        told = ms.TerminationConfig(**{"exit_fn": stop, **config})
        handlers.append(ms.PreemptionCheckpointHandler(saver, folder, told, steps_between_votes=every))
        return handlers[-1]

    before = [signal.getsignal(number) for number in (TERM, USR1, USR2)]
    yield make
    for handler in reversed(handlers):
        handler.checkpoint_manager.close()
        handler.close()
    assert [signal.getsignal(number) for number in (TERM, USR1, USR2)] == before


# ------------------------------------------------------------------------------------------------ the same as ever


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_run_ends_as_one_that_was_not(strategy: ms.MirroredStrategy, made: Made, seed: int) -> None:
    plan = random.Random(seed)
    steps = 14
    stops = sorted(plan.sample(range(1, steps), 3))
    whole = Training(strategy, seed)
    for _ in range(steps):
        whole.step()
    expected = whole.everything()

    ended = []
    while True:
        run = Training(strategy, seed)  # what a new process does
        handler = made(run.checkpoint)
        assert handler.total_run_calls == run.progress["step"] == (ended[-1] if ended else 0)
        number, ranks = plan.choice((TERM, USR2)), plan.sample(range(SIZE), plan.randint(1, SIZE))
        try:
            while handler.total_run_calls < steps:
                if stops[len(ended) : len(ended) + 1] == [handler.total_run_calls + 1]:
                    tell(number, *ranks)
                handler.run(run.step)
            break
        except Stop:
            ended.append(handler.total_run_calls)
            handler.checkpoint_manager.close()
            handler.close()
    assert ended == stops
    assert repr(run.everything()) == repr(expected)


# ------------------------------------------------------------------------------------------------ which step

ONES, MANY = np.ones(3), np.ones(300_000)


def reduced(value: Any) -> Callable[[ms.Strategy], Any]:
    return lambda strategy: strategy.run(lambda: context().all_reduce("SUM", value))


def in_an_arena(strategy: ms.Strategy) -> Any:
    with closing(strategy.arena({"w": np.ones(3000), "b": np.ones(3, np.float32)})) as arena:
        return strategy.run(lambda: context().all_reduce("SUM", arena)["w"].copy())


#: What a step does.
STEPS: dict[str, Callable[[ms.Strategy], Any]] = {
    "number": reduced(1.0),
    "nest": reduced([ONES, {"x": 2.0, "y": np.ones(2, np.int32)}]),
    "large array": reduced(MANY),
    "async": lambda s: s.run(lambda: context().all_reduce_async("SUM", ONES).wait()),
    "gather": lambda s: s.gather(ONES, axis=0),
    "arena": in_an_arena,
    "nothing": lambda s: RANK,
}


def told_in(
    handler: ms.PreemptionCheckpointHandler, step: Callable[..., Any], *arguments: Any, who: str = "one"
) -> Any:
    """Tell ranks to stop, and run a step, which is the last; return its result."""
    before, result = handler.total_run_calls, []
    for _ in range(2):  # a second signal changes nothing
        tell(USR2, *([LAST] if who == "one" else range(SIZE)))
    with pytest.raises(Stop):
        handler.run(lambda: result.append(step(*arguments)))
    assert handler.total_run_calls == handler.checkpoint_manager.latest == before + 1
    return result[0]


@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("what", STEPS)
def test_the_step_under_way_is_the_last(strategy: ms.MirroredStrategy, made: Made, what: str, who: str) -> None:
    handler, step = made(), STEPS[what]
    usual = repr(handler.run(step, strategy))
    assert repr(told_in(handler, step, strategy, who=who)) == usual


@pytest.mark.parametrize("level", ["always", "off"])
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.mpi(min_size=2)
def test_between_nodes(made: Made, level: str, who: str) -> None:
    strategy = OnNodes([rank % 2 for rank in range(SIZE)], ms.MpiAllReduce())
    strategy.extended.communicator.guard.check_as(level)
    handler = made(on=strategy)
    for name in ("number", "large array", "async", "nothing"):
        handler.run(STEPS[name], strategy)
        told_in(handler, STEPS[name], strategy, who=who)
        assert still_works(strategy)
    handler.close()
    handler.checkpoint_manager.close()
    strategy.close()


def test_a_rank_that_is_told_within_a_step(strategy: ms.MirroredStrategy, made: Made) -> None:
    handler = made()

    def step() -> Any:
        context().all_reduce("SUM", 1.0)
        tell()  # between two collectives
        return context().all_reduce("SUM", 2.0)

    with pytest.raises(Stop):
        handler.run(strategy.run, step)
    assert handler.total_run_calls == 1


def test_steps_that_compare_nothing_are_checked_now_and_then(made: Made) -> None:
    handler = made(every=4)
    handler.run(lambda: None)
    handler.run(lambda: None)
    tell()
    if SIZE > 1:  # a lone rank knows at once
        handler.run(lambda: None)
    with pytest.raises(Stop):
        handler.run(lambda: None)
    assert handler.total_run_calls == (4 if SIZE > 1 else 3)


def test_a_step_that_is_saved_already(made: Made) -> None:
    handler = made(every=100)
    handler.run(lambda: None)
    handler.save_checkpoint_if_preempted()
    handler.checkpoint_manager.save(1, wait=False)
    tell()
    with pytest.raises(Stop):
        handler.save_checkpoint_if_preempted()
    assert handler.checkpoint_manager.steps() == [1]


# ------------------------------------------------------------------------------------------------ beside errors


@pytest.mark.mpi(min_size=2)
def test_errors_while_a_hand_is_up(strategy: ms.MirroredStrategy, made: Made) -> None:
    handler = made()
    rows, value = np.ones(3 if RANK == LAST else 4), "text" if RANK == 0 else 1.0
    tell()
    for of, error in ((rows, errors.CollectiveMismatchError), (value, errors.DTypeError)):
        all_raise(error, lambda of=of: handler.run(strategy.run, lambda: context().all_reduce("SUM", of)))
    assert (handler.total_run_calls, handler.checkpoint_manager.steps()) == (0, [])
    with pytest.raises(Stop):  # the flag is still up
        handler.run(STEPS["number"], strategy)


def test_an_exit_fn_that_returns(
    strategy: ms.MirroredStrategy,
    made: Made,
    capfd: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []
    handler = made(exit_fn=lambda: calls.append(1), grace_period=60)
    for _ in range(6):
        if handler.total_run_calls in (1, 4):
            tell()
        handler.run(STEPS["number"], strategy)
    assert (len(calls), handler.checkpoint_manager.steps()) == (2, [2, 5])
    said = gather_texts(capfd.readouterr().err)
    assert all(f"told to stop (SIGUSR2 on rank {LAST}): saved step 2, 0." in said[0] for _ in calls)
    assert " of 60 s after the signal: " in said[0]
    assert not any("told to stop" in text for text in said[1:])


# ------------------------------------------------------------------------------------------------ the signals


def test_others_get_their_signals_back(made: Made) -> None:
    heard: list[int] = []

    def own(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(USR1, own)
    try:
        handler = made(signals=[int(USR1)])
        os.kill(os.getpid(), USR1)
        handler.close()
        assert heard == []
        os.kill(os.getpid(), USR1)
        with made(signals=["SIGUSR1"]):
            signal.signal(USR1, lambda number, frame: heard.append(0))  # somebody else takes it
        os.kill(os.getpid(), USR1)
        assert heard == [USR1, 0]
    finally:
        signal.signal(USR1, before)


def test_a_strategy_that_is_closed_gives_signals_back(folder: Path) -> None:
    """Else the process could not be ended any more."""
    before = signal.getsignal(TERM)
    with ms.MirroredStrategy():
        handler = ms.PreemptionCheckpointHandler(ms.Checkpoint(x=ms.Variable(1.0)), folder)
        handler.checkpoint_manager.close()
        assert signal.getsignal(TERM) != before
    assert signal.getsignal(TERM) == before


def test_a_signal_to_one_handler_outlives_the_close_of_another(
    made: Made,
) -> None:
    outer, inner = made(signals=[USR1]), made(signals=[USR2])
    tell(USR1)
    inner.close()
    with pytest.raises(Stop):
        outer.run(lambda: None)


def test_a_worker_that_is_forked_ends_when_it_is_told_to(made: Made) -> None:
    made()
    made()  # two of them, one inside the other
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(here, b".")  # the fork is over
        time.sleep(60)
        os._exit(0)
    os.read(there, 1)
    os.kill(child, TERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
    os.close(there)
    os.close(here)
    program = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"True\n"


def test_only_the_main_thread_catches_signals(strategy: ms.MirroredStrategy, made: Made) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(outcomes(made)), name="trainer")
    thread.start()
    thread.join()
    assert {outcome.error for outcome in found[0]} == {errors.ContextError}
    assert "in thread 'trainer'; expected one in the main thread" in found[0][0].text


#: Types are tried in tests/whole/test_wrong_arguments.py.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"signals": ["SIGNOTHING"]}, "'SIGNOTHING'; expected the name of a"),
    ({"signals": [9999]}, "9999"),
    ({"signals": ["SIGKILL"]}, "'SIGKILL'; expected the name of"),
    ({"grace_period": -1}, "0 or more seconds"),
    ({"grace_period": float("nan")}, "0 or more seconds"),
]


@pytest.mark.parametrize(("config", "text"), BAD)
def test_what_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.OptionError, match=re.escape(text)):
        ms.TerminationConfig(**config)


def test_one_folder_of_a_manager_or_of_a_checkpoint(folder: Path) -> None:
    checkpoint = ms.Checkpoint(x=1)
    for saver, place in ((checkpoint, None), (ms.CheckpointManager(checkpoint, folder), folder)):
        with pytest.raises(errors.OptionTypeError, match="checkpoint_dir"):
            ms.PreemptionCheckpointHandler(saver, place)
    with pytest.raises(errors.OptionError, match="steps_between_votes=0"):
        ms.PreemptionCheckpointHandler(checkpoint, folder, steps_between_votes=0)
    assert signal.getsignal(TERM) == signal.SIG_DFL


def test_calls_in_a_step_function(strategy: ms.MirroredStrategy, made: Made) -> None:
    handler = made()
    for call in (lambda: handler.run(print), handler.save_checkpoint_if_preempted, made):
        with pytest.raises(errors.ContextError):
            strategy.run(call)


@pytest.mark.one_rank
def test_simulated_replicas(tmp_path: Path) -> None:
    before = signal.getsignal(USR2)

    def program() -> tuple[int, int]:
        strategy = ms.MirroredStrategy()
        total = new_variable(strategy, 0.0)
        rank = strategy.replica_id_in_sync_group
        told = ms.TerminationConfig(lambda: rank == 1 and handler.total_run_calls == 2, stop)
        handler = ms.PreemptionCheckpointHandler(ms.Checkpoint(total=total), tmp_path / "simulated", told)
        first = handler.total_run_calls
        try:
            while handler.total_run_calls < 6:
                handler.run(strategy.run, lambda: context().all_reduce("SUM", 1.0))
        except Stop:
            handler.checkpoint_manager.close()
        return first, handler.total_run_calls

    assert run_replicas(program, 3) == [(0, 2)] * 3
    assert run_replicas(program, 3) == [(2, 6)] * 3
    assert signal.getsignal(USR2) == before


# ------------------------------------------------------------------------------------------------ whole jobs


@pytest.mark.each_mpi
@pytest.mark.slow
def test_a_job_ends_with_75_and_goes_on(launch: Launch, tmp_path: Path) -> None:
    """Told on one rank, then through the launcher."""
    run = ["-m", "mpistrategy", "run", ROOT / "tests" / "jobs" / "preempted.py", tmp_path]
    number = "SIGUSR2" if launching.IS_OPEN_MPI else "SIGTERM"  # what the launchers hand on
    first = launch(2, [*run, "--tell", "8:1:SIGUSR2"])
    assert "told to stop (SIGUSR2 on rank 1): saved step 8, 0." in first.stderr, first
    second = launch(2, [*run[3:], "--tell", f"13:1:{number}:launcher"])  # as `python program.py`
    assert re.search(
        rf"told to stop \(({number} on rank 0, )?{number} on rank 1\): saved step 1[34], ", second.stderr
    ), second
    for job in (first, second):
        assert job.returncode == 75, job
        assert "Traceback" not in job.stderr, job
        assert "the whole job ends here" not in job.stderr, job
    last = launch(2, run).check()
    assert re.search("from step 1[34]\nmade all steps", last.stdout), last
