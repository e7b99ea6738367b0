"""Sums by MPI: those beside the first message of a call, and whether all ranks get the same bits of them.

A sum that travels beside the first message is a persistent Allreduce of its own.  A rank starts it, and then the first
message.  A persistent collective matches only itself, and ranks may start several in any order.  So where the calls
differ nothing is added up that does not belong together: what some ranks have started just waits.  All ranks learn from
the texts of their reports which these are, start those that they lack with whatever is in their buffers, and wait for
all of them.  The buffers are the companion's, not the program's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

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

    def make(self, dtype: np.dtype[Any], count: int) -> Companion | None:
        """Make it, on ranks that have agreed on the call; None where there is no more room.  Collective."""
        if not self._made and self._room and not self._has_equal_bits():
            self._room = 0
        if self.is_full:
            return None
        values, sums = np.zeros(count, dtype), np.zeros(count, dtype)
        made = Companion(len(self._made), values, sums, self._new_request(values, sums))
        self._made[dtype, count] = made
        return made

    def _has_equal_bits(self) -> bool:
        """Return whether all ranks get the same bits of sums, which MPI does not promise.  Collective."""

        def allreduce(values: Array) -> None:
            mine = values.copy()
            request = self._new_request(mine, values)
            request.Start()
            request.Wait()
            request.Free()

        return self._all_equal(digest_of_sums(allreduce, self._rank, _TRIED))

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


def digest_of_sums(
    allreduce: Callable[[Array], None], rank: int, counts: Sequence[int] = COUNTS, dtype: Any = np.float32
) -> int:
    """Return a digest, below 2**62, of sums over the ranks that depend on the order of the additions.

    Args:
        allreduce: replaces an array by its sum over the ranks.  Collective.
        rank: this rank's number.
        counts: how many elements the arrays have.
        dtype: of the arrays.
    """
    import hashlib  # here, since it loads OpenSSL and would slow `import mpistrategy`

    found = hashlib.blake2b(digest_size=8)
    random = np.random.default_rng(rank)
    for count in counts:
        values = random.standard_normal(count) * np.exp2(random.integers(-_EXPONENTS, _EXPONENTS, count))
        summed = values.astype(dtype)
        allreduce(summed)
        found.update(summed.tobytes())
    return int.from_bytes(found.digest(), "little") >> 2
