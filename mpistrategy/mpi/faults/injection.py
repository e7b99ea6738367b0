"""The seam for faults: the public collectives, so that a plan can make one of them go wrong on one rank.

`collective` marks a method and leaves it as it is: without a plan nothing of this runs.  `arm` puts a counting wrapper
around all that are marked, on this rank only; the messages stay the same, so that each rank may have a plan of its own.

Counted are a program's own calls, from the first strategy on, over all strategies of this process; what a collective
calls inside itself is part of it.  Wrappers act before the guard has heard of the call: a fault is to the other ranks
what the same mistake in the program, or in the machine, would be.

* `skip` and `swap` hand back what this rank brought, as a result would look, and the program goes on.  A swapped call
  is made right after this rank's next marked call (with the line of its own in errors), and its result is dropped; when
  no further call comes, or that one raises, it is never made.  The guard finds both as soon as the calls differ in
  anything that it compares; equal calls in a row cannot be told apart.
* `corrupt` changes the result that this rank's program gets, after everything has been compared and sent; at an
  `update`, this rank's copy of the first variable.
* `raise` raises in the program, before the call: the other ranks hear of it by the end of the job, if it is not caught.

Simulated ranks (`mpistrategy.testing.run_replicas`) obey no plan: they share a process.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import IndexedSlices, Mirrored, contribution
from mpistrategy.errors import InjectedFault
from mpistrategy.mpi.contract.call_sites import call_site
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.faults.plans import Fault, parse
from mpistrategy.mpi.interface import current

#: The environment variable that holds a plan.
VARIABLE = "MPISTRATEGY_INJECT"

Given = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Seam:
    """A public collective.

    Attributes:
        function: the method, as it was written.
        kind: of `mpistrategy.mpi.faults.plans.KINDS`.
        own: returns what a rank gets from a call that it does not make, given the arguments by name.
        memory: returns the array that a result was written to, given the arguments by name; None where it is returned.
    """

    function: Callable[..., Any]
    kind: str
    own: Callable[[Given], Any]
    memory: Callable[[Given], Array] | None

    def owner(self) -> Any:
        """Return the class that has the method."""
        return getattr(sys.modules[self.function.__module__], self.function.__qualname__.partition(".")[0])


_seams: list[Seam] = []


def collective(
    kind: str, own: Callable[[Given], Any] = lambda given: None, memory: Callable[[Given], Array] | None = None
) -> Callable[[F], F]:
    """Mark a public method as a place where planned faults happen; see `Seam`.  Returns the method itself."""

    def mark(function: F) -> F:
        seam = Seam(function, kind, own, memory)
        _seams.append(seam)
        # A module that is loaded while a plan is in force: the class is not there yet, the method can be.
        return function if _armed is None else _counting(seam, _armed)  # type: ignore[return-value]

    return mark


def own_value(name: str) -> Callable[[Given], Any]:
    """Return what gives back what a rank brought in the argument `name`, as a result would be."""
    return lambda given: _own(given[name])


def own_mirrored(name: str, of: str = "value") -> Callable[[Given], Any]:
    """Do `own_value` for what returns Mirrored; ``of="pairs"`` for lists of (value, destinations)."""

    def own(given: Given) -> Any:
        if of == "pairs":
            return [Mirrored((_own(value),)) for value, _ in given[name]]
        return Mirrored((_own(given[name]),))

    return own


def _own(value: Any) -> Any:
    return value.values if _is_arena(value) else nest.map_structure(_own_leaf, value)


def _own_leaf(leaf: Any) -> Any:
    mine = contribution(leaf)
    if isinstance(mine, IndexedSlices):
        return mine
    return np.array(mine) if isinstance(mine, np.ndarray) else np.asarray(mine)[()]


def _is_arena(value: Any) -> bool:
    return hasattr(value, "in_place")


class _Inside(threading.local):
    depth = 0


#: How many marked calls this thread is in: what they call is not counted.
inside = _Inside()


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

    def make(self, seam: Seam, args: tuple[Any, ...], kwargs: Given) -> Any:
        """Make one call of the program's, or do to it what the plan says."""
        due = self.due(seam.kind)
        put_off, self._put_off = self._put_off, None
        call = functools.partial(seam.function, *args, **kwargs)
        given: Given = {}
        if due:
            import inspect  # here, for the quick import

            bound = inspect.signature(seam.function).bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():  # an iterator of gradients can be looked at only once
                if name != "self" and isinstance(value, Iterator):
                    bound.arguments[name] = list(value)
            given = bound.arguments
            call = functools.partial(seam.function, *bound.args, **bound.kwargs)
        for fault in due:
            self._begin(fault)
        actions = {fault.action for fault in due}
        if "swap" in actions:
            self._put_off = _from_here(call, given)
        result = seam.own(given) if actions & {"skip", "swap"} else call()
        if put_off is not None:
            put_off()
        for fault in due:
            if fault.action == "corrupt":
                result = self._corrupted(result, seam, given, fault)
        return result

    def tell_what_is_left(self) -> None:
        """Say which faults have not happened: a job that came through without them has shown nothing."""
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

    def _corrupted(self, result: Any, seam: Seam, given: Given, fault: Fault) -> Any:
        if seam.memory is not None:
            is_done = _flip(seam.memory(given), fault.bit)
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
    """Put the plan of the environment in force; do nothing without one, or when it is in force already.

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
    for seam in _seams:
        setattr(seam.owner(), seam.function.__name__, _counting(seam, _armed))


def disarm() -> None:
    """Put the methods back as they were written."""
    global _armed
    if _armed is not None:
        atexit.unregister(_armed.tell_what_is_left)
        _armed = None
        for seam in _seams:
            setattr(seam.owner(), seam.function.__name__, seam.function)


def _counting(seam: Seam, plan: Armed) -> Callable[..., Any]:
    @functools.wraps(seam.function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if inside.depth:
            return seam.function(*args, **kwargs)
        inside.depth += 1
        try:
            return plan.make(seam, args, kwargs)
        finally:
            inside.depth -= 1

    return counted


# ------------------------------------------------------------------------------------------------ put off


def _from_here(call: Callable[[], Any], given: Given) -> Callable[[], Any]:
    """Return `call` so that errors name the line where the program is now."""
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
        in_place: whether the arrays are the caller's own, to be written to; else they are copied, since ranks of one
            node may read the same memory.
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
        return (leaf if inner is leaf.values[0] else Mirrored((inner,), leaf.lives_on)), is_done
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
    """Return whether the result is in memory of the caller's: where `out` says, or in an arena."""
    return given.get("out") is not None or _is_arena(given.get("value"))
