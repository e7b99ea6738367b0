"""Telemetry of a job: log lines, progress, and a timeline of all ranks' calls.

Nothing here sends anything.  Nothing runs until the program asks for it.
"""

import os

from mpistrategy.options import is_on
from mpistrategy.telemetry import nvtx_ranges
from mpistrategy.telemetry.logs import ALL_RANKS, RankFilter, RankFormatter, RankHandler, setup_logging
from mpistrategy.telemetry.nvtx_ranges import Nvtx, nvtx
from mpistrategy.telemetry.progress_bar import Progress, progress
from mpistrategy.telemetry.spans import Span, span
from mpistrategy.telemetry.tracing import recorder
from mpistrategy.telemetry.tracing.recorder import Trace, trace

__all__ = [
    "ALL_RANKS",
    "Nvtx",
    "Progress",
    "RankFilter",
    "RankFormatter",
    "RankHandler",
    "Span",
    "Trace",
    "nvtx",
    "progress",
    "setup_logging",
    "span",
    "trace",
]


def __dir__() -> list[str]:
    return list(__all__)


def _start_from_environment() -> None:
    """Record the rest of the program where MPISTRATEGY_TRACE and MPISTRATEGY_NVTX say so."""
    if folder := os.environ.get(recorder.VARIABLE, ""):
        Trace(folder).start()
    if is_on(os.environ.get(nvtx_ranges.VARIABLE, "")):
        Nvtx().start()
