"""Where in the user's program a call was made: the first frame outside this package.

Two calls that look alike but stand at different places are different calls: that is how two swapped ones look.
"""

from __future__ import annotations

import os
import sys
import warnings
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple

#: Frames of files in here are the library's own, but for the benchmarks, which use it as anybody does.
_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PROGRAMS = os.path.join(_FOLDER, "bench", "")
_REMEMBERED = 4096


class Site(NamedTuple):
    """A place in a program.

    Attributes:
        text: file and line, for people.
        place: what ranks compare: the file without its folders, which may differ between nodes, line and column.
    """

    text: str
    place: str


UNKNOWN = Site("?", "?")
# With each site its code, which must live as long as its identity is a key.
_known: dict[tuple[int, int], tuple[Site, CodeType]] = {}


def outside(frame: FrameType | None) -> FrameType | None:
    """Return the first frame outside this package, from `frame` outwards; None without."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_FOLDER) or name.startswith(_PROGRAMS):
            break
        frame = frame.f_back
    return frame


def site_of(frame: FrameType | None) -> Site:
    """Return the place of the first frame outside this package, from `frame` outwards."""
    frame = outside(frame)
    if frame is None:
        return UNKNOWN
    code, at = frame.f_code, frame.f_lasti
    found = _known.get((id(code), at))
    if found is None:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        line, _, column, _ = next(islice(code.co_positions(), max(at, 0) // 2, None), (None,) * 4)
        line, name = line or frame.f_lineno, code.co_filename
        place = f"{os.path.basename(name)}:{line}" if column is None else f"{os.path.basename(name)}:{line}:{column}"
        found = _known[id(code), at] = (Site(f"{name}:{line}", place), code)
    return found[0]


def call_site() -> Site:
    """Return the place of the first frame outside this package."""
    return site_of(sys._getframe(1))


def warn(text: str, category: type[Warning]) -> None:
    """Warn of something at the place in the user's program where it began, not somewhere in this package."""
    frame = outside(sys._getframe(1))
    if frame is None:  # a thread of ours
        warnings.warn(text, category, stacklevel=2)
        return
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
