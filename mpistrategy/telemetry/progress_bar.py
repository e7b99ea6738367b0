"""Progress of a loop on rank 0, by tqdm: a bar at a terminal, a line now and then in a log file."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.objects.nearest import did_you_mean
from mpistrategy.telemetry.own_rank import own_place

#: The environment variable that decides what is shown: "bar", "lines", or "off".
VARIABLE = "MPISTRATEGY_PROGRESS"
_WORDS = ("bar", "lines", "off")
_WHERE = "telemetry.progress"
_LINE_SECONDS = 30.0
_LAUNCHERS = ("mpiexec", "mpirun", "prterun", "orterun", "srun", "jsrun")

T = TypeVar("T")


class Progress(Generic[T]):
    """The progress of a loop; `progress` makes it.

    Args:
        iterable: what to iterate over; None where `update` counts.
        total: how much there is; None for not known.
        title: what stands in front.
        every_seconds: write a line so often, where there is no terminal; None for none.

    Attributes:
        count: how much is done.
        total: how much there is; None for not known.
    """

    def __init__(
        self, iterable: Iterable[T] | None, total: int | None, title: str, every_seconds: float | None
    ) -> None:
        self.count: int = 0
        self.total: int | None = total
        self._iterable, self._title = iterable, title
        self._bar = _bar(_shown_as(every_seconds), every_seconds or _LINE_SECONDS, total, title)

    def __repr__(self) -> str:
        return f"<Progress {self._title!r}, {self.count} of {self.total}>"

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise OptionTypeError.at(_WHERE, found="no iterable", expected="one to go through, or update()")
        with self:
            for each in self._iterable:
                yield each
                self.update()

    def update(self, count: int = 1) -> None:
        """Add to the count."""
        self.count += count
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        """Show the last state; a bar stays where it is."""
        if self._bar is not None:
            self._bar.close()

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
    ``with progress(total=100) as bar:`` counts what ``bar.update()`` says.  The bar and the lines are tqdm's: without
    that package the loop runs without them.  Under mpiexec it counts as a terminal when the launcher's stderr is one.
    MPISTRATEGY_PROGRESS=bar, lines or off decides otherwise.

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
    given: Any = iterable
    numbers: dict[str, Any] = {"total": total, "every_seconds": every_seconds}
    if not isinstance(given, (Iterable, type(None))):
        raise OptionTypeError.at(_WHERE, found=f"{iterable!r}", expected="something to go through")
    for name, value in numbers.items():
        if not (value is None or (isinstance(value, (int, float)) and value > 0) or (value == 0 and name == "total")):
            raise OptionError.at(_WHERE, found=f"{name}={value!r}", expected="a number above 0, or None")
    return Progress(iterable, _length(iterable) if total is None else total, title, every_seconds)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, Sized) else None


def _shown_as(every_seconds: float | None) -> str:
    """Return whether this rank shows a "bar" or "lines", or nothing: "off"."""
    asked = os.environ.get(VARIABLE, "").lower()
    if asked not in ("", *_WORDS):
        fix = did_you_mean(asked, _WORDS)
        raise OptionError.at(VARIABLE, found=f"{asked!r}", expected="bar, lines or off", fix=fix)
    if own_place()[0] != 0:
        return "off"
    return asked or ("bar" if _is_at_terminal() else "lines" if every_seconds else "off")


def _bar(how: str, seconds: float, total: int | None, title: str) -> Any:
    """Return what draws; None for nothing, and without tqdm."""
    lines = {
        "mininterval": seconds,
        "maxinterval": seconds,
        "delay": 1e-9,
        "bar_format": "{desc}: {n_fmt}/{total_fmt} {elapsed} {rate_fmt}\n",
    }
    with suppress(ImportError):
        from tqdm import tqdm  # here: it is optional

        options = {"dynamic_ncols": True} if how == "bar" else lines
        return tqdm(total=total, desc=title or None, file=sys.stderr, **options) if how != "off" else None
    return None


def _is_at_terminal() -> bool:
    """Return whether stderr is a terminal, or the pipe of a launcher whose own stderr is one."""
    process = os.getpid()
    with suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            return True
        while process > 1 and stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name.partition(".")[0] in _LAUNCHERS:
                return os.readlink(f"/proc/{process}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
            process = int(rest.split()[1])
    return False
