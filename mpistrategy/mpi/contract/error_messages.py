"""How a rank tells the other ranks of its own error: in the comparison of a call, or where they wait after it."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpistrategy.errors import DeviceError, MpiStrategyError
from mpistrategy.mpi.contract.call_sites import Site
from mpistrategy.mpi.contract.channel import ControlChannel, growing_pauses
from mpistrategy.mpi.contract.failures import Failure, Failures, in_words
from mpistrategy.objects.later import later

if TYPE_CHECKING:
    from mpistrategy.mpi.contract import mismatch_report
else:
    later(globals(), "mpistrategy.mpi.contract.mismatch_report")

E = TypeVar("E", bound=BaseException)

_TOLD = "_mpistrategy_told"
#: Marks an error that another rank raises, too, or that tells of its error: that rank prints it whole.
OF_ANOTHER_RANK = "_mpistrategy_of_another_rank"
#: Marks an error in a call in which other ranks have raised other errors.
ONE_OF_SEVERAL = "_mpistrategy_one_of_several"
#: How long a rank that has failed waits for the other ranks before it prints its error.
PATIENCE_SECONDS = 2.0

#: How far a rank has come with its call: the ranks have not agreed on it; they compare it; they have agreed, and their
#: data move, or have moved.
BEFORE, COMPARING, AGREED = range(3)


class TellsErrors(ABC):
    """The part of a `Guard` that tells the other ranks of errors; the guard describes the attributes."""

    _channel: ControlChannel | None
    _rank: int
    closed: bool
    broken: Failure | None
    is_untold: bool
    leaving: bool
    has_begun_to_leave: bool
    stage: int
    is_in_background: bool
    late: tuple[MpiStrategyError, int] | None
    skips: bool
    unseen: int
    failures: Failures | None
    give_up: Callable[[BaseException], object] | None
    since: float
    comparisons: int

    @abstractmethod
    def here(self) -> Site:
        """Return the call site of the call that this rank is in."""

    @abstractmethod
    def start_leaving(self) -> None:
        """Begin to tell the other ranks that this rank has ended, or takes no more calls."""

    @abstractmethod
    def peers_have_left(self) -> bool | None:
        """Return True when all ranks have ended, False when one calls a collective, None while ranks are missing."""

    @abstractmethod
    def tell_peers(self, why: str = "its program has ended") -> None:
        """Answer the ranks that call a collective: they raise an error that names this rank.  Then leave again."""

    @abstractmethod
    def gather_reports(self, mine: mismatch_report.Report) -> list[mismatch_report.Report]:
        """Return the reports of all ranks."""

    def fail(self, where: str, error: BaseException) -> None:
        """Tell the other ranks of an error in a call that this rank leaves; `stage` says how.

        After the agreement an error of this rank alone ends the job.  Where errors are contained, this rank takes no
        more calls, and tells the others so.

        Args:
            where: the public name of the call.
            error: the error.
        """
        if self.broken:
            return
        if self.stage == COMPARING or not isinstance(error, Exception):  # a signal
            self._leave_comparison()
            self._break_off(where, error, is_cut_short=self.stage != BEFORE)
        elif self.stage == BEFORE:
            self.report_failure(where, error)
        elif is_of_one_rank(error):
            self._fail_alone(where, error)

    def _fail_alone(self, where: str, error: BaseException) -> None:
        if self.give_up is not None:
            self.give_up(error)  # does not return
        elif self.failures is not None:
            self.failures.break_off(where, error)
        elif not self.is_in_background:  # there the program hears of the error when it waits
            self.is_untold = True
            self.stop(Failure(in_words(error), self._rank, where))
            self.tell_of_failure()

    def _leave_comparison(self) -> None:
        """Tell the channel where this rank leaves a comparison that may be under way."""
        if self.stage == COMPARING and self._channel is not None:
            self._channel.leave()

    def _break_off(self, where: str, error: BaseException, *, is_cut_short: bool) -> None:
        """Tell the other ranks of an error between this rank's digest, or its data, and their answer."""
        if self.failures is not None:
            self.failures.break_off(where, error)
        elif is_cut_short:
            self.is_untold = True
            self.stop(Failure(in_words(error), self._rank, where))
            if isinstance(error, Exception) and self.give_up is not None:
                self.give_up(error)

    @property
    def is_broken(self) -> bool:
        """Whether some rank takes no more calls after a failure, so that this rank must not wait for it."""
        return self.broken is not None or (self.failures is not None and self.failures.left_by() is not None)

    def remote_error(self) -> MpiStrategyError:
        """Take no more calls; return the error that says which rank has failed."""
        rank = None if self.failures is None else self.failures.left_by()
        if self.failures is not None and rank is not None:
            return self.failures.remote_error(rank)
        assert self.broken is not None
        return self.broken.as_error()

    def stop(self, reason: Failure) -> None:
        """Take no more calls: it is not known which messages are under way."""
        self.broken = self.broken or reason
        self.closed = True

    def stop_waiting(self, error: MpiStrategyError) -> None:
        """Make this rank's main thread raise `error` where it waits, if it can leave that wait; for any thread.

        If the wait ends before the main thread looks, `error` has no effect.
        """
        if self.failures is not None:
            self.failures.late = error, self.failures.agreements()
        else:
            self.late = error, self.comparisons

    @property
    def is_told_late(self) -> bool:
        """Whether `stop_waiting` was called for the present wait."""
        if self.failures is not None:
            return self.failures.is_told_late
        return self.late is not None and self.late[1] == self.comparisons

    def look(self) -> None:
        """Raise if this rank waits in vain for the others to agree."""
        if self.failures is not None:
            self.failures.look()
        elif self.late is not None and self.is_told_late:
            (error, _), self.late = self.late, None
            self.is_untold = True  # the others may come to this call
            self._leave_comparison()
            self.stop(Failure(str(error)))
            raise self.mark_told(error)

    def leave_with(self, where: str, error: BaseException) -> None:
        """Take no more calls after an error outside every call, and tell the other ranks; does not wait for them.

        Ranks of other nodes are told by the watchdog, and when this rank's program ends.

        Args:
            where: what the error has ended.
            error: the error.
        """
        if self._channel is None or self.broken:
            return
        if self.failures is not None:
            self.failures.break_off(where, error)
        else:
            self.is_untold = True
        self.stop(Failure(in_words(error), self._rank, where))

    def tell_of_failure(self) -> None:
        """Tell the other ranks that this one takes no more calls, where they have not heard; wait a little for them."""
        if not self.is_untold or self.has_begun_to_leave:
            return
        self.start_leaving()
        self.leaving = False  # the program goes on
        end = time.monotonic() + PATIENCE_SECONDS
        for pause in growing_pauses():
            answer = self.peers_have_left()
            if answer is not None or time.monotonic() > end:
                break
            time.sleep(pause)
        if answer is False:
            self.tell_peers()
        self.is_untold = answer is None

    def hear_of_ends(self, reports: Sequence[mismatch_report.Report]) -> Failure | None:
        """Take no more calls if a rank has ended with an error; return which and how, else None."""
        for rank, report in enumerate(reports):
            if mismatch_report.LEFT in report.call and report.error:
                text = f"{report.error}: {report.text}" if report.text else report.error
                self.stop(Failure(text, rank, report.call.get("call", "")))
        return self.broken

    def report_failure(self, where: str, error: BaseException) -> None:
        """Take part in a comparison with an error in place of a call: the other ranks raise it, too."""
        if self._channel is None:
            return
        try:
            self._report_failure(self._channel, where, error)
        except MpiStrategyError:
            raise
        except BaseException as interruption:  # a signal, say: the comparison is under way
            self.stage = COMPARING
            self._leave_comparison()
            if self.failures is not None:
                self.failures.break_off(where, interruption)
            else:
                self.is_untold = True
                self.stop(Failure(in_words(interruption), self._rank, where))
            raise
        self.stage = BEFORE

    def _report_failure(self, channel: ControlChannel, where: str, error: BaseException) -> None:
        # No signature has a negative digest: only if all ranks fail alike does this look like an agreement.
        self.since = time.monotonic()
        self.comparisons += 1
        channel.start(-1 - self._rank)
        patience_ends = time.monotonic() + PATIENCE_SECONDS
        told, pauses = False, growing_pauses()
        while (answer := channel.finished()) is None:
            if self.is_broken:
                return  # some rank has failed and takes no part
            if not told and time.monotonic() > patience_ends:
                told = True
                if self.skips and self.give_up is not None:
                    # The other ranks may wait for data that this rank does not send.
                    self.give_up(error)
                sys.stderr.write(
                    f"[rank {self._rank}] waits to tell the other ranks: {type(error).__name__}: {error}\n"
                )
            time.sleep(next(pauses))
        if not answer and not self.is_broken:
            reports = self.gather_reports(self._report_of({"call": where}, self.here().text, error))
            self._mark_who_prints(error, [(report.error, report.text, report.site) for report in reports])
            self.hear_of_ends(reports)
            self.unseen = 0
            if went_past(reports) and self.give_up is not None:
                # A message that this rank has not received would be taken for the next data.
                self.give_up(error)

    def _mark_who_prints(self, error: BaseException, told: Sequence[tuple[str, ...]]) -> None:
        """Note that the first of the ranks with the same error prints it, and whether others have another one."""
        if told.index(told[self._rank]) < self._rank:
            error.__dict__[OF_ANOTHER_RANK] = True
        elif any(each[0] and each != told[self._rank] for each in told):
            error.__dict__[ONE_OF_SEVERAL] = True

    def _report_of(self, call: dict[str, str], site: str, error: BaseException) -> mismatch_report.Report:
        return mismatch_report.Report(call, site, type(error).__name__, str(error), self.unseen)

    def mark_raised_by_all(self, error: BaseException) -> None:
        """Note who prints an error that all ranks raise after an agreement: the first, or the one of which it tells."""
        if self._rank != (getattr(error, "rank", None) or 0):
            error.__dict__[OF_ANOTHER_RANK] = True

    def mark_told(self, error: E) -> E:
        """Mark an error that the other ranks know, or that can no longer be told."""
        error.__dict__.setdefault(_TOLD, set()).add(id(self))
        return error

    def was_told(self, error: BaseException) -> bool:
        """Return whether `mark_told` marked the error."""
        return id(self) in error.__dict__.get(_TOLD, ())

    def clear_told(self, error: BaseException) -> None:
        """Take the mark of `mark_told` back: it may be raised again in another call."""
        error.__dict__.get(_TOLD, set()).discard(id(self))


def is_of_one_rank(error: BaseException) -> bool:
    """Return whether an error after the agreement may be that of one rank; our own are raised on all ranks."""
    return not isinstance(error, MpiStrategyError) or isinstance(error, DeviceError)


def went_past(reports: Sequence[mismatch_report.Report]) -> bool:
    """Return whether some ranks have made more calls than others since the last comparison."""
    return len({report.unseen for report in reports}) > 1
