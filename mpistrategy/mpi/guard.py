"""The collective contract: all ranks say what they are about to do, and nobody moves data unless all say the same.

MPI adds two swapped Allreduces, or reinterprets a float64 as a float32, and exits with status 0.  Here every
collective of the library starts with `Call.agree`: a 62-bit digest of the call (public name, operation, structure,
dtypes, shapes, destination, and its place in the program or its name) is compared on a channel of its own: in the cells
of a node, else with one 16-byte Allreduce.  Only when the digests differ do the ranks exchange their calls in words,
and then every rank raises the same table.

A rank that cannot make the call at all (a string among its arrays, say) takes part in the comparison with its error,
so that its peers raise too instead of waiting for it.

A rank can raise its hand: a bit beside its next digest.  The digests differ then, the ranks exchange their calls in
words, find these equal, and go on; all have seen the hand, in the same call.  While no hand is up, this costs nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any, TypeVar

from mpistrategy import errors
from mpistrategy.errors import CollectiveMismatchError, MpiStrategyError, RemoteError
from mpistrategy.mpi.call import Call
from mpistrategy.mpi.call_sites import Site, call_site
from mpistrategy.mpi.channel import ControlChannel, all_equal_patiently, growing_pauses
from mpistrategy.mpi.check_level import ALWAYS, Sparingly
from mpistrategy.mpi.digests import Digests
from mpistrategy.mpi.flight_record import WHAT, FlightRecord
from mpistrategy.mpi.mismatch_report import LEFT, Report, is_late, table
from mpistrategy.mpi.signature import Signature
from mpistrategy.mpi.timeout import DEFAULT_SECONDS

_SETTLED = "_mpistrategy_settled_with"
#: Marks an error that another rank has met, and raises as well.
OF_ANOTHER_RANK = "_mpistrategy_of_another_rank"
_HAND = 1 << 62  # digests are smaller
#: How long a rank that has failed or ends with a non-zero status waits for its peers in silence.
PATIENCE_SECONDS = 2.0

E = TypeVar("E", bound=BaseException)
_LEAVING = Signature("exit")


class Guard:
    """Compares the calls of all ranks of one communicator.

    Args:
        channel: how to reach the other ranks; None when there are none.
        rank: this rank's number.
        size: how many ranks there are.
        is_free: whether a comparison rides with the data, so that leaving it out would save nothing.
    """

    def __init__(
        self, channel: ControlChannel | None = None, rank: int = 0, size: int = 1, *, is_free: bool = True
    ) -> None:
        self._channel = channel
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
        #: Where the program made the call, when that was in another thread.
        self.site: Site | None = None
        #: How often calls are compared: see `mpistrategy.mpi.check_level`.
        self.level = ALWAYS
        self._sparingly: Sparingly | None = None
        #: What the GPU of this rank does with its peers meanwhile: `mpistrategy.mpi.in_flight.InFlight`, once there.
        self.in_flight: Any = None
        #: Makes this rank's GPU the current one, for a with block; None for a rank that drives none.
        self.on_gpu: Callable[[], AbstractContextManager[Any]] | None = None
        #: Since when this rank waits for what its own GPU was given before the collective; infinity if it does not.
        self.own_gpu_since = math.inf
        #: Ends the job with an error that the peers cannot be told.
        self.give_up: Callable[[BaseException], object] | None = None
        self._closed = False
        #: Set when messages of calls that differed may be under way; no call is taken any more.
        self.is_spoiled = False
        #: Whether calls must come here: the guard is closed, or this rank's hand is up.
        self.takes_no_short_way = False
        self._hand = 0
        #: Set on all ranks, in the same call, after some have raised their hands; `raise_hand` tells more.
        self.hand_was_seen = False
        #: How often this rank has compared its calls, where that costs a message; the same on all ranks.
        self.comparisons = 0

    @property
    def closed(self) -> bool:
        """Whether the communicator has been given back, or takes no calls any more: messages may be under way."""
        return self._closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._closed = closed
        self.takes_no_short_way = closed or bool(self._hand)

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

    def raise_hand(self) -> None:
        """Show the other ranks at the next comparison that this one wants something; does nothing after it was seen.

        A signal handler may do so: nothing but attributes is written.
        """
        if self.hand_was_seen:
            return
        if self._channel is None:
            self.hand_was_seen = True
        else:
            self._hand, self.takes_no_short_way = _HAND, True

    def lower_hands(self) -> None:
        """Forget that hands were seen, on all ranks at the same place in the program."""
        self._hand, self.takes_no_short_way, self.hand_was_seen = 0, self._closed, False

    def call(self, where: str, structure: str = "", name: str = "", *, anywhere: bool = False) -> Call:
        """Return a context manager for one public call that all ranks make together.

        Args:
            where: the public name.
            structure: that of the values, in words.
            name: what it is about: the user's name for it, or a variable's.
            anywhere: ranks may make it at different places in the program.

        Raises:
            ContextError: when the strategy has been closed.
            CollectiveMismatchError: after calls that differed were found late.
        """
        if not isinstance(name, str):
            raise errors.OptionTypeError.at(where, found=f"name={name!r}", expected="a string")
        if self.is_spoiled:
            raise CollectiveMismatchError.at(
                where,
                found="a strategy whose ranks have made different calls, which was found late",
                expected="the end of the program, or another strategy",
            )
        if self._closed:
            raise errors.ContextError.at(where, found="a strategy after its close()", expected="an open strategy")
        return Call(self, where, structure, name, anywhere=anywhere)

    def here(self) -> Site:
        """Return where the program makes the call that this rank is in."""
        return self.site or call_site()

    def digest(self, signature: Signature) -> int:
        """Return the number that stands for a signature."""
        return self._digests.of(signature)[0]

    def check_as(self, level: str) -> None:
        """Compare calls as often as a level of `mpistrategy.mpi.check_level` says, where they cost a message.

        All ranks do so at the same time.
        """
        self.level = level
        self._sparingly = None if level == ALWAYS or self._is_free else Sparingly(level)

    def compare_digest(self, digest: int, signature: Signature) -> None:
        """Do `compare` with a digest that is known, sparingly, outside every `call`."""
        if self._channel is not None and not self._agrees(digest, signature, self._channel.all_equal, due=False):
            self.settle(signature)

    def settle(self, signature: Signature) -> None:
        """Raise on every rank, after the digests were found to differ, outside every `call`; not for a raised hand."""
        try:
            self._settle(self._report(signature))
        except MpiStrategyError as error:
            self.unsettled(error)
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
        compare = partial(all_equal_patiently, self._channel) if patiently else self._channel.all_equal
        if not self._agrees(digest, kept, compare, due=not sparingly):
            self._settle(self._report(signature))
        self.since = time.monotonic()

    def _agrees(self, digest: int, signature: Signature, compare: Callable[[int], bool], *, due: bool) -> bool:
        """Return whether all ranks bring an equal call, or this one is not compared."""
        sparingly, hand = self._sparingly, self._hand
        if sparingly is not None:
            number = sparingly.number_to_compare(digest, signature, due=due)
            if number is None:
                return True
            digest = number
        self.comparisons += 1
        if not compare(digest | hand):
            return False
        if sparingly is not None:
            sparingly.agreed()
        if hand:
            self._see_hands()
        return True

    def report_failure(self, where: str, error: BaseException) -> None:
        """Take part in the peers' comparison with an error instead of a call, so that they raise as well."""
        if self._channel is None:
            return
        # No signature has a negative digest, so this never looks like agreement, unless all ranks fail alike.
        self.since = time.monotonic()
        self.comparisons += 1
        self._channel.start(-1 - self._rank)
        patience_ends = time.monotonic() + PATIENCE_SECONDS
        told, pauses = False, growing_pauses()
        while (answer := self._channel.finished()) is None:
            if not told and time.monotonic() > patience_ends:
                told = True
                if self._sparingly is not None and self.give_up is not None:
                    # The peers may be on their way through data that this rank never brings.
                    self.give_up(error)
                sys.stderr.write(
                    f"[rank {self._rank}] waits to tell the other ranks: {type(error).__name__}: {error}\n"
                )
            time.sleep(next(pauses))
        if not answer:
            site = self.here().text
            reports = self._exchange(Report({"call": where}, site, type(error).__name__, str(error), [], self._unseen))
            if self._sparingly is not None:
                self._sparingly.begin_anew()
                if _went_past(reports) and self.give_up is not None:
                    # Some peer has sent what this rank never received, and which it would take for the next data.
                    self.give_up(error)

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
        reports = self._exchange(Report({LEFT: why}, "its end", earlier=self._pending(), unseen=self._unseen))
        if self._sparingly is not None:
            self._sparingly.begin_anew()
        if all(LEFT in report.call for report in reports):
            raise CollectiveMismatchError(table(reports))  # all have left; what they did before differed
        self.start_leaving()

    def _report(self, signature: Signature) -> Report:
        digest = self._digests.of(signature)[0]
        if self._sparingly is not None:
            digest = self._sparingly.number_compared(digest)
        return Report(signature.describe(), self.here().text, "", "", self._pending(), self._unseen, digest)

    @property
    def _unseen(self) -> int:
        return 0 if self._sparingly is None else self._sparingly.unseen

    def _pending(self) -> list[tuple[int, int, dict[str, str]]]:
        """Return the calls since the last comparison, in words."""
        pending = [] if self._sparingly is None else self._sparingly.pending
        return [(number, digest, signature.describe()) for number, digest, signature in pending]

    def _exchange(self, mine: Report) -> list[Report]:
        assert self._channel is not None
        import json  # here, for the quick import: only reports need it

        texts = self._channel.allgather_text(json.dumps(astuple(mine)))
        return [Report(*json.loads(text)) for text in texts]

    def _see_hands(self) -> None:
        self.hand_was_seen = True  # before the hand goes down: a signal may come in between
        self._hand, self.takes_no_short_way = 0, self._closed

    def _settle(self, mine: Report) -> None:
        """Find out why the digests differ; raise on every rank unless hands are up and nothing else."""
        reports = self._exchange(mine)
        if mine.digest is not None and all(report.digest == mine.digest for report in reports):
            if self._sparingly is not None:
                self._sparingly.agreed()
            self._see_hands()
            return
        if self._sparingly is not None:
            self._sparingly.begin_anew()
        for rank, report in enumerate(reports):
            if report.error:
                kind = getattr(errors, report.error, RemoteError)
                if not (isinstance(kind, type) and issubclass(kind, MpiStrategyError)):
                    kind = RemoteError
                if _went_past(reports):
                    time.sleep(PATIENCE_SECONDS)  # that rank ends the job
                text = f"rank {rank} could not make this call ({report.site}): {report.error}: {report.text}"
                error = kind(text)
                error.__dict__[OF_ANOTHER_RANK] = True
                raise self.settled(error)
        if is_late(reports):
            # What was sent and not received would be taken for the next data.
            self.closed = self.is_spoiled = True
        raise self.settled(CollectiveMismatchError(table(reports)))

    def settled(self, error: E) -> E:
        """Mark an error that the peers of this guard know, or that it is too late to tell them."""
        error.__dict__.setdefault(_SETTLED, set()).add(id(self))
        return error

    def is_settled(self, error: BaseException) -> bool:
        """Return whether `settled` marked the error."""
        return id(self) in error.__dict__.get(_SETTLED, ())

    def unsettled(self, error: BaseException) -> None:
        """Take the mark of `settled` back."""
        error.__dict__.get(_SETTLED, set()).discard(id(self))


def _went_past(reports: Sequence[Report]) -> bool:
    """Return whether ranks have made calls that others have not, before they heard of it."""
    return len({report.unseen for report in reports}) > 1
