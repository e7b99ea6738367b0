"""Python's `logging` on many ranks: one rank logs everything, the others what matters, each with its number.

`setup_logging` does it in one call; a filter, a formatter and a handler do the same in a configuration of your own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from typing import IO, Any

from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.objects.shown import did_you_mean
from mpistrategy.telemetry.own_rank import own_place

#: For ``logger.info("...", extra=ALL_RANKS)``: every rank logs this record.
ALL_RANKS: Mapping[str, Any] = {"ranks": "all"}

_WHERE = "telemetry: setup_logging or RankFilter"
#: What is written at once stays whole where ranks share a pipe, up to PIPE_BUF of Linux.
_WHOLE_BYTES = 4096
_NEVER = logging.CRITICAL + 1_000_000
_FORMAT, _DATES = "%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"


class RankFilter(logging.Filter):
    """Lets records through according to the rank; for a handler or a logger of your own.

    A record with an attribute ``ranks`` (``extra={"ranks": [0, 3]}``, or `ALL_RANKS`) is logged by these ranks from
    `level` on.

    Args:
        ranks: who logs from `level` on: a rank, several, or "all".
        level: a level or its name.
        others: from which level on the other ranks log; None for never.

    Attributes:
        level, others: as numbers.

    Raises:
        OptionError, OptionTypeError: for unknown levels, and for what is not a rank.
    """

    def __init__(
        self, ranks: int | str | Collection[int] = 0, level: int | str = "NOTSET", others: int | str | None = "ERROR"
    ) -> None:
        super().__init__()
        self._ranks = _checked_ranks(ranks)
        self.level: int = _level_number(level, "level")
        self.others: int = _NEVER if others is None else _level_number(others, "others")

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this rank logs the record."""
        rank, record_ranks = own_place()[0], getattr(record, "ranks", None)
        ranks = self._ranks if record_ranks is None else record_ranks
        if isinstance(ranks, str):
            ranks = {rank} if ranks.lower() == "all" else ()
        if rank in (ranks if isinstance(ranks, Collection) else (ranks,)):
            return record.levelno >= self.level
        return record_ranks is None and record.levelno >= self.others


class RankFormatter(logging.Formatter):
    """Puts ``[rank 1/4] `` in front of every line, also of a traceback; on one rank alone nothing.

    Takes what `logging.Formatter` takes.  ``%(rank)d`` and ``%(size)d`` may stand in the format, which then says
    itself who speaks: nothing is put in front.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        record.rank, record.size = rank, size = own_place()
        text = super().format(record)
        if size == 1 or "%(rank)" in (self._fmt or "") or "{rank" in (self._fmt or ""):
            return text
        return "\n".join(f"[rank {rank}/{size}] {line}" for line in text.split("\n"))


class RankHandler(logging.Handler):
    """Writes each record at once, so that lines of several ranks are not torn, and above a bar of tqdm's.

    Has a `RankFormatter` until it is given another one.

    Args:
        stream: where to; None for `sys.stderr` at the time of each record.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__()
        self._stream = stream
        self.setFormatter(RankFormatter(_FORMAT, _DATES))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            text = self.format(record) + "\n"
            stream = sys.stderr if self._stream is None else self._stream
            is_long = len(text.encode(errors="replace")) > _WHOLE_BYTES
            for part in text.splitlines(keepends=True) if is_long else [text]:
                if tqdm := sys.modules.get("tqdm"):
                    tqdm.tqdm.write(part, stream, end="")
                else:
                    stream.write(part)
                stream.flush()
        except Exception:
            self.handleError(record)


def setup_logging(
    level: int | str = "INFO",
    *,
    ranks: int | str | Collection[int] = 0,
    others: int | str | None = "ERROR",
    logger: str | logging.Logger = "",
    format: str | None = None,
    stream: IO[str] | None = None,
    force: bool = False,
) -> RankHandler:
    """Make Python's `logging` speak on rank 0, on the other ranks from `others` on, and say who speaks.

    In place of `logging.basicConfig`: the program goes on with ``logging.getLogger(__name__)``.  It may be called
    before there is a strategy, and again: the second call replaces the first.  Rank-local.

    A single record is logged by all ranks with ``extra=ms.telemetry.ALL_RANKS``, by some with
    ``extra={"ranks": [0, 3]}``.

    Args:
        level: from which level on `ranks` log.
        ranks: a rank of the job, several, or "all".
        others: from which level on the other ranks log; None for never.
        logger: the logger to set up, with the loggers below it; "" is the root logger.
        format: as in `logging`, with ``%(rank)d`` and ``%(size)d`` if you like; None for time, level, logger, message.
        stream: where to; None for stderr.
        force: remove other handlers of the logger, which else go on beside this one.

    Returns:
        The handler.

    Raises:
        OptionError, OptionTypeError: for unknown levels, and for what is not a rank.
        ValueError: for an invalid `format` of logging.
    """
    target = logger if isinstance(logger, logging.Logger) else logging.getLogger(logger)
    handler, by_rank = RankHandler(stream), RankFilter(ranks, level, others)
    if format is not None:
        handler.setFormatter(RankFormatter(format, _DATES))
    handler.addFilter(by_rank)
    for old_handler in list(target.handlers):
        if force or isinstance(old_handler, RankHandler):
            target.removeHandler(old_handler)
            old_handler.close()
    target.addHandler(handler)
    target.setLevel(min(by_rank.level, by_rank.others))
    return handler


def _level_number(level: int | str, argument: str) -> int:
    """Return the number of a level; the error names the argument."""
    try:
        return logging.NullHandler(level.upper() if isinstance(level, str) else level).level
    except (ValueError, TypeError) as error:
        kind, names = OptionError if isinstance(error, ValueError) else OptionTypeError, logging.getLevelNamesMapping()
        fix = did_you_mean(level, names)
        raise kind.at(_WHERE, found=f"{argument}={level!r}", expected=", ".join(names), fix=fix) from None


def _checked_ranks(ranks: Any) -> Any:
    if isinstance(ranks, str) and ranks.lower() == "all":
        return "all"
    listed = [ranks] if isinstance(ranks, int) else ranks
    if not (isinstance(listed, Collection) and all(isinstance(rank, int) and rank >= 0 for rank in listed)):
        raise OptionError.at(_WHERE, found=f"ranks={ranks!r}", expected='a rank, a list of ranks, or "all"')
    return listed
