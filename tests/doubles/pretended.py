"""Ranks that are not there: what one rank does about thousands of others is run by the library's own code, without MPI.

A pretended communicator is a subclass of mpi4py's in which all ranks say what this one says.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, segment_bytes
from mpistrategy.mpi.shared_memory.segments import Fence, SharedMemory, no_fence

# ------------------------------------------------------------------------------------- the making of a strategy


class _Done:
    """A request that has ended."""

    def Test(self) -> bool:  # noqa: N802
        return True

    def Wait(self) -> None:  # noqa: N802
        pass

    Start = Free = Wait


class PretendedRanks(MPI.Intracomm):
    """A communicator of so many ranks, seen by the first rank of its last node."""

    ranks: int
    local: int
    #: CPU time that the pretending itself took.
    spent: list[float]

    def __new__(cls, ranks: int, local: int, kind: str = "all", spent: list[float] | None = None) -> PretendedRanks:
        made = super().__new__(cls, MPI.COMM_SELF)
        made.ranks, made.local, made.kind, made.spent = ranks, local, kind, spent if spent is not None else [0.0]
        return made

    def _another(self, kind: str) -> PretendedRanks:
        return PretendedRanks(self.ranks, self.local, kind, self.spent)

    @property
    def size(self) -> int:
        return {"all": self.ranks, "node": self.local}.get(self.kind, self.ranks // self.local)

    @property
    def rank(self) -> int:
        return {"all": self.ranks - self.local, "node": 0}.get(self.kind, self.ranks // self.local - 1)

    @property
    def group(self) -> Any:
        return MPI.COMM_WORLD.group

    def Dup(self) -> PretendedRanks:  # noqa: N802
        return self._another(self.kind)

    def Split_type(self, *how: Any) -> PretendedRanks:  # noqa: N802
        return self._another("node")

    def Split(self, *how: Any) -> PretendedRanks:  # noqa: N802
        return self._another("counterparts")

    def Free(self) -> None:  # noqa: N802
        pass

    def Bcast(self, *what: Any) -> None:  # noqa: N802
        pass

    def Iprobe(self, *what: Any) -> bool:  # noqa: N802
        return False

    def Ibarrier(self) -> _Done:  # noqa: N802
        return _Done()

    def Allreduce_init(self, mine: Any, total: Any, *how: Any) -> _Done:  # noqa: N802
        total[...] = mine
        return _Done()

    def Iallgather(self, mine: Any, everyones: Any) -> _Done:  # noqa: N802
        everyones.reshape(self.size, -1)[...] = np.asarray(mine).reshape(-1)
        return _Done()

    def Iallgatherv(self, mine: Any, where: Any) -> _Done:  # noqa: N802
        began = time.process_time()
        rows = where[0].reshape(self.size, -1)
        rows[...] = mine
        versions, is_introduction, own_text = bytes(mine).decode().partition("\n")
        if is_introduction:  # this rank's number, the first of its node, is the longest
            _, *more = json.loads(own_text)
            for rank, row in enumerate(rows):
                text = f"{versions}\n{json.dumps((rank - rank % self.local, *more))}"
                row[:] = np.frombuffer(text.encode().ljust(row.size), np.uint8)
        self.spent[0] += time.process_time() - began
        return _Done()


@contextlib.contextmanager
def whole_files(local: int) -> Iterator[None]:
    """Let this rank reserve the shared memory of the node's other ranks, which do not come."""
    with mock.patch.object(os, "posix_fallocate", lambda file, start, nbytes: os.ftruncate(file, local * nbytes)):
        yield


def creation_seconds(ranks: int, local: int, devices: Any = None) -> float:
    """Return the CPU time that a rank takes to make a strategy of so many ranks."""
    import mpistrategy as ms

    comm = PretendedRanks(ranks, local)
    with whole_files(local):
        began = time.process_time()
        strategy = ms.MirroredStrategy(devices, communicator=comm)
        took = time.process_time() - began - comm.spent[0]
    assert strategy.num_replicas_in_sync == ranks
    guard = strategy.extended.communicator.guard
    guard.closed = True  # nobody comes to the end
    strategy.extended.communicator.free()
    return took


# ------------------------------------------------------------------------------------- mailboxes


def refuse(numbers: memoryview, value: int) -> None:
    """For mailboxes whose ranks take turns in one thread: nobody may have to wait."""
    if numbers[0] < value:
        raise RefusedError


class RefusedError(Exception):
    """Raised instead of waiting."""


def mailboxes_of(ranks: int, payload: int, fence: Fence = no_fence) -> list[Mailboxes]:
    """Return the mailboxes of ranks whose segments lie one behind the other, as in shared memory."""
    segments = tuple(np.zeros((ranks, segment_bytes(payload)), np.uint8))
    return [Mailboxes(SharedMemory(segments, rank, True, fence), payload, refuse) for rank in range(ranks)]
