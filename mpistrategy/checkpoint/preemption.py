"""PreemptionCheckpointHandler: a job that is told to stop saves a checkpoint and ends, to be started again.

A signal to one rank is enough.  Its handler only raises this rank's flag (`contract.guard`).  All ranks see the flag in
the next comparison of their calls, so in the same step.  After that step they save a checkpoint and end with status 75,
which asks the batch script to requeue the job.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, NoneType, TracebackType
from typing import Any, Self, TypeVar

from mpistrategy import context
from mpistrategy.checkpoint.checkpoint import Checkpoint, CheckpointManager, checked_path
from mpistrategy.errors import CheckpointError, ContextError, OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.job.exit_hooks import program
from mpistrategy.objects.settings import Fixed, Settable, checked_count, checked_number, checked_type

#: The status that asks for another start: EX_TEMPFAIL of sysexits.h.
START_ME_AGAIN = 75

_WHERE = "PreemptionCheckpointHandler"

T = TypeVar("T")


@dataclass(frozen=True)
class TerminationConfig:
    """How a `PreemptionCheckpointHandler` is told to stop, and what it does then.

    Attributes:
        termination_watcher_fn: called after every step, on each rank; returns True if the job must stop.  It must
            return at once.  For clusters that write a file instead of sending a signal.
        exit_fn: called on all ranks after the checkpoint is saved; None calls ``sys.exit(75)``.  If it returns, the
            program continues.
        grace_period: the seconds between the signal and the end of the job.  Unlike in TensorFlow, training does not
            continue during it; the message at the end says how many seconds were used.
        signals: names or numbers of the signals that tell the job to stop.

    Raises:
        OptionError, OptionTypeError: for something else than a function or None, a negative grace period, an unknown
            signal, and a signal that cannot be caught.
    """

    termination_watcher_fn: Callable[[], Any] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    signals: Sequence[int | str] = ("SIGTERM", "SIGUSR2")

    def __post_init__(self) -> None:
        where = "TerminationConfig"
        function: Any = (Callable, NoneType)
        checked_type(where, "termination_watcher_fn", self.termination_watcher_fn, function, "a function, or None")
        checked_type(where, "exit_fn", self.exit_fn, function, "a function, or None")
        if self.grace_period is not None:
            checked_number(where, "grace_period", self.grace_period, "0 or more seconds, or None")
        checked_type(where, "signals", self.signals, (list, tuple), 'a list, such as ["SIGTERM", "SIGUSR2"]')
        object.__setattr__(self, "signals", tuple(dict.fromkeys(map(_signal, self.signals))))


def _signal(value: Any) -> signal.Signals:
    known: dict[Any, signal.Signals] = {key: each for each in signal.Signals for key in (each.name, each)}
    number = known.get(value.upper() if isinstance(value, str) else value)
    if number in (None, signal.SIGKILL, signal.SIGSTOP):
        expected = 'the name of a signal that can be caught, such as "SIGUSR2"'
        raise OptionError.at("TerminationConfig, signals", found=repr(value), expected=expected)
    return number


class PreemptionCheckpointHandler(Settable):
    """Runs steps until the job is told to stop; then all ranks save the same step and end with status 75.

    Make it on all ranks, in the main threads, before the first step.  It restores the newest complete checkpoint.  From
    then on SIGTERM and SIGUSR2 do not end a rank: all ranks finish the current step first.

    Args:
        checkpoint_or_checkpoint_manager: what saves.  Its checkpoints are numbered by `total_run_calls`.
        checkpoint_dir: with a Checkpoint, the folder; its last two checkpoints are kept.
        termination_config: how the job is told to stop, and what it does then; None: by signals, with status 75.
        steps_between_votes: ranks learn of a signal when they compare their calls, as most steps do.  After every so
            many steps `run` makes a comparison.
        name: is compared between the ranks instead of the place of this call, and of each `run`, whose keywords are
            the function's.

    Attributes:
        checkpoint_manager: what saves.

    Raises:
        OptionTypeError, OptionError: for invalid arguments.
        ContextError: outside the main thread, because only the main thread can catch signals.
        Exception: what `CheckpointManager.restore` raises, on every rank.

    >>> import tempfile, mpistrategy as ms
    >>> strategy = ms.OneDeviceStrategy("CPU:0")
    >>> with strategy.scope():
    ...     total = ms.Variable(0.0)
    >>> def step(x):
    ...     return total.assign_add(x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ms.PreemptionCheckpointHandler(ms.Checkpoint(total=total), folder) as handler:
    ...         for number in range(handler.total_run_calls, 3):
    ...             _ = handler.run(strategy.run, step, args=(number,))
    >>> print(handler.total_run_calls, float(total))
    3 3.0
    """

    checkpoint_manager: Fixed[CheckpointManager] = Fixed()

    def __init__(
        self,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
        *,
        steps_between_votes: int = 1,
        name: str | None = None,
    ) -> None:
        config = TerminationConfig() if termination_config is None else termination_config
        self._config = checked_type(_WHERE, "termination_config", config, TerminationConfig, "a TerminationConfig")
        saver: Any = checkpoint_or_checkpoint_manager
        if isinstance(saver, Checkpoint) and checkpoint_dir is not None:
            saver = CheckpointManager(saver, checked_path(checkpoint_dir, _WHERE, "checkpoint_dir"), keep=2)
        elif not isinstance(saver, CheckpointManager) or checkpoint_dir is not None:
            raise OptionTypeError.at(
                _WHERE,
                found=f"checkpoint_or_checkpoint_manager={saver!r}, checkpoint_dir={checkpoint_dir!r}",
                expected="a CheckpointManager, or a Checkpoint and a checkpoint_dir",
            )
        self.checkpoint_manager = saver
        self._steps_between_votes = checked_count(_WHERE, "steps_between_votes", steps_between_votes)
        self._strategy = self.checkpoint_manager.checkpoint.strategy
        self._communicator: Ranks = self._strategy.extended.communicator
        self._guard = self._communicator.guard
        #: The notice to stop, and its time; the previous signal handlers; the process that catches signals.
        self._notice: tuple[str, float] | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._name = name
        is_simulated = self._communicator.is_simulated
        with self.checkpoint_manager.checkpoint._call(_WHERE, name) as call:
            if threading.current_thread() is not threading.main_thread() and not is_simulated:
                raise ContextError.at(
                    _WHERE,
                    found=f"a call in thread {threading.current_thread().name!r}",
                    expected="one in the main thread, the only one that can catch signals",
                    fix="Make it in the main thread, or start the training there.",
                )
            call.agree("begin", options=f"{steps_between_votes=}")
        if not is_simulated:  # simulated ranks share a process: its signals are not theirs
            self._guard.at_close.append(self.close)
            for number in map(_signal, config.signals):
                self._previous[number] = signal.signal(number, self._note)
        try:
            self._runs = self.checkpoint_manager.restore(name=name) or 0
        except BaseException:
            self.close()
            raise

    @property
    def total_run_calls(self) -> int:
        """The number of steps made, including the steps before the last restart."""
        return self._runs

    @property
    def is_told(self) -> bool:
        """Whether this rank was told to stop; the other ranks may not know it yet."""
        return self._notice is not None

    def run(self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Make one step: ``distributed_train_function(*args, **kwargs)``, in cross-replica context.  Collective.

        If a rank was told to stop, all ranks save a checkpoint after this step and end.

        Returns:
            What the function returns.

        Raises:
            SystemExit: on every rank, after the checkpoint is saved, unless there is an `exit_fn`.
            Exception: the errors of the function and of `CheckpointManager.save`.
            ContextError: in a step function.
        """
        context.require_cross_replica(self._strategy, f"{_WHERE}.run")
        result = distributed_train_function(*args, **kwargs)
        self._runs += 1
        self._look(f"{_WHERE}.run", self._name, is_due=self._runs % self._steps_between_votes == 0)
        return result

    def save_checkpoint_if_preempted(self, *, name: str | None = None) -> None:
        """Save and end if a rank was told to stop, whatever `steps_between_votes` is.  Collective.

        `run` does this after its step.  Call it in long work between two steps that can be repeated from the
        checkpoint, such as an evaluation.

        Args:
            name: is compared between the ranks instead of the call site.

        Raises:
            Exception: as `run`.
        """
        context.require_cross_replica(self._strategy, f"{_WHERE}.save_checkpoint_if_preempted")
        self._look(f"{_WHERE}.save_checkpoint_if_preempted", name, is_due=True)

    def close(self) -> None:
        """Restore the previous signal handlers of this rank.  Rank-local.  Closing the strategy does this, too.

        Only the main thread can restore them.  After a call in another thread, the next of these signals restores them
        and is then handled by them.
        """
        self._process = 0
        if threading.current_thread() is threading.main_thread():
            self._give_back()
        self._guard.lower_flags()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, SystemExit):  # the process ends; ignored signals stay ignored
            self.close()

    # ------------------------------------------------------------------------------------------------- the signal

    def _give_back(self) -> None:
        for number, previous in [*self._previous.items()]:
            if signal.getsignal(number) in (self._note, signal.SIG_IGN):  # else another handler was set later
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
                del self._previous[number]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # closed in another thread; or a forked worker, which must end as it is told
            if self._process and number != signal.SIGTERM:
                return  # Slurm signals the workers of a data loader, too: they are needed until the save
            self._give_back()
            signal.raise_signal(number)
            return
        # Do nothing else: the interrupted code may be half done.
        self._notice = self._notice or (signal.Signals(number).name, time.monotonic())
        self._guard.raise_flag()

    # --------------------------------------------------------------------------------------------- between the ranks

    def _look(self, where: str, name: str | None, *, is_due: bool) -> None:
        """End the job if a rank was told to stop; if it is due, compare."""
        watcher = self._config.termination_watcher_fn
        if watcher is not None and watcher():
            self._notice = self._notice or ("termination_watcher_fn", time.monotonic())
        if self._notice is not None:  # again, after a signal: another handler, which was closed, has lowered the flag
            self._guard.raise_flag()
        if is_due and not self._guard.flag_was_seen:
            with Call(self._guard, where, called=name) as call:
                call.agree("look for signals")
        if self._guard.flag_was_seen:
            self._stop(where, name)

    def _stop(self, where: str, name: str | None) -> None:
        manager, step, communicator = self.checkpoint_manager, self._runs, self._communicator
        with Call(self._guard, where, called=name) as call:
            call.agree("stop", options=f"after step {step}")
            now = time.monotonic()
            source, since = self._notice or ("", now)
            notices = communicator.allgather_text(f"{source} on rank {communicator.rank} {now - since}" * bool(source))
        try:
            manager.wait(name=name)
        except CheckpointError as error:  # this state is saved all the same
            if communicator.rank == 0:
                sys.stderr.write(f"{error}\n")
        if manager.latest != step:
            manager.save(step, name=name)
        if communicator.rank == 0:
            sys.stdout.flush()
            grace, took = self._config.grace_period, time.monotonic() - now
            told_by = ", ".join(text.rpartition(" ")[0] for text in notices if text)
            seconds = max((float(text.rpartition(" ")[2]) for text in notices if text), default=0.0) + took
            within = f" of {grace:g} s" if grace is not None else ""
            late = "; ask for an earlier signal" if grace is not None and seconds > grace / 2 else ""
            text = f"told to stop ({told_by}): saved step {step}, {seconds:.1f} s{within} after the signal{late}"
            print(f"{text}: {manager.path_of(step)}", file=sys.stderr, flush=True)
        self._notice = None
        self._guard.lower_flags()
        try:
            if self._config.exit_fn is None:
                sys.exit(START_ME_AGAIN)
            self._config.exit_fn()
        except SystemExit:
            program.all_leave |= not self._communicator.is_simulated
            # Some launchers signal the other ranks once one has ended; each must end with its own status.
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)
            raise
