"""A progress bar on rank 0 at a terminal; in a log file nothing, or a line now and then."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sized
from time import monotonic
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.objects.nearest import did_you_mean
from mpistrategy.objects.settings import Settable, Setting
from mpistrategy.telemetry import terminal
from mpistrategy.telemetry.own_rank import own_place

#: The environment variable that decides what is shown: "bar", "lines", or "off".
VARIABLE = "MPISTRATEGY_PROGRESS"
_WHERE = "telemetry.progress"
_BAR_SECONDS, _LINE_SECONDS = 0.1, 30.0
_LEAST_COLUMNS = 10

T = TypeVar("T")


def _checked_total(where: str, name: str, value: Any) -> int | None:
    if value is not None and not (_is_number(value) and value >= 0):
        raise OptionError.at(where, found=f"{name}={value!r}", expected="a number from 0 on, or None")
    return value  # type: ignore[no-any-return]


class Progress(Generic[T], Settable):
    """The progress of a loop; `progress` makes it.

    Args:
        iterable: what to iterate over; None where `update` counts.
        total: how much there is; None for not known.
        title: what stands in front.
        every_seconds: write a line so often, where there is no terminal; None for none.

    Attributes:
        count: how much is done.
    """

    total: Setting[int | None] = Setting(_checked_total)

    def __init__(
        self, iterable: Iterable[T] | None, total: int | None, title: str, every_seconds: float | None
    ) -> None:
        self._iterable = iterable
        self.total = total
        self.count: int = 0
        self._title = title
        asked = os.environ.get(VARIABLE, "").lower()
        self._is_bar = asked == "bar" or (not asked and own_place()[0] == 0 and terminal.is_watched())
        self._period = (
            _BAR_SECONDS if self._is_bar else every_seconds or (_LINE_SECONDS if asked == "lines" else math.inf)
        )
        if own_place()[0] != 0 or asked == "off":
            self._period = math.inf
        self._began = self._told = monotonic()
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Progress {self.text(monotonic() - self._began)}>"

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise OptionTypeError.at(_WHERE, found="no iterable", expected="one to go through, or update()")
        if math.isinf(self._period):
            return iter(self._iterable)
        return self._counted(self._iterable)

    def _counted(self, iterable: Iterable[T]) -> Iterator[T]:
        with self:
            for each in iterable:
                yield each
                self.update()

    def update(self, count: int = 1) -> None:
        """Add to the count."""
        self.count += count
        now = monotonic()
        if now - self._told >= self._period:
            self._told = now
            if self._is_bar:
                terminal.show_bar(self._bar(now))
            else:
                terminal.say(f"{self.text(now - self._began)}\n", sys.stderr)

    def close(self) -> None:
        """Show the last state; a bar stays where it is."""
        if self._is_over or math.isinf(self._period):
            return
        self._is_over = True
        now = monotonic()
        if self._is_bar:
            terminal.end_bar(self._bar(now))
        elif self._told > self._began:
            terminal.say(f"{self.text(now - self._began)}\n", sys.stderr)

    def _bar(self, now: float) -> str:
        text = self.text(now - self._began)
        if not self.total:
            return text
        room = shutil.get_terminal_size().columns - len(text) - 4
        if room < _LEAST_COLUMNS:
            return text
        full = round(min(1.0, self.count / self.total) * min(room, 40))
        return f"{text} [{'#' * full}{'.' * (min(room, 40) - full)}]"

    def text(self, seconds: float) -> str:
        """Return the state after so many seconds in words: ``train: 450/1000 (45 %), 12.3/s, 0:44 left``."""
        title = f"{self._title}: " if self._title else ""
        rate = self.count / seconds if seconds > 0 else 0.0
        speed = f", {rate:.3g}/s" if rate >= 1 or not rate else f", {1 / rate:.3g} s each"
        if not self.total:
            return f"{title}{self.count}{speed}, {_clock(seconds)}"
        left = _clock((self.total - self.count) / rate) if rate else "?"
        rest = f"{left} left" if self.count < self.total else f"took {_clock(seconds)}"
        return f"{title}{self.count}/{self.total} ({100 * self.count // self.total} %){speed}, {rest}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def progress(
    iterable: Iterable[T] | None = None,
    *,
    total: int | None = None,
    title: str = "",
    every_seconds: float | None = None,
) -> Progress[T]:
    """Show how far a loop has come: a bar on rank 0 at a terminal, nothing elsewhere.

    ``for batch in progress(dataset, title="train"):`` goes through `dataset` on every rank as it is;
    ``with progress(total=100) as bar:`` counts what ``bar.update()`` says.  Under mpiexec it counts as a terminal when
    the launcher's stderr is one.  MPISTRATEGY_PROGRESS=bar, lines or off decides otherwise.

    Args:
        iterable: what to go through.
        total: how many there are; None for the length of `iterable`, where it has one.
        title: what stands in front.
        every_seconds: where there is no terminal: write a line so often; None for none.

    Raises:
        OptionTypeError, OptionError: for what cannot be gone through, and for a negative `total` or `every_seconds`.

    >>> import mpistrategy as ms
    >>> sum(ms.telemetry.progress(range(5), title="sum"))
    10
    """
    if not _can_be_gone_through(iterable):
        raise OptionTypeError.at(_WHERE, found=f"{iterable!r}", expected="something to go through")
    if every_seconds is not None and not (_is_number(every_seconds) and every_seconds > 0):
        raise OptionError.at(_WHERE, found=f"every_seconds={every_seconds!r}", expected="seconds > 0, or None")
    total = _checked_total(_WHERE, "total", _length(iterable) if total is None else total)
    asked = os.environ.get(VARIABLE, "").lower()
    if asked not in ("", "bar", "lines", "off"):
        fix = did_you_mean(asked, ("bar", "lines", "off"))
        raise OptionError.at(VARIABLE, found=f"{asked!r}", expected="bar, lines or off", fix=fix)
    return Progress(iterable, total, title, every_seconds)


def _can_be_gone_through(value: Any) -> bool:
    return value is None or isinstance(value, Iterable)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, Sized) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
