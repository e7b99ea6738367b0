"""Sums by MPI: those beside the first message of a call, and whether all ranks get the same bits of them.

A sum that travels beside the first message is a persistent Allreduce of its own.  A rank starts it, and then the first
message.  A persistent collective matches only itself, and ranks may start several in any order.  So where the calls
differ nothing is added up that does not belong together: what some ranks have started just waits.  All ranks learn from
the texts of their reports which these are, start those that they lack with whatever is in their buffers, and wait for
all of them.  The buffers are the companion's, not the program's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array

#: A few elements, and so many that every MPI takes the algorithm of its large messages.
COUNTS = (5, 2**15)
_EXPONENTS = 20
#: Larger data gain less from it than two copies cost.
LARGEST_BYTES = 64 * 2**10
#: So many are made for a communicator, each with two buffers; other data travel after the first message.
MOST = 32
#: The numbers of float32 whose sums are tried.
_TRIED = (5, LARGEST_BYTES // 4)


class Companion:
    """A sum over the ranks.

    Args:
        number: equal on all ranks.
        values: what this rank adds, flat.
        sums: the sums over the ranks.
        request: the persistent Allreduce of both.

    Attributes:
        number, values, sums, request: as above.
        start: begins to add up; `values` must stay as they are until `wait` has returned.
        wait: waits for `sums`; returns at once where that was done already.
    """

    def __init__(self, number: int, values: Array, sums: Array, request: Any) -> None:
        self.number: int = number
        self.values: Array = values
        self.sums: Array = sums
        self.request: Any = request
        self.start: Callable[[], None] = request.Start
        self.wait: Callable[[], object] = request.Wait


class Memory(NamedTuple):
    """What a companion is made of.

    Attributes:
        values, sums: its own.
        tried: for the first one, arrays whose sums are tried, and memory for the sums.
    """

    values: Array
    sums: Array
    tried: list[tuple[Array, Array]]


class Companions:
    """The companions of one communicator, made by all its ranks in the same calls.

    Args:
        new_request: returns the persistent Allreduce of two arrays.  Collective.
        rank: this rank's number.
        all_equal: compares a digest over the ranks.

    Attributes:
        started: the one of this rank's present call; whoever starts it writes it here first.
    """

    def __init__(self, new_request: Callable[[Array, Array], Any], rank: int, all_equal: Callable[[int], bool]) -> None:
        self._new_request, self._rank, self._all_equal = new_request, rank, all_equal
        self._room = MOST
        self._made: dict[Hashable, Companion] = {}
        self.started: Companion | None = None

    def find(self, dtype: np.dtype[Any], count: int) -> Companion | None:
        """Return the companion of so many elements; None where there is none yet."""
        return self._made.get((dtype, count))

    @property
    def is_full(self) -> bool:
        """Whether no more can be made; the same on all ranks."""
        return len(self._made) >= self._room

    def memory(self, dtype: np.dtype[Any], count: int) -> Memory:
        """Return what `make` needs; taken before the ranks agree on the call."""
        tried = [(mine, np.empty_like(mine)) for mine in values_to_try(self._rank, _TRIED)] if not self._made else []
        return Memory(np.zeros(count, dtype), np.zeros(count, dtype), tried)

    def make(self, memory: Memory) -> Companion | None:
        """Make it, on ranks that have agreed on the call; None where there is no more room.  Collective."""
        if not self._made and self._room and not self._has_equal_bits(memory):
            self._room = 0
        if self.is_full:
            return None
        values, sums = memory.values, memory.sums
        made = Companion(len(self._made), values, sums, self._new_request(values, sums))
        self._made[values.dtype, values.size] = made
        return made

    def _has_equal_bits(self, memory: Memory) -> bool:
        """Return whether all ranks get the same bits of sums, which MPI does not promise.  Collective."""
        for mine, sums in memory.tried:
            request = self._new_request(mine, sums)
            request.Start()
            request.Wait()
            request.Free()
        return self._all_equal(digest_of([sums for _, sums in memory.tried]))

    def number_started(self) -> int:
        """Return the number of the companion that this rank has started in its present call; -1 for none."""
        return -1 if self.started is None else self.started.number

    def complete(self, numbers: set[int], wait: Callable[[Any], None]) -> None:
        """Complete the companions of these numbers, which some ranks have started.  Collective."""
        found = [companion for companion in self._made.values() if companion.number in numbers]
        for companion in found:
            if companion is not self.started:
                companion.start()
        for companion in found:
            wait(companion.request)
        self.started = None

    def free(self) -> None:
        """Free the requests, on ranks that have waited for all of them."""
        for companion in self._made.values():
            companion.request.Free()


def values_to_try(rank: int, counts: Sequence[int] = COUNTS, dtype: Any = np.float32) -> list[Array]:
    """Return this rank's arrays, of so many elements, for sums that depend on the order of the additions."""
    random = np.random.default_rng(rank)
    return [
        (random.standard_normal(count) * np.exp2(random.integers(-_EXPONENTS, _EXPONENTS, count))).astype(dtype)
        for count in counts
    ]


def digest_of(sums: Iterable[Array]) -> int:
    """Return a digest of arrays, below 2**62."""
    found = hashlib.blake2b(digest_size=8)
    for each in sums:
        found.update(each.data)
    return int.from_bytes(found.digest(), "little") >> 2
