"""Sums by MPI: those beside the first message of a call, and whether all ranks get the same bits of them.

A sum that travels beside the first message is a persistent Allreduce of its own.  A rank starts it, and then the first
message.  A persistent collective matches only itself, and ranks may start several in any order.  So where the calls
differ nothing is added up that does not belong together: what some ranks have started just waits.  All ranks learn from
the texts of their reports which these are, start those that they lack with whatever is in their buffers, and wait for
all of them.  The buffers are the companion's, not the program's.

In a loop the same call follows a call each time.  All ranks have agreed on the same calls in the same order, so that
all expect the same one next, without a message.  Where that one has a companion, its sum takes the place of the first
message.  Its last element counts the ranks that make that very call.  If these are all, the sum is theirs, and nothing
else is sent.  If not, the first message of any call follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.objects.successors import Successors

#: A few elements, and so many that every MPI takes the algorithm of its large messages.
COUNTS = (5, 2**15)
_EXPONENTS = 20
#: Larger data gain less from it than two copies cost.
LARGEST_BYTES = 256 * 2**10
#: So many are made for a communicator, each with two buffers; other data travel after the first message.
MOST = 32
#: The numbers of float32 whose sums are tried.
_TRIED = (5, LARGEST_BYTES // 4)


class Companion:
    """A sum over the ranks.

    Args:
        number: equal on all ranks.
        mine: what this rank adds, flat; the last element counts ranks.
        totals: the sums over the ranks.
        request: the persistent Allreduce of both.

    Attributes:
        number, request: as above.
        values: what this rank adds.
        sums: the sums over the ranks.
        start: begins to add up; `values` must stay as they are until `wait` has returned.
        wait: waits for `sums`; returns at once where that was done already.
        count: in its one element, how many ranks have made the call that was expected.
    """

    def __init__(self, number: int, mine: Array, totals: Array, request: Any) -> None:
        self.number: int = number
        self.values: Array = mine[:-1]
        self.sums: Array = totals[:-1]
        self.request: Any = request
        self.start: Callable[[], None] = request.Start
        self.wait: Callable[[], object] = request.Wait
        self.count: Array = totals[-1:]
        self._mark = mine[-1:]
        self._mark[0] = 1
        self._count = totals[-1:].data.cast("B")
        self._unknown = b"\xff" * totals.itemsize  # no number of ranks

    def start_as_first(self) -> None:
        """Begin to add up as the first message, on a rank that makes the call that all have expected."""
        self._count[:] = self._unknown
        self.start()

    @property
    def is_unknown(self) -> bool:
        """Whether the ranks were not counted since."""
        return self._count == self._unknown

    def start_without(self) -> None:
        """Begin to add up as the first message, on a rank that makes another call than all have expected."""
        self._mark[0] = 0
        self.start_as_first()

    def is_of_all(self, size: int) -> bool:
        """Return, after that, whether all ranks make the call."""
        self._mark[0] = 1
        return bool(self.count[0] == size)


class Memory(NamedTuple):
    """What a companion is made of.

    Attributes:
        mine, totals: its own.
        tried: for the first one, arrays whose sums are tried, and memory for the sums.
    """

    mine: Array
    totals: Array
    tried: list[tuple[Array, Array]]


class Companions:
    """The companions of one communicator, made by all its ranks in the same calls.

    Args:
        new_request: returns the persistent Allreduce of two arrays.  Collective.
        rank: this rank's number.
        size: how many ranks there are.
        all_equal: compares a digest over the ranks.

    Attributes:
        calls: those that all ranks have agreed on, with their companions, and the one that all expect next.
        size: how many ranks there are.
        made: all of them, by dtype and number of elements; the same ones on all ranks.
        started: the one of this rank's present call; None for none, and where its sums are known.
        is_held: whether it waits for the comparison, which may make it needless to start it.
    """

    def __init__(
        self,
        new_request: Callable[[Array, Array], Any],
        rank: int,
        size: int,
        all_equal: Callable[[int], bool],
    ) -> None:
        self.size: int = size
        self._new_request, self._rank, self._all_equal = new_request, rank, all_equal
        self._room = MOST
        self.made: dict[Hashable, Companion] = {}
        self.started: Companion | None = None
        self.is_held: bool = False
        self.calls: Successors[Companion] = Successors()

    def find(self, dtype: np.dtype[Any], count: int) -> Companion | None:
        """Return the companion of so many elements; None where there is none yet."""
        return self.made.get((dtype, count))

    @property
    def is_full(self) -> bool:
        """Whether no more can be made; the same on all ranks."""
        return len(self.made) >= self._room

    def memory(self, dtype: np.dtype[Any], count: int) -> Memory:
        """Return what `make` needs; taken before the ranks agree on the call."""
        tried = [(mine, np.empty_like(mine)) for mine in values_to_try(self._rank, _TRIED)] if not self.made else []
        return Memory(np.zeros(count + 1, dtype), np.zeros(count + 1, dtype), tried)

    def make(self, memory: Memory) -> Companion | None:
        """Make it, on ranks that have agreed on the call; None where there is no more room.  Collective."""
        if not self.made and self._room and not self._has_equal_bits(memory):
            self._room = 0
        if self.is_full:
            return None
        mine, totals = memory.mine, memory.totals
        made = Companion(len(self.made), mine, totals, self._new_request(mine, totals))
        self.made[made.values.dtype, made.values.size] = made
        return made

    def _has_equal_bits(self, memory: Memory) -> bool:
        """Return whether all ranks get the same bits of sums, which MPI does not promise.  Collective."""
        for mine, sums in memory.tried:
            request = self._new_request(mine, sums)
            request.Start()
            request.Wait()
            request.Free()
        return self._all_equal(digest_of([sums for _, sums in memory.tried]))

    def begin(self, companion: Companion) -> None:
        """Begin with the sum of this rank's present call, before the ranks have compared it; `finish` comes after."""
        self.is_held, self.started = True, companion
        if self.calls.known is None:
            self.start_held()

    def finish(self) -> None:
        """Wait for the sums of what was begun."""
        started = self.started
        if started is not None:  # else its sum was the first message
            if self.is_held:  # no comparison was made
                self.start_held()
            started.wait()
            self.started = None

    def start_held(self) -> None:
        """Begin with the sum that was held."""
        self.is_held = False
        if self.started is not None:
            self.started.start()

    def is_expected(self, digest: int) -> bool:
        """Return whether this rank makes the call that all expect, and has begun with its sum."""
        return self.is_held and self.started is self.calls.known and digest == self.calls.key

    def start_expected(self, digest: int) -> Companion | None:
        """Begin with the sum of the call that is expected, in place of the first message; None where none is.

        Args:
            digest: of the call that this rank makes.
        """
        expected = self.calls.known
        if expected is not None:
            (expected.start_as_first if self.is_expected(digest) else expected.start_without)()
        return expected

    def carries(self, expected: Companion) -> bool:
        """Compare this rank's call, which is the one that is expected, by its sum; return as `were_expected`."""
        expected.start_as_first()
        expected.wait()
        return self.were_expected(expected)

    def were_expected(self, expected: Companion) -> bool:
        """Return, after its sum, whether all ranks make the call that was expected; else the first message follows."""
        if expected.is_of_all(self.size) and (key := self.calls.key) is not None:
            self.calls.note(key, expected)
            self.is_held, self.started = False, None
            return True
        self.calls.expect_nothing()
        if self.is_held:
            self.start_held()
        return False

    def note(self, digest: int) -> None:
        """Note that all ranks have agreed on a call by the first message; the same ones on all ranks."""
        if self.made:
            self.calls.note(digest, self.started)

    def leave(self) -> bool:
        """Forget a sum that is held; return whether another one may be under way: this rank leaves its call."""
        if self.is_held:
            self.is_held, self.started = False, None
        return self.started is not None

    def number_started(self) -> int:
        """Return the number of the companion that this rank has started in its present call; -1 for none."""
        return -1 if self.started is None else self.started.number

    def complete(self, numbers: set[int], wait: Callable[[Any], None]) -> None:
        """Complete the companions of these numbers, which some ranks have started.  Collective."""
        found = [companion for companion in self.made.values() if companion.number in numbers]
        for companion in found:
            if companion is not self.started:
                companion.start()
        for companion in found:
            wait(companion.request)
        self.started = None

    def free(self) -> None:
        """Free the requests, on ranks that have waited for all of them."""
        for companion in self.made.values():
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
