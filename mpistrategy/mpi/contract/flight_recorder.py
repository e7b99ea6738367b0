"""The flight record: which collectives this rank entered last, and when it left them.

It is always on, so an entry costs a fraction of a microsecond: it refers to objects, which are put into words only when
somebody asks.  The numbers and times of the entries lie in memory that the other ranks of the node see: a rank that is
stopped cannot be asked.  An entry's number is written before and after its time, so that a reader who meets an entry
that is half written finds two numbers, and leaves it out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from types import FrameType

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.contract.call_sites import Signature, without_columns

#: How many collectives are remembered.
LENGTH = 256


class CurrentCall:
    """The record of a public call of this rank: the base of `mpistrategy.mpi.contract.call.Call`.

    Attributes:
        where: the public name.
        structure: the structure of the values, in words.
        name: the object of the call.
        place: the call site as ranks compare it; "" for a call that may be made anywhere.
        step: the number of an optimizer's step, which ranks compare; 0 elsewhere.
        signature: the signature that was compared last.
        timeout: how long it may wait for the other ranks, in seconds; None: the strategy's timeout.
        is_patient: whether its comparisons leave the core to other threads.
        number: its number in its strategy, from 1 on; 0 for a call inside another call, and in a strategy of one rank.
        entered, left: times in seconds of time.monotonic(); `left` is 0.0 while the call runs.
        frame: the frame that has entered it; None once it is left.
    """

    where: str = ""
    structure: str = ""
    name: str = ""
    place: str = ""
    step: int = 0
    signature: Signature | None = None
    timeout: float | None = None
    is_patient: bool = False
    number: int = 0
    entered: float = 0.0
    left: float = 0.0
    frame: FrameType | None = None

    def join(self, outer: CurrentCall) -> None:
        """Take over what the ranks compare of the call that this call is a part of."""
        self.where, self.place, self.step, self.timeout = outer.where, outer.place, outer.step, outer.timeout
        self.structure, self.name = outer.structure or self.structure, outer.name or self.name


class FlightRecord:
    """The last `LENGTH` collectives of one strategy on this rank; `Call` writes them down.

    Attributes:
        entries: oldest first.
        number: the number of the last entry; 0 before the first.
        before, times, after: for other processes: an entry's number, when it was entered, and its number once more, at
            the place that is its number modulo `LENGTH`; written in this order.
    """

    def __init__(self) -> None:
        self.entries: deque[CurrentCall] = deque(maxlen=LENGTH)
        self.number: int = 0
        self.show_in(np.zeros(LENGTH, np.int64), np.zeros(LENGTH), np.zeros(LENGTH, np.int64))

    def show_in(self, before: Array, times: Array, after: Array) -> None:
        """Keep `before`, `times` and `after` in this memory, which is zero, from the first entry on."""
        self.before: memoryview[int] = before.data.cast("B").cast("q")
        self.times: memoryview[float] = times.data.cast("B").cast("d")
        self.after: memoryview[int] = after.data.cast("B").cast("q")

    def last(self) -> CurrentCall | None:
        """Return the last entry; for any thread."""
        return self.entries[-1] if self.entries else None


def in_words(call: CurrentCall, *, with_place: bool = True) -> str:
    """Return ``#7 ReplicaContext.all_reduce SUM float64[3] (24 B) at train.py:12``, as far as known."""
    signature = call.signature or Signature("", call=call.where)
    title, place = signature.name or call.name, signature.place or call.place
    parts = (
        f"#{call.number} {signature.call}",
        signature.op if signature.op.isupper() else "",
        values_in_words(signature.values),
        f"name={title!r}" if title else "",
        f"at {without_columns(place)}" if place and with_place else "",
    )
    return " ".join(filter(None, parts))


def line_of(call: CurrentCall, now: float) -> str:
    """Return an entry as a line of a report: how long ago it was entered, its duration, its words."""
    took = f"{(call.left - call.entered) * 1e3:10.3f} ms" if call.left else "not left     "
    return f"{call.entered - now:12.6f} s  {took}  {in_words(call)}"


_FEW = 3


def values_in_words(values: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Return the first few layouts of a call's values, and the bytes of all."""
    if not values:
        return ""
    shown = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in values[:_FEW])
    more = f" and {len(values) - _FEW} more" if len(values) > _FEW else ""
    nbytes = sum(bytes_of(dtype, shape) for dtype, shape in values)
    return f"{shown}{more} ({nbytes} B)"


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of one layout; 0 if it is not known."""
    try:
        itemsize = np.dtype(dtype.removesuffix(" on a GPU").rpartition(" ")[2]).itemsize
    except (
        TypeError,
        ValueError,
        SyntaxError,
    ):  # dtypes that NumPy alone does not know: bfloat16, slices with their indices
        itemsize = 2 if dtype == "bfloat16" else 0
    return itemsize * math.prod(shape)
