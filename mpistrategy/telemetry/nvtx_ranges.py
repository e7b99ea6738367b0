"""NVTX ranges: NVIDIA's profilers show collectives, steps and spans beside what the GPU does.

No package is required: the first that is installed and can make ranges is used.  NVIDIA's own shared library for it
(libnvToolsExt) is no part of CUDA from 12.9 on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract import observers
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.flight_recorder import CurrentCall
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.objects.text import encoded
from mpistrategy.options import is_on
from mpistrategy.telemetry import spans

#: The environment variable that switches the ranges on: 1.
VARIABLE = "MPISTRATEGY_NVTX"
_LIBRARY = "libnvToolsExt.so.1"


class Ways(NamedTuple):
    """How ranges are made.

    Attributes:
        push: begins one in this thread.
        pop: ends the innermost.
        source: what does it.
    """

    push: Callable[[str], Any]
    pop: Callable[[], Any]
    source: str


def find() -> Ways | None:
    """Return how ranges are made here; None where nothing can.  CuPy is used where it is imported, never imported."""
    ranges = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "nvtx", None)
    if ranges is not None and getattr(ranges, "available", True):
        return Ways(ranges.RangePush, ranges.RangePop, "cupy.cuda.nvtx")
    if "nvtx" in sys.modules or importlib.util.find_spec("nvtx") is not None:
        module: Any = importlib.import_module("nvtx")
        return Ways(module.push_range, module.pop_range, "the package nvtx")
    import ctypes  # here: it is rarely used

    try:
        library = ctypes.CDLL(_LIBRARY)
        push, pop = library.nvtxRangePushA, library.nvtxRangePop
    except (OSError, AttributeError):
        return None
    push.argtypes = [ctypes.c_char_p]
    return Ways(lambda text: push(encoded(text)), pop, _LIBRARY)


class Nvtx(spans.Switched):
    """Ranges for collectives, steps and spans, made by `nvtx`; a context manager.

    What makes them is looked for when the first is wanted: the program may import CuPy until then.
    """

    def __init__(self) -> None:
        self._ranges = _Ranges(self.stop)
        self._is_on = False

    def __repr__(self) -> str:
        return f"<Nvtx, {'on' if self._is_on else 'off'}, by {self.source or 'nothing yet'}>"

    @property
    def source(self) -> str:
        """What makes the ranges; "" as long as nothing does."""
        return "" if self._ranges.ways is None else self._ranges.ways.source

    def start(self) -> None:
        """Make ranges from now on."""
        if not self._is_on:
            self._is_on = True
            observers.watch(self._ranges)

    def stop(self) -> None:
        """Make no further ranges."""
        if self._is_on:
            self._is_on = False
            observers.unwatch(self._ranges)


class _Ranges:
    """The observer that makes ranges; `stop` ends that where nothing can make them."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.ways: Ways | None = None
        self._stop = stop
        self._inside: set[Guard] = set()

    def entered(self, guard: Guard, call: CurrentCall) -> None:
        """Begin the range of a collective."""
        self._inside.add(guard)
        self._push(call.where)

    def left(self, guard: Guard, call: CurrentCall) -> None:
        """End it, unless it began before the ranges."""
        if guard in self._inside:
            self._inside.remove(guard)
            self.end(None)

    def begin(self, kind: str, name: str) -> None:
        """Begin the range of a step or a span."""
        self._push(f"{kind} {name}" if kind == "step" else name)

    def end(self, token: Any) -> None:
        """End it."""
        if self.ways is not None:
            self.ways.pop()

    def _push(self, text: str) -> None:
        if self.ways is None:
            self.ways = find()
            if self.ways is None:
                self._stop()
                words = f"no CuPy that is imported, no package nvtx (pip install nvtx) and no {_LIBRARY}"
                warn(f"no NVTX ranges: there is {words}", FallbackWarning)
                return
        self.ways.push(text)


_by_environment: list[Nvtx] = []


def nvtx() -> Nvtx:
    """Return a context manager that makes NVTX ranges of collectives, steps and spans, for NVIDIA's profilers.

    ``with nvtx():``, or ``start()`` and ``stop()``; for a program as it stands: MPISTRATEGY_NVTX=1.  Ranges are made
    with CuPy, if the program has imported it, with the package ``nvtx``, or with CUDA's libnvToolsExt.  Where there is
    none of them, a FallbackWarning says so, and the program goes on.
    """
    return Nvtx()


def start_from_environment() -> None:
    """Make ranges for the rest of the program where MPISTRATEGY_NVTX says so."""
    if is_on(os.environ.get(VARIABLE, "")) and not _by_environment:
        _by_environment.append(Nvtx())
        _by_environment[0].start()
