"""Planned faults: a plan makes some public collective go wrong on one rank.

Without a plan nothing of this runs.  `arm` hooks the marked methods of `mpistrategy.mpi.contract.public_calls` on this
rank only.  The messages stay the same, so each rank may have a plan of its own.

A plan counts the program's own calls from the first strategy on, over all strategies of this process; calls inside a
collective do not count.  A fault happens before the guard hears of the call: to the other ranks it looks like the same
mistake in the program or the machine.

* `skip` and `swap` return this rank's own value in the form of a result, and the program goes on.  A swapped call is
  made right after this rank's next marked call (errors name its own line), and its result is dropped.  It is never made
  if there is no further call, or if that one raises.  The guard finds both if the calls differ in anything that it
  compares; equal calls in a row cannot be told apart.
* `corrupt` changes the result on this rank, after everything has been compared and sent; at an `update`, this rank's
  copy of the first variable.
* `raise` raises in the program, before the call.  If the program does not catch it, the job ends.

Simulated ranks (`mpistrategy.testing.run_replicas`) have no plan, since they share a process.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import IndexedSlices, Mirrored
from mpistrategy.errors import InjectedFault
from mpistrategy.mpi.contract.call_sites import call_site
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.public_calls import Given, PublicCall, hooks, is_arena
from mpistrategy.mpi.faults.plans import Fault, parse
from mpistrategy.mpi.interface import current

#: The environment variable that holds a plan.
VARIABLE = "MPISTRATEGY_INJECT"


class _Inside(threading.local):
    depth = 0


#: How many marked calls this thread is in; calls inside them are not counted.
inside: _Inside = _Inside()


class Armed:
    """A plan in force on this rank.

    Args:
        text: the plan's words.
        faults: the plan.
        rank, size: this rank's number in the job, and how many there are.
    """

    def __init__(self, text: str, faults: Sequence[Fault], rank: int, size: int) -> None:
        self.text = text
        self._waiting = [fault for fault in faults if fault.is_on(rank)]
        self._prefix = f"[rank {rank}/{size}] "
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._put_off: Callable[[], Any] | None = None

    def due(self, kind: str) -> list[Fault]:
        """Count one more call; return the faults that are to happen at it."""
        with self._lock:
            self._counts[kind] += 1
            self._counts[""] += 1
            due = [f for f in self._waiting if f.kind in ("", kind) and f.number == self._counts[f.kind]]
            self._waiting = [fault for fault in self._waiting if fault not in due]
            return due

    def make(self, public: PublicCall, args: tuple[Any, ...], kwargs: Given) -> Any:
        """Make one call of the program's, with the faults that are due."""
        due = self.due(public.kind)
        put_off, self._put_off = self._put_off, None
        call = partial(public.function, *args, **kwargs)
        given: Given = {}
        if due:
            import inspect  # here, to keep `import mpistrategy` quick

            bound = inspect.signature(public.function).bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():  # an iterator of gradients can be read only once
                if name != "self" and isinstance(value, Iterator):
                    bound.arguments[name] = list(value)
            given = bound.arguments
            call = partial(public.function, *bound.args, **bound.kwargs)
        for fault in due:
            self._begin(fault)
        actions = {fault.action for fault in due}
        if "swap" in actions:
            self._put_off = _from_here(call, given)
        result = public.own(given) if actions & {"skip", "swap"} else call()
        if put_off is not None:
            put_off()
        for fault in due:
            if fault.action == "corrupt":
                result = self._corrupted(result, public, given, fault)
        return result

    def tell_what_is_left(self) -> None:
        """Print which faults have not happened: a job that ends well without them has tested nothing."""
        for fault in self._waiting if os.getpid() == self._pid else ():  # not in a forked child
            calls = self._counts[fault.kind]
            self._say(f"planned fault did not happen, after {calls} such calls: {fault}")

    def _begin(self, fault: Fault) -> None:
        self._say(f"injected fault at {call_site().text}: {fault}")
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "raise":
            raise InjectedFault(f"{fault}: raised on purpose, as {VARIABLE} says")

    def _corrupted(self, result: Any, public: PublicCall, given: Given, fault: Fault) -> Any:
        if public.memory is not None:
            is_done = _flip(public.memory(given), fault.bit)
        else:
            result, is_done = flipped(result, fault.bit, in_place=_is_callers(given))
        if not is_done:
            self._say(f"nothing to corrupt: {fault}")
        return result

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"{self._prefix}{text}\n")
        sys.stderr.flush()


_armed: Armed | None = None


def arm(rank: int, size: int) -> None:
    """Put the plan of the environment in force; do nothing without one, or if it is in force already.

    Args:
        rank, size: this rank's number in the job, and how many there are.

    Raises:
        OptionError: for a malformed plan.
    """
    global _armed
    text = os.environ.get(VARIABLE, "")
    if text == ("" if _armed is None else _armed.text):
        return
    disarm()
    faults = parse(text, VARIABLE, size)
    if not faults:
        return
    _armed = Armed(text, faults, rank, size)
    atexit.register(_armed.tell_what_is_left)
    hooks.append(_counted)


def disarm() -> None:
    """Let the marked methods be as they were written."""
    global _armed
    if _armed is not None:
        atexit.unregister(_armed.tell_what_is_left)
        _armed = None
        hooks.remove(_counted)


def _counted(public: PublicCall, args: tuple[Any, ...], kwargs: Given) -> Any:
    if inside.depth or _armed is None:
        return public.function(*args, **kwargs)
    inside.depth += 1
    try:
        return _armed.make(public, args, kwargs)
    finally:
        inside.depth -= 1


# ------------------------------------------------------------------------------------------------ put off


def _from_here(call: Callable[[], Any], given: Given) -> Callable[[], Any]:
    """Return a function that makes `call` later, with this call site in its errors."""
    site, guard = call_site(), _guard_of(given.get("self"))

    def later() -> None:
        if guard is None:
            call()
            return
        before, guard.site = guard.site, site
        try:
            call()
        finally:
            guard.site = before

    return later


def _guard_of(caller: Any) -> Guard | None:
    extended = getattr(getattr(caller, "strategy", caller), "extended", caller)
    communicator = getattr(extended, "communicator", None) or current.current()
    return None if communicator is None else communicator.guard


# ---------------------------------------------------------------------------------------------- corrupted


def flipped(value: Any, bit: int, *, in_place: bool = False) -> tuple[Any, bool]:
    """Return a result with one bit of its first element flipped, and whether there was an element.

    Args:
        value: arrays and NumPy numbers in a nest, in Mirrored or in IndexedSlices.
        bit: which bit of the element, from the lowest on.
        in_place: whether to write to the arrays, which are the caller's own; else they are copied, since ranks of one
            node may share the memory.
    """
    leaves, structure = nest.flatten(value)
    for index, leaf in enumerate(leaves):
        leaves[index], is_done = _flipped_leaf(leaf, bit, in_place)
        if is_done:
            return (value if leaves[index] is leaf else structure.pack(leaves)), True
    return value, False


def _flipped_leaf(leaf: Any, bit: int, in_place: bool) -> tuple[Any, bool]:
    if isinstance(leaf, Mirrored):
        if not leaf.values:
            return leaf, False
        inner, is_done = flipped(leaf.values[0], bit, in_place=in_place)
        return (leaf if inner is leaf.values[0] else Mirrored((inner,), leaf._lives_on)), is_done
    if isinstance(leaf, IndexedSlices):
        values = np.array(leaf.values)
        return IndexedSlices(values, leaf.indices, leaf.dense_shape), _flip(values, bit)
    if isinstance(leaf, np.ndarray) and in_place and leaf.flags.writeable:
        return leaf, _flip(leaf, bit)
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf, False
    array = np.array(leaf)
    is_done = _flip(array, bit)
    return (array if isinstance(leaf, np.ndarray) else array[()]), is_done


def _flip(array: Array, bit: int) -> bool:
    if array.size == 0:
        return False
    first = array[(slice(1),) * array.ndim] if array.ndim else array
    raw = bytearray(first.tobytes())
    which = bit % (8 * array.itemsize)
    raw[which // 8 if sys.byteorder == "little" else -1 - which // 8] ^= 1 << which % 8
    first[...] = np.frombuffer(raw, array.dtype).reshape(first.shape)
    return True


def _is_callers(given: Given) -> bool:
    """Return whether the result is in the caller's memory: in `out`, or in an arena."""
    return given.get("out") is not None or is_arena(given.get("value"))
