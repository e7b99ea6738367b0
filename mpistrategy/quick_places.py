"""What has been worked out for each place in the program that reduces something."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from mpistrategy.mpi.call_sites import UNKNOWN, outside, site_of
from mpistrategy.mpi.guard import Guard
from mpistrategy.mpi.signature import Signature

_REMEMBERED = 1024

Run = Callable[[Any, Any], Any]


def described(run: Run, signature: Signature) -> Run:
    """Return `run`, after it was told what it does: the flight record keeps it, and may have to say so."""
    run.__dict__["signature"] = signature
    return run


class Place:
    """What has been worked out for one place in the program.

    Attributes:
        text: what the ranks compare.
        code: that of the caller; its identity is a key, so it must live.
        known: the all-reduces, by operation, kind and layouts.
        kind, op, dtype, shape, names, kinds, run: the latest all-reduce of one array, one number or a dictionary of
            numbers, and of what: its keys, and the types of the numbers.
    """

    __slots__ = ("code", "dtype", "kind", "kinds", "known", "names", "op", "run", "shape", "text")

    def __init__(self, text: str, code: CodeType | None) -> None:
        self.text = text
        self.code = code
        self.known: dict[Any, Run | None] = {}
        self.kind: type | None = None
        self.op: Any = None
        self.dtype: Any = None
        self.shape: Any = None
        self.names: list[str] | None = None
        self.kinds: list[type] | None = None
        self.run: Run | None = None


class Places:
    """The places of one program that call one strategy.

    Args:
        guard: the strategy's; it knows where calls were made that are done in another thread.

    Attributes:
        known: the places by the caller's code and instruction.
        at: of those with the same instruction number the first, whose code is to be looked at: found faster.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.known: dict[tuple[int, int], Place] = {}
        self.at: dict[int, Place] = {}
        self._elsewhere: dict[str, Place] = {}

    def of(self, frame: FrameType | None) -> Place:
        """Return the place of a frame that is not in `at`: it is not the first there, or the library's own, or None."""
        caller = None if self._guard.site is not None else outside(frame)
        if caller is None:
            site = self._guard.site or UNKNOWN
            if len(self._elsewhere) >= _REMEMBERED:
                self._elsewhere.clear()
            return self._elsewhere.setdefault(site.place, Place(site.place, None))
        key = (id(caller.f_code), caller.f_lasti)
        place = self.known.get(key)
        if place is None:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
                self.at.clear()
            place = self.known[key] = Place(site_of(caller).place, caller.f_code)
            self.at.setdefault(caller.f_lasti, place)
        return place
