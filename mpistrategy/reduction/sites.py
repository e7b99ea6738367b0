"""Where the plans of a program's calls are kept: with the place in the program that makes them."""

from __future__ import annotations

from types import FrameType
from typing import Any

from mpistrategy.mpi.contract.call_sites import UNKNOWN, CallTree, Node, Site, outside
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.reduction.routes.mailboxes import Run

_REMEMBERED = 1024


class SitePlans:
    """The plans of one call site.

    Args:
        site: where the calls are made.

    Attributes:
        text: what the ranks compare.
        known: the plans, by operation, kind and layouts.
        kind, op, dtype, shape, names, kinds, run: the latest all-reduce of one array, one number or a dictionary of
            numbers, and of what: its keys, and the types of the numbers.
    """

    __slots__ = ("dtype", "kind", "kinds", "known", "names", "op", "run", "shape", "text")

    def __init__(self, site: Site) -> None:
        self.text = site.place
        self.known: dict[Any, Run | None] = {}
        self.kind: type | None = None
        self.op: Any = None
        self.dtype: Any = None
        self.shape: Any = None
        self.names: list[str] | None = None
        self.kinds: list[type] | None = None
        self.run: Run | None = None


class Sites:
    """The call sites of a program that call one strategy.

    Args:
        guard: the strategy's; it knows where calls were made that are done in another thread.

    Attributes:
        callers: the innermost frames of the places, by instruction; see `CallTree.root`.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._tree = CallTree(SitePlans)
        self._elsewhere: dict[str, SitePlans] = {}
        self.callers: dict[int, Node[SitePlans]] = self._tree.root.callers

    def of(self, frame: FrameType | None, step: Any) -> SitePlans:
        """Return the plans of the call site of `frame`, in a step function with the code `step`.

        A frame of this package, or None, makes none of its own: the call was made elsewhere, at the guard's site.
        """
        site = self._guard.site
        if site is None and outside(frame) is not None:
            return self._tree.find(frame, step)
        site = site or UNKNOWN
        if len(self._elsewhere) >= _REMEMBERED:
            self._elsewhere.clear()
        return self._elsewhere.setdefault(site.place, SitePlans(site))

    def clear(self) -> None:
        """Forget all plans."""
        self._tree.clear()
        self._elsewhere.clear()
