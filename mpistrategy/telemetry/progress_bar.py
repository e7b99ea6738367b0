"""Progress of a loop on rank 0, by tqdm: a bar at a terminal, a line now and then in a log file."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from mpistrategy.errors import OptionTypeError
from mpistrategy.telemetry.own_rank import own_place

_WHERE = "telemetry.progress"
_LINE = "{desc}: {n_fmt}/{total_fmt} {elapsed} {rate_fmt}\n"

T = TypeVar("T")


class Progress(AbstractContextManager["Progress[T]"], Generic[T]):
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
        self._iterable = iterable
        self._bar = _bar(total, title, every_seconds)

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise OptionTypeError.at(_WHERE, found="no iterable", expected="one to go through, or update()")
        with self:
            for item in self._iterable:
                yield item
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

    def __exit__(self, *error: object) -> None:
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
    that package the loop runs without them.  Under mpiexec and srun stderr is a pipe and no
    terminal: there are lines, where `every_seconds` asks for them.

    Args:
        iterable: what to go through.
        total: how many there are; None for the length of `iterable`, where it has one.
        title: what stands in front.
        every_seconds: where there is no terminal: write a line so often; None for none.

    Raises:
        OptionTypeError: for what cannot be gone through.

    >>> import mpistrategy as ms
    >>> sum(ms.telemetry.progress(range(5), title="sum"))
    10
    """
    if not isinstance(iterable, (Iterable, type(None))):
        raise OptionTypeError.at(_WHERE, found=f"{iterable!r}", expected="something to go through")
    return Progress(
        iterable, (operator.length_hint(iterable, 0) or None) if total is None else total, title, every_seconds
    )


def _bar(total: int | None, title: str, every_seconds: float | None) -> Any:
    """Return what draws; None for nothing, and without tqdm."""
    is_terminal = sys.stderr.isatty()
    if own_place()[0] != 0 or not (is_terminal or every_seconds):
        return None
    try:
        from tqdm import tqdm  # here: it is optional
    except ImportError:
        return None
    lines = {"mininterval": every_seconds, "maxinterval": every_seconds, "delay": 1e-9, "bar_format": _LINE}
    options: dict[str, Any] = {"dynamic_ncols": True} if is_terminal else lines
    return tqdm(total=total, desc=str(title or "") or None, file=sys.stderr, **options)
