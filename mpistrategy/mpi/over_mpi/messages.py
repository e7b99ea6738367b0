"""Messages between two ranks, in pieces that MPI can count, with waits that end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from mpi4py import MPI

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import CollectiveTimeoutError, ShapeError
from mpistrategy.mpi.interface.ranks import pieces

#: Messages that are not done and that nobody holds: MPI may still use their memory.
_abandoned: list[Message] = []


class Message:
    """A message between two ranks that is under way, in pieces that MPI can count.

    Attributes:
        source: the rank that has sent the block; None before.
    """

    def __init__(
        self, comm: MPI.Intracomm, block: Array, rank: int | None, tag: int, most: int, *, sends: bool
    ) -> None:
        _abandoned[:] = [message for message in _abandoned if not message.test()]
        self._comm, self._block, self._tag, self._most = comm, block, tag, most
        self.source: int | None = rank
        self._sends, self._is_done = sends, False
        #: How many bytes the message has, known after it was received; None for more than the block has.
        self._length: int | None = block.size
        self._requests: list[MPI.Request] = []
        if rank is not None:
            self._begin(comm.Isend if sends else comm.Irecv, rank)

    def _begin(self, start: Callable[..., MPI.Request], rank: int) -> None:
        blocks = [*pieces(self._block, self._most)] or [self._block]
        self._requests = [start([block, MPI.BYTE], rank, self._tag) for block in blocks]

    def __del__(self) -> None:
        if self._requests and not self._is_done and not sys.is_finalizing():
            _abandoned.append(self)

    def test(self) -> bool:
        """Return whether the block has been sent or received."""
        if self.source is None:  # by looking for one: MPICH 5.0.2 loses messages to MPI_ANY_SOURCE between nodes
            status = MPI.Status()
            if not self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
                return False
            self.source = status.Get_source()
            self._begin(self._comm.Irecv, self.source)
        if not self._is_done:
            statuses = [MPI.Status() for _ in self._requests]
            try:
                self._is_done = MPI.Request.Testall(self._requests, statuses)
            except MPI.Exception as error:
                if error.Get_error_class() not in (MPI.ERR_IN_STATUS, MPI.ERR_TRUNCATE):
                    raise
                self._is_done, self._length = True, None
                return True
            if self._is_done and not self._sends:
                self._length = sum(status.Get_count(MPI.BYTE) for status in statuses)
        return self._is_done

    def wait(self, where: str, timeout: float) -> None:
        """Wait until the block has been sent or received; in steps, since no other rank may come.

        Args:
            where: the public name.
            timeout: for how many seconds.

        Raises:
            CollectiveTimeoutError: when it takes longer.
            ShapeError: for a message that is shorter or longer than the block.
        """
        end = time.monotonic() + timeout
        while not self.test():
            if time.monotonic() > end:
                peer = "any rank" if self.source is None else f"rank {self.source}"
                raise CollectiveTimeoutError.at(
                    where,
                    found=f"no message between this rank and {peer} for {timeout:g} s",
                    expected="send and recv on both",
                    fix="A longer limit is the group's timeout, or MPISTRATEGY_TIMEOUT_SECONDS.",
                )
            os.sched_yield()
        if self._length != self._block.size:
            raise ShapeError.at(
                where,
                found=f"a message of {'more' if self._length is None else self._length} bytes from rank {self.source}",
                expected=f"{self._block.size} bytes, as many as the receiver has room for",
            )
