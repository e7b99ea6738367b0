"""NVTX ranges: NVIDIA's profilers show collectives, steps and spans beside what the GPU does.

The package nvtx makes them, or CuPy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract import observers
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.flight_recorder import CurrentCall
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.options import is_on
from mpistrategy.telemetry import spans

#: The environment variable that switches the ranges on: 1.
VARIABLE = "MPISTRATEGY_NVTX"


class _Ranges:
    """The observer that makes ranges.

    Args:
        push: begins one in this thread.
        pop: ends the innermost.
    """

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop
        self._inside: set[Guard] = set()

    def entered(self, guard: Guard, call: CurrentCall) -> None:
        """Begin the range of a collective."""
        self._inside.add(guard)
        self._push(call.where)

    def left(self, guard: Guard, call: CurrentCall) -> None:
        """End it, unless it began before the ranges."""
        if guard in self._inside:
            self._inside.remove(guard)
            self._pop()

    def begin(self, kind: str, name: str) -> None:
        """Begin the range of a step or a span."""
        self._push(f"{kind} {name}" if kind == "step" else name)

    def end(self, token: Any) -> None:
        """End it."""
        self._pop()


class Nvtx(spans.Switched):
    """Ranges for collectives, steps and spans, made by `nvtx`; a context manager."""

    def __init__(self) -> None:
        self._source = ""
        self._ranges: _Ranges | None = None

    def __repr__(self) -> str:
        return f"<Nvtx, {'off' if self._ranges is None else 'on'}, by {self._source or 'nothing yet'}>"

    @property
    def source(self) -> str:
        """What makes the ranges; "" as long as nothing does."""
        return self._source

    def start(self) -> None:
        """Make ranges from now on."""
        if self._ranges is None:
            try:
                import nvtx  # here: it is optional

                self._source, self._ranges = "the package nvtx", _Ranges(nvtx.push_range, nvtx.pop_range)
            except ImportError:
                try:
                    from cupy.cuda import nvtx as cupys

                    self._source, self._ranges = "cupy.cuda.nvtx", _Ranges(cupys.RangePush, cupys.RangePop)
                except ImportError:
                    warn(
                        "no NVTX ranges: there is neither the package nvtx (pip install nvtx) nor CuPy", FallbackWarning
                    )
                    return
            observers.observers.append(self._ranges)

    def stop(self) -> None:
        """Make no further ranges."""
        if self._ranges is not None:
            observers.unwatch(self._ranges)
            self._ranges = None


def nvtx() -> Nvtx:
    """Return a context manager that makes NVTX ranges of collectives, steps and spans, for NVIDIA's profilers.

    ``with nvtx():``, or ``start()`` and ``stop()``; for a program as it stands: MPISTRATEGY_NVTX=1.  Ranges are made
    with the package ``nvtx``, or with CuPy.  Without both, a FallbackWarning says so, and the program goes on.
    """
    return Nvtx()


def start_from_environment() -> None:
    """Make ranges for the rest of the program where MPISTRATEGY_NVTX says so."""
    if is_on(os.environ.get(VARIABLE, "")):
        _of_program().start()


@functools.cache
def _of_program() -> Nvtx:
    return Nvtx()
