"""The collective contract: all ranks say what they are about to do, and nobody moves data unless all say the same.

MPI adds two swapped Allreduces, or reinterprets a float64 as a float32, and exits with status 0.  Here every
collective of the library starts with `Call.agree`: a 62-bit digest of the call (public name, operation, structure,
dtypes, shapes, destination, and its place in the program or its name) is compared on a channel of its own: in the
mailboxes of a node, else with one 16-byte Allreduce.  Only when the digests differ do the ranks exchange their calls in
words, and then every rank raises the same table.

A rank that cannot make the call at all (a string among its arrays, say) takes part in the comparison with its error,
so that its peers raise too instead of waiting for it.

A rank can raise a flag: a bit beside its next digest.  The digests differ then, the ranks exchange their calls in
words, find these equal, and go on; all have seen the flag, in the same call.  While no flag is up, this costs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from typing import Any

from mpistrategy import errors
from mpistrategy.errors import CollectiveMismatchError, MpiStrategyError, RemoteError
from mpistrategy.mpi.contract import forks
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Site, call_site
from mpistrategy.mpi.contract.channel import ControlChannel, all_equal_patiently
from mpistrategy.mpi.contract.check_level import ALWAYS, Sparingly
from mpistrategy.mpi.contract.error_messages import OF_ANOTHER_RANK, PATIENCE_SECONDS, TellsErrors, went_past
from mpistrategy.mpi.contract.failures import Failures
from mpistrategy.mpi.contract.flight_recorder import WHAT, FlightRecord
from mpistrategy.mpi.contract.mismatch_report import LEFT, Report, is_late, table
from mpistrategy.mpi.contract.signature import Digests, Signature
from mpistrategy.mpi.contract.timeouts import DEFAULT_SECONDS

_FLAG = 1 << 62  # digests are smaller

_LEAVING = Signature("exit")


class Guard(TellsErrors):
    """Compares the calls of all ranks of one communicator.

    Args:
        channel: how to reach the other ranks; None when there are none.
        rank: this rank's number.
        size: how many ranks there are.
        is_free: whether a comparison rides with the data, so that leaving it out would save nothing.
        failures: where ranks tell each other of errors after an agreement; None where they cannot.
        contains_errors: whether an error that ends this rank's program ends this communicator alone, not the job.
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
        #: How an error after an agreement becomes known to the peers; None where it cannot.
        self.failures = failures
        if failures is not None:
            failures.on_broken = self.stop
        self.contains_errors = contains_errors
        #: Why no more calls are taken after a failure; "" while they are.
        self.broken = ""
        #: What the watchdog makes this rank raise where it waits, and the number of that comparison.
        self.late: tuple[MpiStrategyError, int] | None = None
        #: Whether this rank has shown its call to the peers, and has no answer yet.
        self.is_comparing = False
        #: Whether its calls are made by a thread of this library, for jobs that the program has started.
        self.is_in_background = False
        #: Whether this rank must be able to leave a comparison that goes through MPI.
        self._is_patient = contains_errors and failures is None
        self._is_free = is_free
        self._rank = rank
        self.size = size
        self.thread = 0
        self._digests = Digests()
        self.current: Call | None = None
        self.record = FlightRecord()
        #: Since when this rank has been waiting, if it is in a call that began before; time.monotonic().
        self.since = 0.0
        #: How long a collective may wait for the other ranks, in seconds.
        self.timeout = DEFAULT_SECONDS
        #: Set when this rank has come to its end.
        self.leaving = False
        #: Set when all ranks have agreed to end their programs now, with whatever status: each waits for the others.
        self.all_leave = False
        #: Where the program made the call, when that was in another thread.
        self.site: Site | None = None
        #: How often calls are compared: see `mpistrategy.mpi.contract.check_level`.
        self.level = ALWAYS
        self._sparingly: Sparingly | None = None
        #: What the GPU of this rank does with its peers meanwhile: `gpu_progress.GpuProgress`, once there.
        self.gpu_progress: Any = None
        #: Makes this rank's GPU the current one, for a with block; None for a rank that drives none.
        self.on_gpu: Callable[[], AbstractContextManager[Any]] | None = None
        #: Since when this rank waits for what its own GPU was given before the collective; infinity if it does not.
        self.own_gpu_since = math.inf
        #: Ends the job with an error that the peers cannot be told.
        self.give_up: Callable[[BaseException], object] | None = None
        self._closed = False
        self._is_in_child = False
        if size > 1:
            forks.close_in_children(self)
        #: Set when messages of calls that differed may be under way; no call is taken any more.
        self.is_spoiled = False
        #: Whether calls must come here: the guard is closed, or this rank's flag is up.
        self.must_enter = False
        self._flag = 0
        #: Set on all ranks, in the same call, after some have raised their flags; `raise_flag` tells more.
        self.flag_was_seen = False
        #: What the program's `Strategy.close` gives back besides; not called when the program ends without it.
        self.at_close: list[Callable[[], object]] = []
        #: How often this rank has compared its calls, where that costs a message; the same on all ranks.
        self.comparisons = 0

    @property
    def closed(self) -> bool:
        """Whether the communicator has been given back, or takes no calls any more: messages may be under way."""
        return self._closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._closed = closed
        self.must_enter = closed or bool(self._flag)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Say that what runs in here is the program's own: nobody is waited for."""
        before, self.since = self.since, math.inf
        try:
            yield
        finally:
            self.since = before if before == math.inf else time.monotonic()

    @contextmanager
    def own_gpu(self) -> Iterator[None]:
        """Say that what runs in here waits for this rank's own GPU: the others wait for this rank, not it for them."""
        self.own_gpu_since = time.monotonic()
        try:
            with self.own_work():
                yield
        finally:
            self.own_gpu_since = math.inf

    def raise_flag(self) -> None:
        """Show the other ranks at the next comparison that this one wants something; does nothing after it was seen.

        A signal handler may do so: nothing but attributes is written.
        """
        if self.flag_was_seen:
            return
        if self._channel is None:
            self.flag_was_seen = True
        else:
            self._flag, self.must_enter = _FLAG, True

    def lower_flags(self) -> None:
        """Forget that flags were seen, on all ranks at the same place in the program."""
        self._flag, self.must_enter, self.flag_was_seen = 0, self._closed, False

    def call(
        self, where: str, structure: str = "", name: str = "", *, called: Any = None, anywhere: bool = False
    ) -> Call:
        """Return a context manager for one public call that all ranks make together.

        Entering it raises OptionTypeError, on all ranks, when `called` is neither None nor a string.

        Args:
            where: the public name.
            structure: that of the values, in words.
            name: what it is about: a variable's name.
            called: the name= that the program gave it; compared instead of the place where the program makes it.
            anywhere: ranks may make it at different places in the program.

        Raises:
            ContextError: when the strategy has been closed.
            ForkedProcessError: in a forked child of a rank.
            CollectiveMismatchError: after calls that differed were found late.
        """
        if self._is_in_child:
            raise forks.refusal(where)
        if self.is_spoiled:
            raise CollectiveMismatchError.at(
                where,
                found="a strategy whose ranks have made different calls, which was found late",
                expected="the end of the program, or another strategy",
            )
        if self.broken:
            raise errors.ContextError.at(
                where,
                found=f"a strategy after a failure: {self.broken}",
                expected="another strategy, made by all its ranks",
            )
        if self._closed:
            raise errors.ContextError.at(where, found="a strategy after its close()", expected="an open strategy")
        return Call(self, where, structure, name, called=called, anywhere=anywhere)

    def here(self) -> Site:
        """Return where the program makes the call that this rank is in."""
        return self.site or call_site()

    def digest(self, signature: Signature) -> int:
        """Return the number that stands for a signature."""
        return self._digests.of(signature)[0]

    def check_as(self, level: str) -> None:
        """Compare calls as often as a level of `mpistrategy.mpi.contract.check_level` says, where they cost a message.

        All ranks do so at the same time.
        """
        self.level = level
        self._sparingly = None if level == ALWAYS or self._is_free else Sparingly(level)

    def compare_digest(self, digest: int, signature: Signature) -> None:
        """Do `compare` with a digest that is known, sparingly, outside every `call`."""
        if self._channel is not None and not self._agrees(digest, signature, due=False):
            self.resolve(signature)

    def resolve(self, signature: Signature) -> None:
        """Raise on every rank, after the digests were found to differ, outside every `call`; not for a raised flag."""
        try:
            self._settle(self._report(signature))
        except MpiStrategyError as error:
            self.clear_told(error)
            raise

    def compare(self, signature: Signature, *, patiently: bool = False, sparingly: bool = False) -> None:
        """Raise on every rank unless all ranks bring an equal `signature`.

        Args:
            signature: of the call.
            patiently: leave the core to others.
            sparingly: only as often as the level says; for calls that need no meeting of the ranks before their data.
        """
        if self._channel is None:
            return
        digest, kept = self._digests.of(signature)
        if self.current is not None:
            self.record.entries[-1][WHAT].signature = kept
        self.since = time.monotonic()
        if not self._agrees(digest, kept, due=not sparingly, patiently=patiently):
            self._settle(self._report(signature))
        self.since = time.monotonic()

    def _agrees(self, digest: int, signature: Signature, *, due: bool, patiently: bool = False) -> bool:
        """Return whether all ranks bring an equal call, or this one is not compared."""
        sparingly, flag = self._sparingly, self._flag
        if sparingly is not None:
            number = sparingly.number_to_compare(digest, signature, due=due)
            if number is None:
                return True
            digest = number
        self.comparisons += 1
        channel = self._channel
        assert channel is not None
        self.is_comparing = True
        try:
            if patiently or self._is_patient:
                equal = all_equal_patiently(channel, digest | flag, self.look)
            else:
                equal = channel.all_equal(digest | flag)
        except MpiStrategyError:  # that is the answer
            self.is_comparing = False
            raise
        self.is_comparing = False
        if not equal:
            return False
        if sparingly is not None:
            sparingly.agreed()
        if flag:
            self._see_flags()
        return True

    def close_in_child(self) -> None:
        """Take no calls in this process, a forked child; whoever was in one when it was forked is not here."""
        self._is_in_child = self.closed = True
        self.current = None

    def start_leaving(self) -> None:
        """Begin to tell the peers that this rank has come to its end."""
        self.leaving, self.since = True, time.monotonic()
        if self._channel is not None:
            digest, sparingly = self._digests.of(_LEAVING)[0], self._sparingly
            if sparingly is not None:  # calls at the end that were not compared are found here
                digest = sparingly.number_to_leave_with(digest)
            self._channel.start(digest)

    def peers_have_left(self) -> bool | None:
        """Return True when all ranks have come to their end, False when one calls a collective, None while waiting."""
        return True if self._channel is None else self._channel.finished()

    def tell_peers(self, why: str = "its program has ended") -> None:
        """Answer the peers that call a collective: they raise an error that names this rank.  Then wait on.

        Raises:
            CollectiveMismatchError: when all have come to their end, and made different calls before.
        """
        reports = self.exchange(Report({LEFT: why}, "its end", earlier=self._pending(), unseen=self.unseen))
        if self._sparingly is not None:
            self._sparingly.begin_anew()
        if self.hear_of_ends(reports):
            return
        if all(LEFT in report.call for report in reports):
            raise CollectiveMismatchError(table(reports))  # all have left; what they did before differed
        self.start_leaving()

    def _report(self, signature: Signature) -> Report:
        digest = self._digests.of(signature)[0]
        if self._sparingly is not None:
            digest = self._sparingly.number_compared(digest)
        return Report(signature.describe(), self.here().text, "", "", self._pending(), self.unseen, digest)

    @property
    def unseen(self) -> int:
        """How many calls were not compared since the last agreement."""
        return 0 if self._sparingly is None else self._sparingly.unseen

    def _pending(self) -> list[tuple[int, int, dict[str, str]]]:
        """Return the calls since the last comparison, in words."""
        pending = [] if self._sparingly is None else self._sparingly.pending
        return [(number, digest, signature.describe()) for number, digest, signature in pending]

    def exchange(self, mine: Report) -> list[Report]:
        """Return the reports of all ranks.

        Raises:
            RemoteError: when some rank takes no more calls.
        """
        assert self._channel is not None
        if self.is_broken:
            raise self.mark_told(self.remote_error())
        import json  # here, for the quick import: only reports need it

        texts = self._channel.allgather_text(json.dumps(astuple(mine)))
        return [Report(*json.loads(text)) for text in texts]

    def _see_flags(self) -> None:
        self.flag_was_seen = True  # before the flag goes down: a signal may come in between
        self._flag, self.must_enter = 0, self._closed

    def _settle(self, mine: Report) -> None:
        """Find out why the digests differ; raise on every rank unless flags are up and nothing else."""
        reports = self.exchange(mine)
        if mine.digest is not None and all(report.digest == mine.digest for report in reports):
            if self._sparingly is not None:
                self._sparingly.agreed()
            self._see_flags()
            return
        if self._sparingly is not None:
            self._sparingly.begin_anew()
        if self.hear_of_ends(reports):
            raise self.mark_told(self.remote_error())
        for rank, report in enumerate(reports):
            if report.error:
                kind = getattr(errors, report.error, RemoteError)
                if not (isinstance(kind, type) and issubclass(kind, MpiStrategyError)):
                    kind = RemoteError
                if went_past(reports):
                    time.sleep(PATIENCE_SECONDS)  # that rank ends the job
                text = f"rank {rank} could not make this call ({report.site}): {report.error}: {report.text}"
                error = kind(text)
                error.__dict__[OF_ANOTHER_RANK] = True
                raise self.mark_told(error)
        if is_late(reports):
            # What was sent and not received would be taken for the next data.
            self.closed = self.is_spoiled = True
        raise self.mark_told(CollectiveMismatchError(table(reports)))
