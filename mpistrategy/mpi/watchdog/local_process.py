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
    now, guards = time.monotonic(), list(guards)
    inside = [(entry, guard) for guard in guards if (entry := inside_of(guard)) is not None]
    if inside:
        entry, guard = min(inside, key=lambda pair: pair[0].entered)
        in_main = guard.thread == threading.main_thread().ident
        words = flight_recorder.in_words(entry, with_place=not in_main)
        place = f"{'' if in_main else 'main thread '}{_place()}"
        if guard.own_gpu_since < math.inf:
            return f"on its way: its GPU is still at what comes before {words}; {place}"
        return f"in {words} for {now - entry.entered:.1f} s; {place}"
    for guard in guards:
        if guard.gpu_progress is not None and (on_gpu := guard.gpu_progress.in_words(now)):
            return f"{on_gpu}; {_place()}"
    finished = [entry for guard in guards if (entry := guard.record.last()) is not None and entry.left]
    words = "it has made no collective yet"
    if finished:
        last = max(finished, key=lambda entry: entry.entered)
        words = f"its last was {flight_recorder.in_words(last)}, {now - last.left:.1f} s ago"
    return f"in no collective: {_place()}; {words}"


def inside_of(guard: Guard) -> CurrentCall | None:
    """Return the entry of the collective that this rank is in; None when it is in none."""
    # The entry is looked at after `current`: it is written before that is set.
    entry = None if guard.current is None else guard.record.last()
    return None if entry is None or entry.left else entry


def _place() -> str:
    """Return where the main thread is in the program's own code, not in Python's library."""
    with _frames_stay():
        frame = innermost = outside(sys._current_frames().get(threading.main_thread().ident or 0))
        while frame is not None and frame.f_code.co_filename.startswith((_LIBRARY, "<frozen")):
            frame = outside(frame.f_back)
    frame = frame or innermost
    if frame is None:
        return "its program has ended"
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


@contextmanager
def _frames_stay() -> Iterator[None]:
    """Keep the frames of other threads alive while they are read.

    In Python 3.11 making the object of a frame may collect garbage, whose finalizers may let that thread run on, and
    the frame is gone: the walk ends in memory that is something else by then.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def record(guards: Iterable[Guard]) -> str:
    """Return the Python stacks of all threads, the main one first, and the last collectives of all strategies."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, me = threading.main_thread().ident, threading.get_ident()
    with _frames_stay():
        stacks_by_thread = {
            ident: "".join(traceback.format_stack(frame)) for ident, frame in sys._current_frames().items()
        }
    idents = sorted(stacks_by_thread.keys() - {me}, key=lambda ident: ident != main)
    stacks = [
        f"thread {names.get(ident, ident)} (most recent call last):\n{stacks_by_thread[ident]}" for ident in idents
    ]
    # Copies of the records without letting the program's threads run, which write more.
    entries = [entry for guard in guards for entry in list(guard.record.entries)]
    now = time.monotonic()
    calls = [flight_recorder.line_of(entry, now) for entry in sorted(entries, key=lambda entry: entry.entered)]
    head = f"{'entered':>14} {'took':>14}  collective (# its number in its strategy)"
    return "\n".join([*stacks, *([head, *calls] if calls else ["no collectives yet"])])


def why_silent(process: int) -> str:
    """Return why a process of this node does not answer, as far as the system knows."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state = file.read().decode(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return f"its process {process} is gone"
    return _STATES.get(state, _HOLDING).format(process)
