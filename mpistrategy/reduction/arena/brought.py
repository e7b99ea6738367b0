"""Arrays outside of an arena whose combination is written into it, with half of the copies.

To copy an array into the arena and to combine it there reads all of it twice, and writes it twice.  But each rank
combines a share of the elements alone.  The other ranks must see only what they combine themselves; this is copied, and
of its own share a rank reads the array where it is.
"""

from __future__ import annotations

from typing import Any

from mpistrategy.arrays.dtypes import Array, quiet_runner
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.arena.arena import Arena
from mpistrategy.reduction.routes.in_place import Replicas, combine, is_in_place


class Brought:
    """What a rank brings to the next combination of an arena, instead of writing it there.

    Args:
        arena: one that `takes`.
        op: how.
    """

    def __init__(self, arena: Arena[Any], op: ReduceOp) -> None:
        self._communicator, self._op = arena._communicator, op
        self._buckets, self._places = arena._buckets, arena._places
        #: Flat, by the number in the arena.
        self._arrays: dict[int, Array] = {}
        self._owners: dict[int, tuple[object, int]] = {}
        self._quiet = quiet_runner()

    @staticmethod
    def takes(arena: Arena[Any]) -> bool:
        """Return whether an arena is combined where it is, on the only node of its ranks; the same on all."""
        return all(is_in_place(arena._communicator, bucket) for bucket in arena._buckets)

    def bring(self, number: int, array: Array, owner: object, version: int) -> None:
        """Take the `number`-th array of the arena from `array`, which must stay as it is until `combine`.

        Args:
            number: in the arena.
            array: of its shape and dtype.
            owner, version: what `array` was made of, for `has`.
        """
        bucket, place = self._places[number]
        replicas, flat = self._buckets[bucket], array.reshape(-1)
        begin, end = replicas.my_share
        for start, stop in ((place.start, min(place.stop, begin)), (max(place.start, end), place.stop)):
            if start < stop:
                replicas.mine[start:stop] = flat[start - place.start : stop - place.start]
        self._arrays[number] = flat
        self._owners[number] = owner, version

    def has(self, number: int, owner: object, version: int) -> bool:
        """Return whether the array was made of this, in this version."""
        known, its_version = self._owners.get(number, (None, 0))
        return known is owner and its_version == version

    def forget(self, number: int) -> None:
        """Take the array from the arena itself, after all."""
        self._arrays.pop(number, None)
        self._owners.pop(number, None)

    def combine(self) -> None:
        """Combine all ranks' arrays into the arena's; after the ranks have agreed on it, and so have brought theirs."""
        self._quiet(self._combine)
        self._arrays.clear()
        self._owners.clear()
        self._communicator.node_barrier()

    def _combine(self) -> None:
        for bucket, replicas in enumerate(self._buckets):
            start, end = replicas.my_share
            for number in sorted(self._arrays, key=lambda number: self._places[number][1].start):
                of, place = self._places[number]
                first, last = max(place.start, start), min(place.stop, end)
                if of == bucket and first < last:
                    self._part(replicas, start, first)
                    self._part(replicas, first, last, self._arrays[number][first - place.start : last - place.start])
                    start = last
            self._part(replicas, start, end)

    def _part(self, replicas: Replicas, start: int, stop: int, mine: Array | None = None) -> None:
        """Combine a part of a bucket; `mine` in place of this rank's."""
        targets = [array[start:stop] for array in replicas.arrays]
        arrays = list(targets)
        if mine is not None:
            arrays[replicas.local_rank] = mine
        divisor = self._op._divisor(replicas.mine.dtype, self._communicator.size)
        combine(arrays, targets, self._op._on_the_wire, divisor, (0, stop - start))
