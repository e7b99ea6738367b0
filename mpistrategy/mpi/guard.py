"""The collective contract: all ranks say what they are about to do, and nobody moves data unless all say the same.

MPI adds two swapped Allreduces, or reinterprets a float64 as a float32, and exits with status 0.  Here every
collective of the library starts with `Call.agree`: a 62-bit digest of the call (public name, operation, structure,
dtypes, shapes, destination, and its place in the program or its name) is compared on a channel of its own: in the cells
of a node, else with one 16-byte Allreduce.  Only when the digests differ do the ranks exchange their calls in words,
and then every rank raises the same table.

A rank that cannot make the call at all (a string among its arrays, say) takes part in the comparison with its error,
so that its peers raise too instead of waiting for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from mpistrategy import errors
from mpistrategy.errors import CollectiveMismatchError, MpiStrategyError, RemoteError
from mpistrategy.mpi.call_sites import Site, call_site

_CACHED_DIGESTS = 4096

_SETTLED = "_mpistrategy_settled_with"
#: How long a rank that has failed or ends with a non-zero status waits for its peers in silence.
PATIENCE_SECONDS = 2.0
_LONG_FIELD = 64
_SHOWN = 160
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-5, 2e-3
_LOOKS = 8

E = TypeVar("E", bound=BaseException)


class Signature(NamedTuple):
    """What all ranks must agree on before data moves; every field is plain data that prints the same everywhere."""

    verb: str
    op: str = ""
    structure: str = ""
    values: tuple[tuple[str, tuple[int, ...]], ...] = ()
    destination: str = ""
    options: str = ""
    name: str = ""
    call: str = ""
    place: str = ""

    def describe(self) -> dict[str, str]:
        """Return the non-empty fields in words."""
        values = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.values)
        words = {**self._asdict(), "values": values}
        return {field: str(value) for field, value in words.items() if value}


_LEAVING = Signature("exit", call="(this rank has left: its program ended)")


class ControlChannel(Protocol):
    """Tiny collectives on a communicator that never carries data."""

    def all_equal(self, digest: int) -> bool:
        """Wait for every rank's digest; return whether all are equal."""

    def start(self, digest: int) -> None:
        """Begin `all_equal` without waiting."""

    def finished(self) -> bool | None:
        """Return the answer to `start`, or None while ranks are missing."""

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order."""


@dataclass(slots=True)
class _Report:
    """What one rank says after the digests differed."""

    call: dict[str, str]
    site: str
    error: str = ""
    text: str = ""


class Guard:
    """Compares the calls of all ranks of one communicator.

    Args:
        channel: how to reach the other ranks; None when there are none.
        rank: this rank's number.
        size: how many ranks there are.
    """

    def __init__(self, channel: ControlChannel | None = None, rank: int = 0, size: int = 1) -> None:
        self._channel = channel
        self._rank = rank
        self.size = size
        self.thread = 0
        self._digests: dict[Signature, int] = {}
        self._long_fields: dict[Any, str] = {}
        self.current: Call | None = None
        #: Where the program made the call, when that was in another thread.
        self.site: Site | None = None
        #: Set when the communicator has been given back.
        self.closed = False

    def call(self, where: str, structure: str = "", name: str = "", *, anywhere: bool = False) -> Call:
        """Return a context manager for one public call that all ranks make together.

        Args:
            where: the public name.
            structure: that of the values, in words.
            name: what it is about: the user's name for it, or a variable's.
            anywhere: ranks may make it at different places in the program.

        Raises:
            ContextError: when the strategy has been closed.
        """
        if not isinstance(name, str):
            raise errors.OptionTypeError.at(where, found=f"name={name!r}", expected="a string")
        if self.closed:
            raise errors.ContextError.at(where, found="a strategy after its close()", expected="an open strategy")
        return Call(self, where, structure, name, anywhere=anywhere)

    def here(self) -> Site:
        """Return where the program makes the call that this rank is in."""
        return self.site or call_site()

    def digest(self, signature: Signature) -> int:
        """Return the number that stands for a signature."""
        digest = self._digests.get(signature)
        return self._remember(signature) if digest is None else digest

    def compare_digest(self, digest: int, signature: Signature) -> None:
        """Do `compare` with a digest that is known, outside every `call`."""
        if self._channel is not None and not self._channel.all_equal(digest):
            self.refuse(signature)

    def refuse(self, signature: Signature) -> NoReturn:
        """Raise on every rank, after the digests were found to differ, outside every `call`."""
        try:
            self._raise_mismatch(_Report(signature.describe(), self.here().text))
        except MpiStrategyError as error:
            error.__dict__[_SETTLED].discard(id(self))
            raise

    def compare(self, signature: Signature, *, patiently: bool = False) -> None:
        """Raise on every rank unless all ranks bring an equal `signature`; `patiently` leaves the core to others."""
        if self._channel is None:
            return
        compare = partial(all_equal_patiently, self._channel) if patiently else self._channel.all_equal
        if not compare(self.digest(signature)):
            self._raise_mismatch(_Report(signature.describe(), self.here().text))

    def report_failure(self, where: str, error: BaseException) -> None:
        """Take part in the peers' comparison with an error instead of a call, so that they raise as well."""
        if self._channel is None:
            return
        # No signature has a negative digest, so this never looks like agreement, unless all ranks fail alike.
        self._channel.start(-1 - self._rank)
        patience_ends = time.monotonic() + PATIENCE_SECONDS
        told, pauses = False, growing_pauses()
        while (answer := self._channel.finished()) is None:
            if not told and time.monotonic() > patience_ends:
                told = True
                sys.stderr.write(
                    f"[rank {self._rank}] waits to tell the other ranks: {type(error).__name__}: {error}\n"
                )
            time.sleep(next(pauses))
        if not answer:
            site = self.here().text
            self._exchange(_Report({"call": where}, site, type(error).__name__, str(error)))

    def start_leaving(self) -> None:
        """Begin to tell the peers that this rank has come to its end."""
        if self._channel is not None:
            self._channel.start(self._remember(_LEAVING))

    def peers_have_left(self) -> bool | None:
        """Return True when all ranks have come to their end, False when one calls a collective, None while waiting."""
        return True if self._channel is None else self._channel.finished()

    def tell_peers(self) -> None:
        """Answer the peers that call a collective: they raise an error that names this rank.  Then wait on."""
        self._exchange(_Report(_LEAVING.describe(), "its end"))
        self.start_leaving()

    def _remember(self, signature: Signature) -> int:
        if len(self._digests) >= _CACHED_DIGESTS:
            self._digests.clear()
            self._long_fields.clear()
        # What is long (the variables of a step, say) stays the same while what is short (its number) changes.
        fields = [self._field_digest(field) if len(field) > _LONG_FIELD else field for field in signature]
        digest = int.from_bytes(_hashed(repr(fields)), "little") >> 2
        self._digests[signature] = digest
        return digest

    def _field_digest(self, field: Any) -> str:
        known = self._long_fields.get(field)
        if known is None:
            known = self._long_fields[field] = _hashed(repr(field)).hex()
        return known

    def _exchange(self, mine: _Report) -> list[_Report]:
        assert self._channel is not None
        import json  # here, for the quick import: only reports need it

        texts = self._channel.allgather_text(json.dumps([mine.call, mine.site, mine.error, mine.text]))
        return [_Report(*json.loads(text)) for text in texts]

    def _raise_mismatch(self, mine: _Report) -> NoReturn:
        reports = self._exchange(mine)
        for rank, report in enumerate(reports):
            if report.error:
                kind = getattr(errors, report.error, RemoteError)
                if not (isinstance(kind, type) and issubclass(kind, MpiStrategyError)):
                    kind = RemoteError
                text = f"rank {rank} could not make this call ({report.site}): {report.error}: {report.text}"
                raise self.settled(kind(text))
        raise self.settled(CollectiveMismatchError(_table(reports)))

    def settled(self, error: E) -> E:
        """Mark an error that the peers of this guard know, or that it is too late to tell them."""
        error.__dict__.setdefault(_SETTLED, set()).add(id(self))
        return error


class Call:
    """One public call that all ranks make together; leaving it with an exception tells the peers.

    The outermost call lends its name and its structure to the signatures of those inside it.
    """

    __slots__ = ("_agreed", "_anywhere", "_guard", "_outer", "name", "place", "structure", "where")

    def __init__(self, guard: Guard, where: str, structure: str, name: str, *, anywhere: bool) -> None:
        self._guard = guard
        self._anywhere = anywhere
        self._outer: Call | None = None
        self._agreed = False
        self.where = where
        self.structure = structure
        self.name = name
        #: Where the program makes the call; "" for one that may be made anywhere.
        self.place = ""

    def __enter__(self) -> Call:
        guard, me = self._guard, threading.get_ident()
        self._outer = outer = guard.current
        if outer is None:
            guard.thread = me
            if guard.size > 1 and not self._anywhere:
                self.place = guard.here().place
        else:
            if guard.thread != me:
                raise errors.ContextError.at(
                    self.where,
                    found=f"a collective while another thread is in {outer.where} of the same strategy",
                    expected="one thread at a time",
                    fix="Make a MirroredStrategy for each thread, all ranks in the same order.",
                )
            self.where = outer.where
            self.structure = outer.structure or self.structure
            self.name = outer.name or self.name
            self.place = outer.place
        guard.current = self
        return self

    def agree(
        self,
        verb: str,
        *,
        op: str = "",
        values: tuple[tuple[str, tuple[int, ...]], ...] = (),
        destination: str = "",
        options: str = "",
        patiently: bool = False,
    ) -> None:
        """Compare this call with the other ranks'; on return all ranks are about to do the same.

        Args:
            verb, op, values, destination, options: what must be equal on all ranks.
            patiently: sleep between two looks for the peers: another thread needs this core.

        Raises:
            CollectiveMismatchError: on every rank, when the calls differ.
            MpiStrategyError: on every rank, when another rank refused the call; of the kind raised there.
        """
        signature = Signature(verb, op, self.structure, values, destination, options, self.name, self.where, self.place)
        self.agree_on(signature, patiently=patiently)

    def agree_on(self, signature: Signature, *, patiently: bool = False) -> None:
        """Do `agree` with a signature."""
        self._guard.compare(signature, patiently=patiently)
        self._set_agreed(True)

    def expect_more(self) -> None:
        """Say that the peers will wait at one more `agree`: a failure before it must be reported to them."""
        self._set_agreed(False)

    def _set_agreed(self, agreed: bool) -> None:
        call: Call | None = self
        while call is not None:
            call._agreed = agreed
            call = call._outer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        guard = self._guard
        guard.current = self._outer
        if not isinstance(error, Exception):
            return
        # After an agreement the peers are on their way through the data: too late to tell them, here or further out.
        if not self._agreed and id(guard) not in error.__dict__.get(_SETTLED, ()):
            guard.report_failure(self.where, error)
        guard.settled(error)
        if self._outer is None:
            error.__dict__[_SETTLED].discard(id(guard))  # the same object may be raised again, in another call


def _hashed(text: str) -> bytes:
    import hashlib  # here, since it loads OpenSSL: `import mpistrategy` stays quick

    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def all_equal_patiently(channel: ControlChannel, digest: int) -> bool:
    """Do `ControlChannel.all_equal` without keeping a core busy."""
    channel.start(digest)
    for pause in growing_pauses():
        for _ in range(_LOOKS):  # an MPI may need several to get on
            if (answer := channel.finished()) is not None:
                return answer
        time.sleep(pause)
    raise AssertionError("pauses end")


def growing_pauses() -> Iterator[float]:
    """Yield the seconds to sleep between two looks at something: short at first, never long."""
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


_DIFFERENT = (
    "Nothing was sent. Make every rank call the same collectives, in the same order, with equal structures,",
    "dtypes and shapes.",
)
_ALIKE = (
    "Nothing was sent. The calls are alike but stand at different places in the program, as swapped ones do. Make the",
    "call at one place, in a function that all ranks use, or give it a name= where it takes one.",
)


def _first_difference(texts: list[str]) -> int:
    """Return where texts begin to differ."""
    pairs = enumerate(zip(*texts, strict=False))
    return next((at for at, characters in pairs if len(set(characters)) > 1), min(map(len, texts)))


def _cut(text: str, start: int) -> str:
    """Return a long text from a little before its first difference on."""
    if len(text) <= _SHOWN:
        return text
    begin = max(0, start - _SHOWN // 4)
    end = begin + _SHOWN
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def _table(reports: list[_Report]) -> str:
    fields = list(dict.fromkeys(field for report in reports for field in report.call))
    different = [field for field in fields if len({report.call.get(field, "") for report in reports}) > 1]
    lines = [f"the ranks do not make the same call; they differ in: {', '.join(different) or 'nothing'}"]
    starts = {field: _first_difference([report.call.get(field, "-") for report in reports]) for field in different}
    for rank, report in enumerate(reports):
        shown = {field: _cut(report.call.get(field, "-"), starts.get(field, 0)) for field in ("call", *different)}
        words = "  ".join(f"{field}={value}" for field, value in shown.items())
        lines.append(f"  rank {rank}: {words}  at {report.site}")
    lines.extend(_ALIKE if different == ["place"] else _DIFFERENT)
    return "\n".join(lines)
