"""The guard's channel over MPI, for ranks that share no memory: the first message of every call.

It is a persistent Allreduce, the sum of a fixed number of float64, whatever the call.  So ranks whose calls differ in
anything, sizes included, meet in it, and all of them find out.

* The digest of the call is cut into four numbers d of 16 bits, less 2^15; a fifth is this rank's own sum of d^2.  All
  of these sums are exact on up to 2^21 ranks.  By the inequality of Cauchy and Schwarz, size * sum(d^2) equals the sum
  of the squared totals only if all digests are equal.  Thus a rank whose own numbers, times the size, are the totals
  knows that all ranks find the same.
* The rest are values that are to be added up: see `MpiControlChannel.values`.  They may be anything, NaN included.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.contract.channel import ControlChannel, wait_patiently
from mpistrategy.objects.text import decoded, encoded

_DIGITS = 4
_HEADER = _DIGITS + 1
_BITS = 16
#: The sizes of the trial sums: a few elements, and enough for every MPI's algorithm for large messages.
_TRIED = (5, 2**15)


def elements_for(size: int, library: str) -> int:
    """Return how many float64 the first message has: at least the header and two more, at most 31.

    MPICH and its descendants need two phases from as many elements on as the largest power of two that is not above the
    number of ranks (P = 8: 7 float64 take 0.5 ms, 8 take 0.9).  To Open MPI 31 cost what one costs.
    """
    return 31 if library == "Open MPI" else max(_HEADER + 2, min(31, (1 << (size.bit_length() - 1)) - 1))


@cache
def _kept() -> int:
    """Return the attribute of communicators that keeps what MPI may still write into; MPI has been initialized."""
    return MPI.Comm.Create_keyval()


@lru_cache(4096)
def header_of(digest: int, size: int) -> tuple[bytes, bytes]:
    """Return the five numbers of a digest, of less than 2**63 in magnitude, and the totals where all ranks have it."""
    digits = [float((digest >> (_BITS * place) & 0xFFFF) - 0x8000) for place in range(_DIGITS)]
    numbers = np.array([*digits, sum(digit * digit for digit in digits)])
    return numbers.tobytes(), (size * numbers).tobytes()


class MpiControlChannel(ControlChannel):
    """The guard's channel: one persistent Allreduce, and text for the reports.

    A persistent collective matches only itself, so a rank that leaves can start it without waiting.

    Attributes:
        values: this rank's numbers in the sums; written before a comparison, whose call gives them a meaning.
        sums: the sums over the ranks after it.
        kept: memory that other messages of these ranks may still come into.
    """

    is_free = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm: MPI.Intracomm = comm.Dup()
        # MPI keeps it until `close`: the results of an exchange that this rank has left are written whenever they come,
        # and be it in MPI_Finalize, after Python's end.
        self._comm.Set_attr(_kept(), self)
        self.kept: list[object] = []
        elements = elements_for(self._comm.size, MPI.get_vendor()[0])
        self._own_values, self._totals = np.zeros(elements), np.zeros(elements)
        self.values: Array = self._own_values[_HEADER:]
        self.sums: Array = self._totals[_HEADER:]
        self._header, self._received_header = (
            array[:_HEADER].data.cast("B") for array in (self._own_values, self._totals)
        )
        #: What makes the answer of the comparison that this rank has begun True; empty once it has read the answer.
        self._expected: bytes = b""
        self._request: Any = MPI.REQUEST_NULL
        #: The digest to compare after a comparison that this rank has left, if all ranks agree in that comparison.
        self._following: int | None = None
        #: The exchange of texts that this rank is in, or has left: the other ranks still wait for its part in that.
        self._texts: _Texts | None = None
        self._persistent = True
        try:
            self._request = self._comm.Allreduce_init(self._own_values, self._totals, MPI.SUM)
        except NotImplementedError:  # an MPI before 4.0
            self._persistent = False

    def start(self, digest: int) -> None:
        """Begin `all_equal` without waiting.  The answer of a comparison that this rank has left comes first.

        After an exchange of texts that this rank has left nothing begins: the others are in it, so their calls differ.
        """
        if self._texts is not None or self._expected or not self._request.Test():
            self._following = digest
        else:
            self._start(digest)

    def _start(self, digest: int) -> None:
        self._header[:], expected = header_of(digest, self._comm.size)
        # An interruption may come anywhere here.  A comparison that has not begun then has the answer True: the next
        # one takes its place.
        self._received_header[:] = self._expected = expected
        if self._persistent:
            self._request.Start()
        else:
            self._request = self._comm.Iallreduce(self._own_values, self._totals, MPI.SUM)

    def finished(self) -> bool | None:
        """Return the answer to `start`, or None while ranks are missing."""
        if not self._request.Test():
            return None
        answer = self._texts is None and self._read()
        following, self._following = self._following, None
        if answer and following is not None:
            self._start(following)
            return None
        return answer

    def _read(self) -> bool:
        is_equal = self._received_header == self._expected
        self._expected = b""
        return is_equal

    def all_equal(self, digest: int, look: Callable[[], object] | None = None) -> bool:
        """Wait for every rank's digest; return whether all are equal; see `ControlChannel.all_equal`."""
        if look is not None:
            return super().all_equal(digest, look)
        self._start(digest)
        self._request.Wait()
        return self._read()

    def has_equal_sums(self, comm: MPI.Intracomm) -> bool:
        """Return whether all ranks get the same bits of MPI's sums, which MPI does not promise.  Collective.

        Args:
            comm: another communicator of the same ranks, whose sums are tried besides the sums of the first message.
        """
        random = np.random.default_rng(self._comm.rank)  # sums that depend on the order of the additions
        sizes = (self.values.size, *_TRIED)
        first, *more = (random.standard_normal(n) * np.exp2(random.integers(-20, 20, n)) for n in sizes)
        self.values[...] = first
        self.all_equal(0)
        for values in more:
            comm.Allreduce(MPI.IN_PLACE, values)
        return self.all_equal(zlib.crc32(b"".join(array.data for array in (self.sums, *more))))

    def allgather_text(self, text: str, look: Callable[[], object] | None = None) -> list[str]:
        """Return every rank's text, in rank order; see `ControlChannel.allgather_text`.

        An exchange that this rank has left goes on, with the text that it had.
        """
        if self._texts is None:
            self._texts = _Texts(self._comm, text)
        wait_patiently(self._texts.finished, look)
        exchange, self._texts = self._texts, None
        return exchange.texts()

    def close(self) -> None:
        """Free the requests and the communicator."""
        if self._persistent:
            self._request.Free()
        self._comm.Free()


class _Texts:
    """An exchange of texts: first their lengths, then the texts.

    Args:
        comm: the ranks.
        text: of this rank.
    """

    def __init__(self, comm: MPI.Intracomm, text: str) -> None:
        self._comm, self._own = comm, np.frombuffer(encoded(text), np.uint8)
        self._counts: Array = np.zeros(comm.size, np.int64)
        self._all: Array | None = None
        self._request: Any = comm.Iallgather(np.array([self._own.size]), self._counts)

    def finished(self) -> bool | None:
        """Return True once all texts are there, else None."""
        if not self._request.Test():
            return None
        if self._all is not None:
            return True
        room = np.empty(int(self._counts.sum()), np.uint8)
        # Both at once: an interruption between the two would let the exchange end too early, or begin again.
        self._request, self._all = self._comm.Iallgatherv(self._own, [room, self._counts]), room
        return None

    def texts(self) -> list[str]:
        """Return the texts in rank order, once all are there."""
        assert self._all is not None
        texts, ends = self._all.tobytes(), np.cumsum(self._counts).tolist()
        return [decoded(texts[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
