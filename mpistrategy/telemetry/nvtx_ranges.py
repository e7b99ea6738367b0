"""NVTX ranges, by the package nvtx: NVIDIA's profilers show collectives, steps and spans beside the GPU's work."""

from __future__ import annotations

from typing import Any

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract import observers
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.flight_recorder import CurrentCall
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.telemetry import spans

#: The environment variable that switches the ranges on: 1.
VARIABLE = "MPISTRATEGY_NVTX"


class _Ranges:
    """The observer that makes ranges.

    Args:
        package: nvtx.
    """

    def __init__(self, package: Any) -> None:
        self._nvtx = package

    def entered(self, guard: Guard, call: CurrentCall) -> None:
        """Begin the range of a collective."""
        self._nvtx.push_range(call.where)

    def left(self, guard: Guard, call: CurrentCall) -> None:
        """End it."""
        self._nvtx.pop_range()

    def begin(self, kind: str, name: str) -> None:
        """Begin the range of a step or a span."""
        self._nvtx.push_range(f"{kind} {name}" if kind == "step" else name)

    def end(self, token: Any) -> None:
        """End it."""
        self._nvtx.pop_range()


class Nvtx(spans.Switched):
    """Ranges for collectives, steps and spans, made by `nvtx`; a context manager."""

    def __init__(self) -> None:
        self._ranges: _Ranges | None = None

    @property
    def source(self) -> str:
        """What makes the ranges; "" as long as nothing does."""
        return "" if self._ranges is None else "the package nvtx"

    def start(self) -> None:
        """Make ranges from now on."""
        if self._ranges is None:
            try:
                import nvtx  # here: it is optional
            except ImportError:
                warn("no NVTX ranges: there is no package nvtx (pip install nvtx)", FallbackWarning)
                return
            self._ranges = _Ranges(nvtx)
            observers.observers.append(self._ranges)

    def stop(self) -> None:
        """Make no further ranges."""
        if self._ranges is not None:
            observers.unwatch(self._ranges)
            self._ranges = None


def nvtx() -> Nvtx:
    """Return a context manager that makes NVTX ranges of collectives, steps and spans, for NVIDIA's profilers.

    ``with nvtx():``, or ``start()`` and ``stop()``; for a program as it stands: MPISTRATEGY_NVTX=1.  Ranges are made
    with the package ``nvtx``.  Without it, a FallbackWarning says so, and the program goes on.
    """
    return Nvtx()
