"""What tells calls apart: the call site, where in the user's program a call was made, and the call's signature.

All ranks must make a call with the same signature.  The call site is a part of the signature.

Two equal calls at different call sites count as different calls, since that is how two swapped calls look.  A call site
is the call's frame outside this package and at most two callers, innermost first; it ends at the step function.  So the
calls of a helper are told apart by the lines that called the helper.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from threading import main_thread
from types import CodeType, FrameType
from typing import Any, NamedTuple

from mpistrategy.objects.text import printable

#: Frames of files in here are the library's own, except for the benchmarks, which use it as programs do.  Named as code
#: objects name it: `__file__` is elsewhere for a package in a zip file.
FOLDER = os.path.join((lambda: None).__code__.co_filename.rsplit(os.sep, 3)[0], "")
_PROGRAMS = os.path.join(FOLDER, "cli", "bench", "")
_REMEMBERED = 4096
_CALLERS = 2


class Site(NamedTuple):
    """A call site.

    Attributes:
        text: file and line of the call, for people.
        place: what ranks compare: file, line and column of the call and of its callers, innermost first.  Without
            folders, which may differ between nodes.
    """

    text: str
    place: str


#: The code of the function of this package that calls step functions: its callers do not count.
_step_caller: CodeType | None = None
#: The folders and files whose frames are no call sites of the program.
_passed_over: list[str] = [FOLDER, warnings.__file__]  # the latter has the decorator of deprecated functions


#: Whether the files of the frames seen so far belong to this package.
_own_files: dict[str, bool] = {}


def _is_own(file: str) -> bool:
    """Return whether a file belongs to this package."""
    is_own = _own_files[file] = file.startswith(tuple(_passed_over)) and not file.startswith(_PROGRAMS)
    return is_own


def calls_steps(function: Callable[..., Any]) -> None:
    """Set the function of this package that calls step functions."""
    global _step_caller
    _step_caller = function.__code__


def pass_over(folder: str, *files: str) -> None:
    """Take the files in a folder, and others, for this package's: their frames are no call sites of the program."""
    _passed_over.extend((os.path.join(folder, ""), *files))
    _own_files.clear()


def outside(frame: FrameType | None) -> FrameType | None:
    """Return the first frame outside this package, from `frame` outwards; None without."""
    while frame is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _site_of(frames: list[FrameType]) -> Site:
    if not frames:
        return Site("?", "?")
    positions = [_position(frame) for frame in frames]
    places = (f"{os.path.basename(file)}:{line}{column}" for file, line, column in positions)
    return Site("{}:{}".format(*positions[0]), " from ".join(places))


def _position(frame: FrameType) -> tuple[str, int, str]:
    """Return a frame's file and line, and its column as ``:8``; "" where Python knows none."""
    code, at = frame.f_code, frame.f_lasti
    line, _, column, _ = next(islice(code.co_positions(), max(at, 0) // 2, None), (None,) * 4)
    return code.co_filename, line or frame.f_lineno, "" if column is None else f":{column}"


#: The call sites seen so far, by the frames' codes and instructions.  Each keeps its codes, so that no other code gets
#: the id of one.
_sites: dict[tuple[int, ...], tuple[Site, list[CodeType]]] = {}


def site_of(frame: FrameType | None) -> Site:
    """Return the call site of a call in `frame`, or in the first frame outside this package from there."""
    frames: list[FrameType] = []
    key: tuple[int, ...] = ()
    while frame is not None:
        code = frame.f_code
        is_own = _own_files.get(code.co_filename)
        if is_own is None:
            is_own = _is_own(code.co_filename)
        if not is_own:
            frames.append(frame)
            key += id(code), frame.f_lasti
            # The caller of a module's own code is Python itself, and may differ between ranks started differently.
            if len(frames) > _CALLERS or code.co_name == "<module>":
                break
        elif code is _step_caller and frames:
            break
        frame = frame.f_back
    entry = _sites.get(key)
    if entry is None:
        if len(_sites) >= _REMEMBERED:
            _sites.clear()
        entry = _sites[key] = _site_of(frames), [call_frame.f_code for call_frame in frames]
    return entry[0]


def call_site() -> Site:
    """Return the call site of the call that this thread makes."""
    return site_of(sys._getframe(1))


def program_site() -> Site:
    """Return the call site of this thread; in a thread of another library, that of the waiting main thread."""
    return site_of(outside(sys._getframe(1)) or sys._current_frames()[main_thread().ident or 0])


def without_columns(place: str) -> str:
    """Return ``loss.py:3 from train.py:12`` of ``loss.py:3:8 from train.py:12:4``."""
    return re.sub(r"(:\d+):\d+(?= from |$)", r"\1", place)


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the call site in the user's program, not at a line of this package.  Control characters are escaped."""
    text = printable(text)
    frame = outside(sys._getframe(1))
    if frame is None:  # a thread of this package
        warnings.warn(text, category, stacklevel=2)
        return
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


# ----------------------------------------------------------------------------------------------------------- signatures


class Signature(NamedTuple):
    """Describes a call; every field is plain data whose repr is the same on all ranks.

    The step of an optimizer, which changes with every call, has its own field: the other fields need to be hashed
    once only.
    """

    collective: str
    op: str = ""
    structure: str = ""
    values: tuple[tuple[str, tuple[int, ...]], ...] = ()
    destination: str = ""
    options: str = ""
    name: str = ""
    call: str = ""
    place: str = ""
    step: int = 0

    def describe(self) -> dict[str, str]:
        """Return the non-empty fields in words."""
        values = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.values)
        words = {**self._asdict(), "values": values}
        return {field: str(value) for field, value in words.items() if value}


def digest_of(signature: Signature) -> int:
    """Return the digest of a signature, below 2**62."""
    return (_digest_of_words(signature[:-1]) + signature.step * _STEP) & _LARGEST


#: What each step adds to a digest; odd, so that no two steps have the same.
_STEP, _LARGEST = 0x1E3779B97F4A7C15, 2**62 - 1


@lru_cache(_REMEMBERED)
def _digest_of_words(words: tuple[Any, ...]) -> int:
    import hashlib  # here, since it loads OpenSSL and would slow `import mpistrategy`

    hashed = hashlib.blake2b(repr(words).encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little") & _LARGEST
