"""What this process can tell about itself and about other processes of its node, which may hang."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mpistrategy.mpi.contract import flight_recorder
from mpistrategy.mpi.contract.call_sites import outside
from mpistrategy.mpi.contract.flight_recorder import CurrentCall
from mpistrategy.mpi.contract.guard import Guard

_STATES = {
    "T": "its process {} is stopped (SIGSTOP, SIGTSTP)",
    "t": "its process {} is stopped by a debugger",
    "D": "its process {} waits for a disk or a file system",
    "Z": "its process {} has ended",
    "X": "its process {} has ended",
}
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_HOLDING = "its process {} runs, but code in it does not let other Python threads run"


def node_name() -> str:
    """Return the name of this node: Slurm's, if it has started this process."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def now_doing(guards: Iterable[Guard]) -> str:
    """Return where this process is: in which collective, or after which one and where in the program."""
    now = time.monotonic()
    guards = list(guards)
    inside = [(entry, guard.thread) for guard in guards if (entry := inside_of(guard)) is not None]
    if inside:
        oldest, thread = min(inside, key=lambda pair: float(pair[0].entered))
        in_main = thread == threading.main_thread().ident
        words = flight_recorder.in_words(oldest, with_place=not in_main)
        if any(guard.own_gpu_since < math.inf and inside_of(guard) is oldest for guard in guards):
            place = f"{'' if in_main else 'main thread '}{_place()}"
            return f"on its way: its GPU is still at what comes before {words}; {place}"
        return f"in {words} for {now - oldest.entered:.1f} s; {'' if in_main else 'main thread '}{_place()}"
    on_gpu = next((text for guard in guards if (text := _on_gpu(guard, now))), "")
    if on_gpu:
        return f"{on_gpu}; {_place()}"
    if any(guard.leaving for guard in guards):
        return f"at its end: its program has ended; {_last(guards, now)}"
    return f"in no collective: {_place()}; {_last(guards, now)}"


def _on_gpu(guard: Guard, now: float) -> str:
    flight = guard.gpu_progress
    return "" if flight is None else str(flight.in_words(now))


def _last(guards: Iterable[Guard], now: float) -> str:
    entries = [entry for guard in guards if (entry := guard.record.last()) is not None and entry.left]
    if not entries:
        return "it has made no collective yet"
    last = max(entries, key=lambda entry: float(entry.entered))
    return f"its last was {flight_recorder.in_words(last)}, {now - last.left:.1f} s ago"


def inside_of(guard: Guard) -> CurrentCall | None:
    """Return the entry of the collective that this rank is in; None when it is in none."""
    if guard.current is None:
        return None
    entry = guard.record.last()  # looked at after `current`: an entry is written before that is set
    return None if entry is None or entry.left else entry


def _place() -> str:
    """Return where the main thread is in the program's own code, not in Python's library."""
    with _frames_stay():
        frame = innermost = outside(sys._current_frames().get(threading.main_thread().ident or 0))
        if innermost is None:
            return "its main thread has ended"
        while frame is not None and frame.f_code.co_filename.startswith((_LIBRARY, "<frozen")):
            frame = outside(frame.f_back)
    frame = frame or innermost
    code = frame.f_code
    return f"at {code.co_filename}:{frame.f_lineno} in {code.co_name}"


@contextmanager
def _frames_stay() -> Iterator[None]:
    """Keep the frames of other threads alive while they are read.

    In Python 3.11 making the object of a frame may collect garbage, whose finalizers may let that thread run on, and
    the frame is gone: the walk ends in memory that is something else by then.  Later Pythons collect elsewhere.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def record(guards: Iterable[Guard]) -> str:
    """Return the flight record of this process: the last collectives of all its strategies, oldest first."""
    now = time.monotonic()
    lines: list[tuple[float, str]] = []
    for guard in guards:
        entries = list(guard.record.entries)  # copies without letting the program's threads run, which write more
        lines += [(entry.entered, flight_recorder.line_of(entry, now)) for entry in entries]
    if not lines:
        return "no collectives yet\n"
    head = f"{'entered':>14} {'took':>14}  collective (# its number in its strategy)\n"
    return head + "".join(f"{line}\n" for _, line in sorted(lines))


def stacks() -> str:
    """Return the Python stacks of all threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, me = threading.main_thread().ident, threading.get_ident()
    with _frames_stay():
        frames = sys._current_frames()
        found = {ident: traceback.format_stack(frame) for ident, frame in frames.items() if ident != me}
    parts = []
    for ident in sorted(found, key=lambda ident: ident != main):
        stack = "".join(found[ident])
        parts.append(f"thread {names.get(ident, ident)} (most recent call last):\n{stack}")
    return "\n".join(parts)


def why_silent(process: int) -> str:
    """Return why a process of this node does not answer, as far as the system knows."""
    try:
        return _STATES.get(stat_of(process)[0], _HOLDING).format(process)
    except (OSError, IndexError):
        return f"its process {process} is gone"


def stat_of(process: int) -> list[str]:
    """Return what Linux tells about a process, from its state on: ``["S", parent, ...]``; OSError where it is gone."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().decode(errors="replace").rpartition(")")[2].split()
