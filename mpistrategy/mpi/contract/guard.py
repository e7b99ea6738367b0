"""The collective contract: no rank moves data until all ranks are known to make the same call.

Plain MPI adds two swapped Allreduces, or reads a float64 as a float32, and exits with status 0.  Here every collective
starts with `Call.agree`, which compares a 62-bit digest of the call between the ranks: public name, operation,
structure, dtypes, shapes, destination, and the call site or the name.  The digest travels in the mailboxes of a node,
else in the first message of the call (`mpi_channel`).  If the digests differ, the ranks send each other their calls in
words, and every rank raises the same table.

A rank that cannot make the call (there is a string among its arrays, say) sends its error in place of the digest.  The
other ranks raise it, too, and do not wait.  All that can fail comes before the comparison.  An error after that, and an
interruption (by the handler of a signal, say) at any time in a call, are of one rank alone, and the others wait for its
data: the job ends.  Where errors are contained (`on_error="raise"`), only the strategy does: see `Guard.fail`.

A rank can raise a flag: one bit beside its next digest.  The digests then differ, the ranks find their calls equal, and
go on: all have seen the flag in the same call.  Without a flag this costs nothing.

Within a node the comparison travels with the data and is always made.  Between nodes it travels in the first message of
each call, with the data where they are a few sums.  The check level "off" leaves this message out where the call needs
no barrier.

Strategies are closed in a forked child, which would take part in collectives in place of its parent: MPI belongs to the
parent.  A child must not finalize MPI when it ends, either: see `job.exit_hooks`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, dataclass
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import ref

from mpistrategy import errors
from mpistrategy.errors import DeviceError, ForkedProcessError, MpiStrategyError, RemoteError
from mpistrategy.mpi.contract import mismatch_report
from mpistrategy.mpi.contract.call_sites import Signature, Site, call_site, digest_of
from mpistrategy.mpi.contract.channel import ControlChannel, wait_patiently
from mpistrategy.mpi.contract.flight_recorder import CurrentCall, FlightRecord
from mpistrategy.objects.settings import one_of

_FLAG = 1 << 62  # digests are smaller

#: The environment variable that chooses the check level.
CHECK = "MPISTRATEGY_CHECK"
ALWAYS, OFF = LEVELS = ("always", "off")
#: The environment variable that limits how long a collective waits for the other ranks, in seconds; 0 means no limit.
TIMEOUT = "MPISTRATEGY_TIMEOUT_SECONDS"
DEFAULT_SECONDS = 600.0
#: The public name of the call that closes a strategy.
CLOSE = "Strategy.close"
#: How long ranks wait for each other where a rank has failed.
PATIENCE_SECONDS = 2.0
NO_MORE_CALLS = "This strategy takes no more calls. Make another one, on all its ranks, or let the job end."
_LEAVING, _READY = Signature("exit"), Signature("ready for the messages of the call")

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Why a strategy takes no more calls.

    A rank that fails before the ranks have agreed on a call sends its error in place of the call.  Afterwards the other
    ranks move data, and cannot be sent anything: their watchdogs see on the board of the node, or in the run directory,
    that a rank has failed, and end their waits.  A rank whose wait ends anyway has the data that it needs; it finds out
    in its next call.

    Attributes:
        error: the name and the text of the error.
        rank: which rank raised it.
        where: the call that raised it; "" for a program that has ended.
    """

    error: str
    rank: int
    where: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} {f'failed in {self.where}' if self.where else 'has ended'}: {self.error}"

    def as_error(self) -> RemoteError:
        """Return the error for the other ranks."""
        error = RemoteError(f"{self}. {NO_MORE_CALLS}")
        error.rank, error.error = self.rank, self.error
        return error


def error_in_words(error: BaseException) -> str:
    """Return the name and the text of an error, as ``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Guard:
    """Compares the calls of all ranks of one communicator.

    Args:
        channel: how to reach the other ranks; None when there are none.
        rank: this rank's number.
        size: how many ranks there are.
        shares_board: whether the watchdogs of all ranks show each other in shared memory that a rank has failed.
        contains_errors: whether an error that ends this rank's program ends only this communicator, not the job.
    """

    def __init__(
        self,
        channel: ControlChannel | None = None,
        rank: int = 0,
        size: int = 1,
        *,
        shares_board: bool = False,
        contains_errors: bool = False,
    ) -> None:
        self._channel = channel
        self.shares_board = shares_board
        #: Where the ranks of the node show each other that they have failed, a `status_board.StatusBoard`; or None.
        self.board: Any = None
        self.contains_errors = contains_errors
        #: Why this guard takes no more calls after a failure; None before.
        self.broken: Failure | None = None
        #: Whether this rank takes no more calls, and the other ranks, which wait for it, do not know.
        self.is_untold: bool = False
        #: Why each wait of this rank ends from now on, the error that it raises there if it can leave the wait, and
        #: since when (time.monotonic()); the watchdog sets it.
        self.due: tuple[Failure, MpiStrategyError, float] | None = None
        #: Until when this rank waits for the others to hear that it takes no more calls.
        self._patience_ends = math.inf
        #: An error that this rank waits to send to the others, and when it prints a message about the wait.
        self._pending_error: tuple[Exception, float] | None = None
        #: Whether the other ranks may have accepted this rank's call: its data move, or have moved.
        self.agreed: bool = False
        #: The error of the present call that the other ranks know.
        self.reported: BaseException | None = None
        #: Whether a thread of this library makes the calls, for jobs that the program has started.
        self.is_in_background = False
        #: Whether this rank must be able to leave a comparison through MPI.
        self.is_patient: bool = contains_errors and not shares_board
        self.rank = rank
        self.size = size
        self.thread = 0
        #: The public call that this rank is in, the innermost one.
        self.current: CurrentCall | None = None
        self.record: FlightRecord = FlightRecord()
        #: Since when this rank has been waiting, if it is in a call that began before; time.monotonic().
        self.since: float = 0.0
        #: How long a collective may wait for the other ranks, in seconds.
        self.timeout: float = expected_limit()
        #: The call site, where the program made the call in another thread.
        self.site: Site | None = None
        #: OFF where calls that need no barrier are not compared.
        self.level: str = ALWAYS
        #: The progress of the collectives on this rank's GPU, a `gpu_progress.GpuProgress`; or None.
        self.gpu_progress: Any = None
        #: Makes this rank's GPU the current one, for a with block; None for a rank that drives none.
        self.on_gpu: Callable[[], AbstractContextManager[Any]] | None = None
        #: Since when this rank waits for earlier work of its own GPU; infinity if it does not.
        self.own_gpu_since: float = math.inf
        #: Ends the job with an error that cannot reach the other ranks; None where errors are contained.
        self.give_up: Callable[[BaseException], object] | None = None
        #: Whether this guard takes no more calls: after a close, a failure or a fork.
        self.closed: bool = False
        #: Whether this is a forked child of a rank.
        self.is_forked: bool = False
        if size > 1:
            _guards[:] = [reference for reference in _guards if reference() is not None] + [ref(self)]
        self._flag = 0
        #: Whether some rank has raised its flag; set on all ranks in the same call.
        self.flag_was_seen: bool = False
        #: Called by `Strategy.close`; not called when the program ends without it.
        self.at_close: list[Callable[[], object]] = []
        #: How many comparisons this guard has made, for `scripts/soak interruptions`. Equal on all ranks.
        self.comparisons: int = 0

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Say that the code in here is the program's own: this rank waits for no other rank."""
        before, self.since = self.since, math.inf
        try:
            yield
        finally:
            self.since = before if before == math.inf else monotonic()

    @contextmanager
    def own_gpu(self) -> Iterator[None]:
        """Say that the code in here waits for this rank's own GPU: the others wait for this rank, not it for them."""
        self.own_gpu_since = monotonic()
        try:
            with self.own_work():
                yield
        finally:
            self.own_gpu_since = math.inf

    def wait_for_gpu(self, work: Any) -> None:
        """Wait for an event or a stream of this rank's own GPU; None does nothing."""
        if work is not None:
            with self.own_gpu():
                work.synchronize()

    def raise_flag(self) -> None:
        """Set this rank's flag, which all ranks see at the next comparison; do nothing if it was seen already.

        A signal handler may call it: it only writes attributes.
        """
        if self._channel is None:
            self.flag_was_seen = True
        elif not self.flag_was_seen:
            self._flag = _FLAG

    def lower_flags(self) -> None:
        """Forget that flags were seen; all ranks do so between the same two calls."""
        self._flag, self.flag_was_seen = 0, False

    def refusal(self, where: str) -> MpiStrategyError:
        """Return the error of a public call once this guard is closed."""
        if self.is_forked:
            return refusal_of_child(where)
        when = f"a failure: {self.broken}" if self.broken else "its close()"
        return errors.ContextError.at(where, found=f"a strategy after {when}", expected="an open strategy")

    def check_as(self, level: str) -> None:
        """Compare all calls; with "off" and where a comparison costs a message, only calls that need a barrier.

        All ranks set the level at the same time, before the first plan is made: routes depend on it.
        """
        if self._channel is not None and not self._channel.is_free:
            self.level = level

    def on_all(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, on ranks that have agreed on a call, before its messages.  Collective.

        If it raises on a rank, all ranks raise, and the next call is like any other: where the ranks are in a `Call`,
        whose end tells the others.
        """
        self.agreed = False  # an error goes in place of the comparison, when the call is left
        result = work()
        if self._channel is not None and not self._agrees(digest_of(_READY)):
            self._resolve(_READY)
        return result

    def compare(
        self, signature: Signature, digest: int | None = None, *, patiently: bool = False, sparingly: bool = False
    ) -> bool:
        """Raise on every rank unless all ranks give an equal `signature`.

        Return whether some ranks ask for the values of the others: `mismatch_report.ASKS`.

        Args:
            signature: of the call.
            digest: its digest; None where it is not known.
            patiently: leave the core to other threads.
            sparingly: only as often as the level says; for calls that need no barrier before their data.
        """
        if self.current is not None:  # for traces and roll calls
            (self.record.entries[-1] if self.size > 1 else self.current).signature = signature
        if self._channel is None:
            return False
        self.since = monotonic()
        if sparingly and self.level == OFF:
            self.agreed = True
            return False
        equal = self._agrees(digest_of(signature) if digest is None else digest, patiently=patiently)
        has_askers = not equal and self._resolve(signature)
        self.since = monotonic()
        return has_askers

    def _agrees(self, digest: int, *, patiently: bool = False) -> bool:
        """Return whether all ranks make an equal call."""
        self.agreed = True
        self.comparisons += 1
        flag, channel = self._flag, self._channel
        assert channel is not None
        equal = channel.all_equal(digest | flag, self.look if patiently or self.is_patient else None)
        if equal and flag:
            self._see_flags()
        return equal

    def start_leaving(self) -> None:
        """Begin to tell the other ranks that this rank has ended, or takes no more calls."""
        if self._channel is not None:
            # After a failure other ranks must hear of it, also if they leave at the same time.
            self._channel.start(digest_of(_LEAVING) if self.broken is None else -1 - self.rank)

    def peers_have_left(self) -> bool | None:
        """Return True when all ranks have ended, False when one calls a collective, None while ranks are missing."""
        return True if self._channel is None else self._channel.finished()

    def tell_peers(self, why: str = "its program has ended") -> None:
        """Answer the ranks that call a collective: they raise an error that names this rank.  Then leave again."""
        failure = None if self.broken is None else astuple(self.broken)
        reports = self._gather_reports(mismatch_report.Report({mismatch_report.LEFT: why}, "its end", failure=failure))
        # The others have heard an earlier error instead where an interruption came while this rank told them of that.
        self.is_untold = failure is not None and reports[self.rank].failure is None
        if self.broken is None:
            self.start_leaving()

    # --------------------------------------------------------------------------------------------- errors of this rank

    def fail(self, where: str, error: BaseException) -> None:
        """Tell the other ranks of an error in a call that this rank leaves.

        As long as this rank has not shown its digest, an error goes in its place, and all ranks raise.  Any other error
        of this rank alone ends the job with its traceback.  Where errors are contained, this rank takes no more calls,
        and the others raise RemoteError.

        Args:
            where: the public name of the call.
            error: the error.
        """
        if error is self.reported or self.broken:
            return
        if isinstance(error, Exception) and not self.agreed:
            self._send(where, error)
        elif isinstance(error, MpiStrategyError) and not isinstance(error, DeviceError):
            # All ranks raise it.  The rank that the error names prints it, else the first rank.
            error._is_printed_elsewhere = self.rank != (error.rank or 0)
        else:
            self._end(where, error)

    def _end(self, where: str, error: BaseException) -> None:
        """End the job, or this strategy alone, with an error that is not sent in place of a call."""
        if self.give_up is not None and self.broken is None and self._channel is not None:
            self.give_up(error)  # does not return
        if self.shares_board or not self.is_in_background:  # there the program hears of it when it waits
            self.break_off(where, error)
            self.tell_of_failure()

    def break_off(self, where: str, error: BaseException) -> None:
        """Take no more calls after an error, and let the other ranks know; does not wait for them.

        Ranks of other nodes hear of it from the watchdog, and when this rank's program ends.

        Args:
            where: the call that the error has ended.
            error: the error.
        """
        if self._channel is not None and self.broken is None:
            self.is_untold = not self.shares_board
            self.stop(Failure(error_in_words(error), self.rank, where))

    def stop(self, reason: Failure) -> None:
        """Take no more calls: messages of unknown calls may be under way."""
        if self.broken is None and self.board is not None:
            self.board.show_failure(reason)
        self.broken = self.broken or reason
        self.closed = True

    def _send(self, where: str, error: Exception) -> None:
        """Take part in a comparison with an error in place of a call: the other ranks raise it, too."""
        if self._channel is None:
            return
        self.since = monotonic()
        self._pending_error = error, self.since + PATIENCE_SECONDS
        try:
            with suppress(RemoteError):  # a rank that has failed takes no part
                self._agrees(-1 - self.rank, patiently=True)  # no signature has a negative digest, and no other rank
                self._report(where, error)
        except BaseException as interruption:
            self._end(where, interruption)
            raise
        self._pending_error, self.agreed = None, False

    def _report(self, where: str, error: Exception) -> None:
        """Tell the other ranks, which wait for this, of an error."""
        site = (self.site or call_site()).text
        reports = self._gather_reports(mismatch_report.Report({"call": where}, site, type(error).__name__, str(error)))
        if isinstance(error, MpiStrategyError):
            messages = [(report.error, report.text, report.site) for report in reports]
            error._is_printed_elsewhere = messages.index(messages[self.rank]) < self.rank
        if self.level == OFF and self.give_up is not None and not all(report.error for report in reports):
            # A message that this rank has not received would be taken for the next data.
            self.give_up(error)

    def tell_of_failure(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Tell the other ranks that this rank takes no more calls, unless they know; wait a little for them."""
        self._patience_ends = monotonic() + seconds
        with suppress(RemoteError):
            while self.is_untold:
                self.start_leaving()
                if wait_patiently(self.peers_have_left, self.look):
                    self.is_untold = False
                else:
                    self.tell_peers()

    # ------------------------------------------------------------------------------------------- errors of other ranks

    @property
    def is_broken(self) -> bool:
        """Whether some rank takes no more calls after a failure, so that this rank must not wait for it."""
        return self.broken is not None or self.due is not None

    def look(self) -> None:
        """Raise if this rank waits in vain; called now and then where it waits for the others."""
        if self.due is not None and self.broken is None:
            (failure, error, _), self.due = self.due, None
            self.stop(failure)
            raise error
        if self._pending_error is not None and monotonic() > self._pending_error[1]:
            pending, self._pending_error = self._pending_error[0], None
            if self.level == OFF and self.give_up is not None:
                self.give_up(pending)  # the other ranks may wait for data that this rank does not send
            sys.stderr.write(f"[rank {self.rank}] waits to tell the other ranks: {error_in_words(pending)}\n")
        if self.broken is not None and monotonic() > self._patience_ends:
            raise self.broken.as_error()

    def _gather_reports(self, own_report: mismatch_report.Report) -> list[mismatch_report.Report]:
        """Return the reports of all ranks; take no more calls if a rank has ended with an error.

        Raises:
            RemoteError: when some rank takes no more calls, and thus may send no report.
        """
        assert self._channel is not None
        if self.broken is not None and not self.is_untold:
            raise self.broken.as_error()
        texts = self._channel.allgather_text(json.dumps(astuple(own_report)), self.look)
        reports = [mismatch_report.Report(*json.loads(text)) for text in texts]
        for report in reports:
            if report.failure is not None:
                self.stop(Failure(*report.failure))
        return reports

    def _resolve(self, signature: Signature) -> bool:
        """Find out why the digests differ; raise on every rank unless a flag or asking ranks are the only reason.

        Return whether some ranks ask.
        """
        own_report = mismatch_report.Report(
            signature.describe(), (self.site or call_site()).text, digest=digest_of(signature)
        )
        reports = self._gather_reports(own_report)
        if all(report.digest == own_report.digest for report in reports):
            self._see_flags()
            return False
        if mismatch_report.only_ask(reports):
            return True  # a flag that is up is seen at the next comparison
        error = self.reported = self._error_in(reports)
        self.agreed = False
        raise error

    def _error_in(self, reports: Sequence[mismatch_report.Report]) -> MpiStrategyError:
        """Return the error of every rank that has no error of its own, from the reports of calls that differ."""
        if self.broken is not None:
            return self.broken.as_error()
        for rank, report in enumerate(reports):
            if report.error:
                if self.level == OFF:
                    sleep(PATIENCE_SECONDS)  # the other rank ends the job
                named = getattr(errors, report.error, RemoteError)
                kind = named if isinstance(named, type) and issubclass(named, MpiStrategyError) else RemoteError
                text = f"{report.error}: {report.text}"
                error: MpiStrategyError = kind(f"rank {rank} could not make this call ({report.site}): {text}")
                error.rank, error._is_printed_elsewhere = rank, True
                if isinstance(error, RemoteError):
                    error.error = text
                return error
        closing = [rank for rank, report in enumerate(reports) if report.call.get("call") == CLOSE]
        if closing and self.contains_errors:
            failure = Failure("it has closed the strategy", closing[0])
            self.stop(failure)
            return failure.as_error()
        error = mismatch_report.mismatch(reports)
        first = next(rank for rank, report in enumerate(reports) if mismatch_report.LEFT not in report.call)
        error._is_printed_elsewhere = self.rank != first  # one rank's print says it all
        return error

    def _see_flags(self) -> None:
        self.flag_was_seen = True  # first, since a signal may come between the two lines
        self._flag = 0


def level_of(check: Any) -> str:
    """Return the check level of a strategy: the argument `check`, else the variable, else "always".

    Raises:
        OptionError: for any other value.
    """
    name, value = (CHECK, os.environ.get(CHECK) or ALWAYS) if check is None else ("check", check)
    return one_of("MirroredStrategy", name, value, LEVELS)


def time_limit(seconds: float) -> float:
    """Return the limit that `seconds` means: 0 is no limit."""
    return float(seconds) or math.inf


def expected_limit() -> float:
    """Return the limit before a strategy exists; a malformed variable raises later, on all ranks."""
    try:
        return time_limit_of()
    except errors.OptionError:
        return DEFAULT_SECONDS


def time_limit_of(argument: Any = None) -> float:
    """Return the limit of a strategy: its argument, else the variable, else `DEFAULT_SECONDS`.

    Raises:
        OptionError: for a variable that is not a number, or is negative.
    """
    if argument is not None:
        return time_limit(argument)
    text, seconds = os.environ.get(TIMEOUT) or str(DEFAULT_SECONDS), math.nan
    with suppress(ValueError):
        seconds = float(text)
    if not seconds >= 0:
        raise errors.OptionError.at(TIMEOUT, found=repr(text), expected="seconds >= 0 (0: no limit)")
    return time_limit(seconds)


# No WeakSet: it runs Python code when a guard is collected, in which the exception of a signal's handler would be lost.
_guards: list[ref[Guard]] = []


def refusal_of_child(where: str) -> ForkedProcessError:
    """Return the error of a collective in a forked child."""
    return ForkedProcessError.at(
        where,
        found="a call in a forked child of a rank",
        expected="a call in the rank itself",
        fix="Give the child plain arrays to work on, and let it return plain arrays; or start it with "
        "multiprocessing's 'spawn' method. OneDeviceStrategy works in a child.",
    )


def _close_in_child() -> None:
    for reference in _guards:
        if (guard := reference()) is not None:
            guard.is_forked = guard.closed = True
            guard.current = None  # a thread that is in a call belongs to the parent


os.register_at_fork(after_in_child=_close_in_child)
