"""Where in the user's program a call was made: the call's own frame outside this package, and those that called it.

Two calls that look alike but stand at different places are different calls: that is how two swapped ones look.  The
place is the call's frame and at most two callers, innermost first, and ends at the step function: so the calls of a
helper are told apart by who called the helper.  Outside steps one caller counts.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import CodeType, FrameType
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

#: Frames of files in here are the library's own, but for the benchmarks, which use it as anybody does.
_FOLDER = os.path.join(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")), "")
_PROGRAMS = os.path.join(_FOLDER, "bench", "")
_REMEMBERED, _MOST_ALIKE = 4096, 64
_CALLERS_IN_STEP, _CALLERS_OUTSIDE = 2, 1
_MODULE = "<module>"
_FROM = " from "


class Site(NamedTuple):
    """A place in a program.

    Attributes:
        text: file and line of the call, for people.
        place: what ranks compare: file, line and column of the call and of its callers, innermost first.  The folders
            are left out, since they may differ between nodes.
    """

    text: str
    place: str


UNKNOWN = Site("?", "?")
#: Stands for the code of a step function that has none of Python's.
NO_CODE = object()


def _no_step() -> Any:
    return None


#: Returns the `code_of` the step function that this thread is in; None outside.
_current_step: Callable[[], Any] = _no_step
#: The code of the function of this package that calls step functions: no caller beyond it counts.
_step_caller: CodeType | None = None
#: Which files are of this package, as far as they were met.
_ours: dict[str, bool] = {}


def ask_for_step(current_step: Callable[[], Any]) -> None:
    """Say what returns the `code_of` the step function that the calling thread is in; None outside."""
    global _current_step
    _current_step = current_step


def calls_steps(function: Callable[..., Any]) -> None:
    """Say that `function`, of this package, calls step functions."""
    global _step_caller
    _step_caller = function.__code__


def code_of(function: Any) -> Any:
    """Return what tells the frame of a step function: its code; NO_CODE for a callable that is not Python's."""
    code = getattr(function, "__code__", None)
    if code is not None:
        return code
    if isinstance(function, partial):
        return code_of(function.func)
    return getattr(type(function).__call__, "__code__", NO_CODE)


def _is_ours(name: str) -> bool:
    found = _ours[name] = name.startswith(_FOLDER) and not name.startswith(_PROGRAMS)
    return found


def outside(frame: FrameType | None) -> FrameType | None:
    """Return the first frame outside this package, from `frame` outwards; None without."""
    while frame is not None:
        name = frame.f_code.co_filename
        ours = _ours.get(name)
        if not (_is_ours(name) if ours is None else ours):
            break
        frame = frame.f_back
    return frame


def _frames_of(frame: FrameType | None, step: Any) -> list[FrameType]:
    """Return the frames that make a place: the call's and its callers', innermost first."""
    most = 1 + (_CALLERS_OUTSIDE if step is None else _CALLERS_IN_STEP)
    found: list[FrameType] = []
    while (frame := outside(frame)) is not None:
        found.append(frame)
        code = frame.f_code
        # What calls a module's own code is Python: it may differ between ranks that are started differently.
        if len(found) == most or code is step or code.co_name == _MODULE:
            break
        frame = frame.f_back
        if step is NO_CODE and frame is not None and frame.f_code is _step_caller:
            break
    return found


class Node(Generic[T]):
    """A frame of a place, by its code and instruction.

    Attributes:
        code: of the frame; it is held so that no other code gets its identity.
        is_module: whether it is a module's own code, which has no caller that counts.
        found: what belongs to the place that ends here; None where none does yet.
        callers: of the frames that called from here, by instruction, the first.
        following: another code with the same instruction; None for the last one.
    """

    __slots__ = ("callers", "code", "following", "found", "is_module")

    def __init__(self, code: CodeType | None = None, following: Node[T] | None = None) -> None:
        self.code = code
        self.is_module = code is not None and code.co_name == _MODULE
        self.found: T | None = None
        self.callers: dict[int, Node[T]] = {}
        self.following = following

    def caller(self, frame: FrameType) -> Node[T]:
        """Return the node of a frame that called from here, made by the first call."""
        code, at = frame.f_code, frame.f_lasti
        node, alike = self.callers.get(at), 0
        while node is not None:
            if node.code is code:
                return node
            node, alike = node.following, alike + 1
        # Many with one instruction are code that comes and goes.
        node = self.callers[at] = Node(code, self.callers.get(at) if alike < _MOST_ALIKE else None)
        return node


class CallTree(Generic[T]):
    """What belongs to the places of a program, each worked out once.

    The innermost frames are the callers of `root`.  Who needs it fast looks through the nodes by himself, and asks
    `find` for what he does not find.

    Args:
        make: returns what belongs to a place.
    """

    def __init__(self, make: Callable[[Site], T]) -> None:
        self._make = make
        self._count = 0
        self.root: Node[T] = Node()

    def find(self, frame: FrameType | None, step: Any) -> T:
        """Return what belongs to the call of `frame`, or of the first frame outside this package from there.

        Args:
            frame: where the call is made.
            step: the `code_of` the step function that runs; None outside.
        """
        frame = call = outside(frame)
        node: Node[T] | None = self.root
        callers_left = _CALLERS_OUTSIDE if step is None else _CALLERS_IN_STEP
        # The common case: the place is known, and a step that is a function of Python's, or none, runs.
        while frame is not None and node is not None:
            code, node = frame.f_code, node.callers.get(frame.f_lasti)
            while node is not None and node.code is not code:
                node = node.following
            if node is not None and (code is step or not callers_left or node.is_module):
                if node.found is not None:
                    return node.found
                break
            callers_left -= 1
            frame = frame.f_back if step is NO_CODE else outside(frame.f_back)
        return self._made(_frames_of(call, step))

    def _made(self, frames: list[FrameType]) -> T:
        node = self.root
        for frame in frames:
            node = node.caller(frame)
        if node.found is None:
            if self._count >= _REMEMBERED:
                self.clear()
                return self._made(frames)
            self._count += 1
            node.found = self._make(_site_of(frames))
        return node.found

    def clear(self) -> None:
        """Forget everything; `root.callers` stays the same object."""
        self._count = 0
        self.root.callers.clear()


def _site_of(frames: list[FrameType]) -> Site:
    if not frames:
        return UNKNOWN
    name, line, _ = _position(frames[0])
    places = []
    for frame in frames:
        file, at, column = _position(frame)
        places.append(f"{os.path.basename(file)}:{at}" + ("" if column is None else f":{column}"))
    return Site(f"{name}:{line}", _FROM.join(places))


def _position(frame: FrameType) -> tuple[str, int, int | None]:
    code, at = frame.f_code, frame.f_lasti
    line, _, column, _ = next(islice(code.co_positions(), max(at, 0) // 2, None), (None,) * 4)
    return code.co_filename, line or frame.f_lineno, column


_sites: CallTree[Site] = CallTree(lambda site: site)


def site_of(frame: FrameType | None) -> Site:
    """Return the place of a call that this thread makes in `frame`, or in the first frame outside from there."""
    return _sites.find(frame, _current_step())


def call_site() -> Site:
    """Return the place of the call that this thread makes: the first frame outside this package, and its callers."""
    return site_of(sys._getframe(1))


def line_of(frame: FrameType | None) -> str:
    """Return file and line of the first frame outside this package, from `frame` on."""
    return _site_of([found]).text if (found := outside(frame)) is not None else UNKNOWN.text


def without_columns(place: str) -> str:
    """Return ``loss.py:3 from train.py:12`` of ``loss.py:3:8 from train.py:12:4``."""
    return _FROM.join(_without_column(each) for each in place.split(_FROM))


def _without_column(place: str) -> str:
    file, _, rest = place.partition(":")
    return f"{file}:{rest.partition(':')[0]}" if rest else file


def warn(text: str, category: type[Warning]) -> None:
    """Warn of something at the place in the user's program where it began, not somewhere in this package."""
    frame = outside(sys._getframe(1))
    if frame is None:  # a thread of ours
        warnings.warn(text, category, stacklevel=2)
        return
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
