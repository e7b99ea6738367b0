"""The collective contract: no rank moves data until all ranks are known to make the same call.

Plain MPI adds two swapped Allreduces, or reads a float64 as a float32, and exits with status 0.  Here every collective
starts with `Call.agree`, which compares a 62-bit digest of the call between the ranks: public name, operation,
structure, dtypes, shapes, destination, and the call site or the name.  The digest travels in the mailboxes of a node,
else in the first message of the call (`mpi_channel`).  If the digests differ, the ranks send each other their calls in
words, and every rank raises the same table.

A rank that cannot make the call (there is a string among its arrays, say) sends its error in place of the digest.  The
other ranks raise it, too, and do not wait.

A rank can raise a flag: one bit beside its next digest.  The digests then differ, the ranks find their calls equal, and
go on: all have seen the flag in the same call.  Without a flag this costs nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, TypeVar

from mpistrategy import errors
from mpistrategy.errors import MpiStrategyError, RemoteError
from mpistrategy.mpi.contract import forks
from mpistrategy.mpi.contract.call_sites import Digests, Signature, Site, call_site
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.contract.check_level import ALWAYS, OFF
from mpistrategy.mpi.contract.error_messages import (
    AGREED,
    BEFORE,
    COMPARING,
    OF_ANOTHER_RANK,
    PATIENCE_SECONDS,
    TellsErrors,
    went_past,
)
from mpistrategy.mpi.contract.failures import Failure, Failures
from mpistrategy.mpi.contract.flight_recorder import WHAT, CurrentCall, FlightRecord
from mpistrategy.mpi.contract.timeouts import DEFAULT_SECONDS
from mpistrategy.objects.later import later

if TYPE_CHECKING:
    from mpistrategy.mpi.contract import mismatch_report
else:
    later(globals(), "mpistrategy.mpi.contract.mismatch_report")

_FLAG = 1 << 62  # digests are smaller

#: The public name of the call that closes a strategy.
CLOSE = "Strategy.close"
_LEAVING, _READY = Signature("exit"), Signature("ready for the messages of the call")
#: In place of `_LEAVING` after a failure, so that the other ranks hear of it where they leave at the same time.
_LEAVING_BROKEN = Signature("exit after a failure")

T = TypeVar("T")


class Guard(TellsErrors):
    """Compares the calls of all ranks of one communicator.

    Args:
        channel: how to reach the other ranks; None when there are none.
        rank: this rank's number.
        size: how many ranks there are.
        is_free: whether the comparison travels with the data, so that to leave it out would save nothing.
        failures: where ranks tell each other of errors after an agreement; None where they cannot.
        contains_errors: whether an error that ends this rank's program ends only this communicator, not the job.
    """

    def __init__(
        self,
        channel: ControlChannel | None = None,
        rank: int = 0,
        size: int = 1,
        *,
        is_free: bool = True,
        failures: Failures | None = None,
        contains_errors: bool = False,
    ) -> None:
        self._channel = channel
        #: Tells the other ranks of errors after an agreement; None where that is not possible.
        self.failures = failures
        if failures is not None:
            failures.on_broken = self.stop
        self.contains_errors = contains_errors
        #: Why this guard takes no more calls after a failure; None before.
        self.broken: Failure | None = None
        #: Whether this rank takes no more calls, and the other ranks, which wait for it, have not been told.
        self.is_untold: bool = False
        #: The error that the watchdog makes this rank raise where it waits, and the number of that comparison.
        self.late: tuple[MpiStrategyError, int] | None = None
        #: How far this rank has come with its call: BEFORE, COMPARING or AGREED.
        self.stage: int = BEFORE
        #: Whether a thread of this library makes the calls, for jobs that the program has started.
        self.is_in_background = False
        #: Whether a comparison through MPI must be one that this rank can leave.
        self._is_patient = contains_errors and failures is None
        self._is_free = is_free
        self._rank = rank
        self.size = size
        self.thread = 0
        self._digests = Digests()
        #: The public call that this rank is in, the innermost one.
        self.current: CurrentCall | None = None
        self.record: FlightRecord = FlightRecord()
        #: Since when this rank has been waiting, if it is in a call that began before; time.monotonic().
        self.since: float = 0.0
        #: How long a collective may wait for the other ranks, in seconds.
        self.timeout = DEFAULT_SECONDS
        #: Whether the program of this rank has ended.
        self.leaving: bool = False
        #: Whether this rank has begun to tell the other ranks that it takes no more calls.
        self.has_begun_to_leave: bool = False
        #: Whether all ranks have agreed to end their programs now; each then waits for the others, whatever its status.
        self.all_leave = False
        #: The call site, where the program made the call in another thread.
        self.site: Site | None = None
        #: Whether all calls are compared: see `mpistrategy.mpi.contract.check_level`.
        self.level: str = ALWAYS
        #: Whether calls that need no barrier are not compared.
        self.skips: bool = False
        #: How many calls were not compared since the last agreement.
        self.unseen: int = 0
        #: How far this rank's GPU is with its collectives: a `gpu_progress.GpuProgress`, once there is one.
        self.gpu_progress: Any = None
        #: Makes this rank's GPU the current one, for a with block; None for a rank that drives none.
        self.on_gpu: Callable[[], AbstractContextManager[Any]] | None = None
        #: Since when this rank waits for earlier work of its own GPU; infinity if it does not.
        self.own_gpu_since: float = math.inf
        #: Ends the job with an error that the other ranks cannot be told.
        self.give_up: Callable[[BaseException], object] | None = None
        #: Whether this guard takes no more calls: after a close, a failure or a fork.
        self.closed: bool = False
        self._is_in_child = self._is_after_mpi = False
        if size > 1:
            forks.close_in_children(self)
        self._flag = 0
        #: Whether some rank has raised its flag; set on all ranks in the same call.
        self.flag_was_seen: bool = False
        #: Called by `Strategy.close`; not called when the program ends without it.
        self.at_close: list[Callable[[], object]] = []
        #: How many comparisons this guard has made. Equal on all ranks.
        self.comparisons: int = 0

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Say that the code in here is the program's own: this rank waits for no other rank."""
        before, self.since = self.since, math.inf
        try:
            yield
        finally:
            self.since = before if before == math.inf else time.monotonic()

    @contextmanager
    def own_gpu(self) -> Iterator[None]:
        """Say that the code in here waits for this rank's own GPU: the others wait for this rank, not it for them."""
        self.own_gpu_since = time.monotonic()
        try:
            with self.own_work():
                yield
        finally:
            self.own_gpu_since = math.inf

    def wait_for_gpu(self, event: Any) -> None:
        """Wait for an event of this rank's own GPU; None is none."""
        if event is not None:
            with self.own_gpu():
                event.synchronize()

    def raise_flag(self) -> None:
        """Set this rank's flag, which all ranks see at the next comparison; do nothing if it was seen already.

        A signal handler may call it: it only writes attributes.
        """
        if self.flag_was_seen:
            return
        if self._channel is None:
            self.flag_was_seen = True
        else:
            self._flag = _FLAG

    def lower_flags(self) -> None:
        """Forget that flags were seen; all ranks do so between the same two calls."""
        self._flag, self.flag_was_seen = 0, False

    def refusal(self, where: str) -> MpiStrategyError:
        """Return what a public call raises once this guard is closed."""
        if self._is_in_child:
            return forks.refusal(where)
        if self._is_after_mpi:
            return forks.after_finalize(where)
        if self.broken:
            found, expected = f"a strategy after a failure: {self.broken}", "another strategy, made by all its ranks"
            return errors.ContextError.at(where, found=found, expected=expected)
        return errors.ContextError.at(where, found="a strategy after its close()", expected="an open strategy")

    def here(self) -> Site:
        """Return the call site of the call that this rank is in."""
        return self.site or call_site()

    def digest(self, signature: Signature) -> int:
        """Return the digest of a signature."""
        return self._digests.of(signature)[0]

    def check_as(self, level: str) -> None:
        """Compare all calls, or only those that need a barrier where that costs a message.

        All ranks set the level at the same time.
        """
        self.level = level
        self.skips = level == OFF and not self._is_free

    def compare_digest(self, digest: int, signature: Signature) -> None:
        """Do `compare` with a known digest, outside every `Call`."""
        if self._channel is not None and not self._agrees(digest, signature, due=True):
            self.resolve(signature)

    def on_all(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, on ranks that have agreed on a call, before its messages.  Collective.

        If it raises on a rank, all ranks raise, and the next call is like any other.
        """
        if self._channel is None:
            return work()
        try:
            made = work()
        except Exception as error:
            self.report_failure(self.current.where if self.current else "", error)
            raise self.mark_told(error) from None
        self.compare_digest(self.digest(_READY), _READY)
        return made

    def resolve(self, signature: Signature) -> bool:
        """Raise on every rank after the digests have differed, but for a raised flag; return as `compare`."""
        try:
            return self._resolve(self._report(signature))
        except MpiStrategyError:
            self.stage = BEFORE  # as on the rank that has failed
            raise

    def compare(
        self, signature: Signature, digest: int | None = None, *, patiently: bool = False, sparingly: bool = False
    ) -> bool:
        """Raise on every rank unless all ranks give an equal `signature`.

        Return whether some ranks ask what the others have: `mismatch_report.ASKS`.

        Args:
            signature: of the call.
            digest: its digest; None where it is not known.
            patiently: leave the core to other threads.
            sparingly: only as often as the level says; for calls that need no barrier before their data.
        """
        asked = False
        if self._channel is None:
            if self.current is not None:
                self.current.signature = signature  # for traces
            return asked
        if digest is None:
            digest, signature = self._digests.of(signature)
        if self.current is not None:
            self.record.entries[-1][WHAT].signature = signature
        self.since = time.monotonic()
        if not self._agrees(digest, signature, due=not sparingly, patiently=patiently):
            asked = self.resolve(signature)
        self.since = time.monotonic()
        return asked

    def _agrees(self, digest: int, signature: Signature, *, due: bool, patiently: bool = False) -> bool:
        """Return whether all ranks make an equal call, or this call is not compared."""
        if self.skips and not due:
            self.unseen += 1
            self.stage = AGREED
            return True
        self.comparisons += 1
        flag, channel = self._flag, self._channel
        assert channel is not None
        self.stage = COMPARING
        try:
            equal = channel.all_equal(digest | flag, self.look if patiently or self._is_patient else None)
        except errors.CollectiveMismatchError:  # an answer, too, of replicas in threads
            self.stage = BEFORE
            raise
        if not equal:
            return False  # the reports come next
        self.stage = AGREED
        self.unseen = 0
        if flag:
            self._see_flags()
        return True

    def close_in_child(self) -> None:
        """Take no calls in this process, a forked child: the thread that was in one belongs to the parent."""
        self._is_in_child = self.closed = True
        self.current = None

    def close_with_mpi(self) -> None:
        """Take no more calls, since MPI is being finalized."""
        self._is_after_mpi = self.closed = True

    def start_leaving(self) -> None:
        """Begin to tell the other ranks that this rank has ended, or takes no more calls."""
        self.leaving = self.has_begun_to_leave = True
        self.since = time.monotonic()
        if self._channel is not None:
            self._channel.start(self.digest(_LEAVING if self.broken is None else _LEAVING_BROKEN))

    def peers_have_left(self) -> bool | None:
        """Return True when all ranks have ended, False when one calls a collective, None while ranks are missing."""
        return True if self._channel is None else self._channel.finished()

    def tell_peers(self, why: str = "its program has ended") -> None:
        """Answer the ranks that call a collective: they raise an error that names this rank.  Then leave again."""
        words = {mismatch_report.LEFT: why}
        if self.broken is None:
            mine = mismatch_report.Report(words, "its end", unseen=self.unseen)
        else:
            kind, _, text = self.broken.error.partition(": ")
            mine = mismatch_report.Report({**words, "call": self.broken.where}, "its end", kind, text, self.unseen)
        reports, self.unseen = self.gather_reports(mine), 0
        self.is_untold = False
        if not self.hear_of_ends(reports):
            self.start_leaving()

    def _report(self, signature: Signature) -> mismatch_report.Report:
        words, digest = signature.describe(), self.digest(signature)
        return mismatch_report.Report(words, self.here().text, "", "", self.unseen, digest)

    def gather_reports(self, mine: mismatch_report.Report) -> list[mismatch_report.Report]:
        """Return the reports of all ranks.

        Raises:
            RemoteError: when some rank takes no more calls, and thus may send no report.
        """
        assert self._channel is not None
        if self.is_broken and not self.is_untold:
            raise self.mark_told(self.remote_error())
        self.stage = COMPARING
        interruptions: list[BaseException] = []
        texts: list[str] = []
        try:
            texts = self._channel.allgather_text(json.dumps(astuple(mine)), self.look, interruptions)
            reports = _reports_in(texts)
            self.stage = AGREED
            self.hear_of_ends(reports)
        except BaseException:
            if texts:  # a signal: no rank tells this again
                self.hear_of_ends(_reports_in(texts))
            raise
        if interruptions:
            raise interruptions[0]
        return reports

    def _see_flags(self) -> None:
        self.flag_was_seen = True  # first, since a signal may come between the two lines
        self._flag = 0

    def _resolve(self, mine: mismatch_report.Report) -> bool:
        """Find out why the digests differ; raise on every rank unless it was only a flag, or ranks that ask.

        Return whether it was ranks that ask.
        """
        reports = self.gather_reports(mine)
        if mine.digest is not None and all(report.digest == mine.digest for report in reports):
            self.unseen = 0
            self._see_flags()
            return False
        self.unseen = 0
        if mismatch_report.only_ask(reports):
            return True  # a flag that is up is seen at the next comparison
        if self.hear_of_ends(reports):
            raise self.mark_told(self.remote_error())
        for rank, report in enumerate(reports):
            if report.error:
                kind = getattr(errors, report.error, RemoteError)
                if not (isinstance(kind, type) and issubclass(kind, MpiStrategyError)):
                    kind = RemoteError
                if went_past(reports):
                    time.sleep(PATIENCE_SECONDS)  # the other rank ends the job
                text = f"rank {rank} could not make this call ({report.site}): {report.error}: {report.text}"
                error = kind(text)
                error.__dict__[OF_ANOTHER_RANK] = True
                error.rank = rank
                if isinstance(error, RemoteError):
                    error.error = f"{report.error}: {report.text}"
                raise self.mark_told(error)
        closing = [rank for rank, report in enumerate(reports) if report.call.get("call") == CLOSE]
        if closing and self.contains_errors:
            self.stop(Failure("it has closed the strategy", closing[0]))
            raise self.mark_told(self.remote_error())
        error = mismatch_report.mismatch(reports)
        if self._rank != next(rank for rank, report in enumerate(reports) if mismatch_report.LEFT not in report.call):
            error.__dict__[OF_ANOTHER_RANK] = True  # one rank's print says it all
        raise self.mark_told(error)


def _reports_in(texts: list[str]) -> list[mismatch_report.Report]:
    return [mismatch_report.Report(*json.loads(text)) for text in texts]
