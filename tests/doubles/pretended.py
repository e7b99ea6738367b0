"""Ranks that are not there: what one rank does about thousands of others is run by the library's own code, without MPI.

A pretended communicator is a subclass of mpi4py's in which all ranks say what this one says.  Pretended watchdogs are
the library's groups and status boards, in turn, with one real run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, segment_bytes
from mpistrategy.mpi.shared_memory.segments import Fence, SharedMemory, no_fence
from mpistrategy.mpi.shared_memory.spin_wait import Waiting
from mpistrategy.mpi.watchdog import alarm, group
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.roll_call import RollCall
from mpistrategy.mpi.watchdog.run_directory import ROLL_CALL, RunDirectory
from mpistrategy.mpi.watchdog.status_board import ANSWERED, BYTES, RankStatus, StatusBoard

LIMIT = 600.0

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
        with contextlib.suppress(ValueError):
            told = json.loads(bytes(mine))
            if isinstance(told, dict) and "leader" in told:  # an introduction: this rank's number is the longest
                for rank, row in enumerate(rows):
                    text = json.dumps({**told, "leader": rank - rank % self.local})
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


# ------------------------------------------------------------------------------------- watchdogs


class PretendedJob:
    """The groups of pretended ranks, in rank order, all with one run directory and a clock of their own."""

    def __init__(self, path: Path, nodes: int, local: int) -> None:
        self.path, self.local = path, local
        self.now = 1_000.0
        #: Until when the last rank is busy.
        self.busy_until = 0.0
        self.groups: list[Group] = []
        for node in range(nodes):
            segments = tuple(np.zeros(BYTES, np.uint8) for _ in range(local))
            for rank in range(local):
                guard = Guard(None, node * local + rank, nodes * local)
                guard.timeout = LIMIT
                board = StatusBoard(SharedMemory(segments, rank, True))
                directory = RunDirectory(str(path))
                self.groups.append(Group(guard, board, range(nodes * local), node, nodes, directory))
                self.groups[-1]._announced_end = self.now

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Let the groups read this job's clock."""
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + 1.7e9, sleep=lambda seconds: None)
        with mock.patch.object(group, "time", clock):
            yield

    def beat(self, state: int = 0) -> None:
        for rank, each in enumerate(self.groups):
            expected = self.busy_until if rank == len(self.groups) - 1 else 0.0
            each.board.put("state", state)
            each.board.put("expected", expected)
            each.board.write(RankStatus(rank, 7000 + rank, 0, self.now, 9.0, LIMIT, "in #7 barrier"))

    def tick(self, later: float = 0.0) -> list[bool]:
        """Let all ranks look, of which all but the last one are late; return which of these are excused."""
        self.now += later
        self.beat()
        for each in self.groups:
            each.look_at_nodes(self.now)
        return [each.is_excused(self.now, LIMIT) for each in self.groups[:-1]]

    def hear(self) -> None:
        """Let all ranks look until each node has heard what the others say."""
        for _ in range(4):
            self.tick(1)

    def raise_alarm(self, first: int) -> None:
        """Let all ranks find at the same time that a collective is late, and the first node of all end the job.

        The other nodes have written what they know by then.
        """
        self.beat(ANSWERED)
        speakers = self.groups[:: self.local]
        for rank, each in enumerate(self.groups):
            each.board.write_record(f"the stacks of {rank}\nline")
        for each in speakers:
            each.directory.leave()

        def answer(caller: Group) -> list[RankStatus]:
            """Let the other nodes write, which find that the roll is called, and read what they have written."""
            for node, each in enumerate(speakers):
                if node != first:
                    here = each.board.read()
                    assert not each.directory.claim(ROLL_CALL)
                    told = alarm._as_json(each, here, RollCall(here, each.ranks), "")
                    assert each.directory.write(f"error-{each.node}.json", told)
                    assert not each.directory.read(ROLL_CALL)
            return hear(caller)

        hear = alarm._hear_others
        with mock.patch.object(alarm, "_hear_others", answer):
            alarm._speak(speakers[first], [], f"[rank {first * self.local}] ")


# ------------------------------------------------------------------------------------- mailboxes


class NoWaiting(Waiting):
    """For mailboxes whose ranks take turns in one thread: nobody may have to wait."""

    def until(self, numbers: memoryview, value: int) -> None:
        if numbers[0] < value:
            raise RefusedError


class RefusedError(Exception):
    """Raised instead of waiting."""


def mailboxes_of(ranks: int, payload: int, fence: Fence = no_fence) -> list[Mailboxes]:
    """Return the mailboxes of ranks whose segments lie one behind the other, as in shared memory."""
    segments = tuple(np.zeros((ranks, segment_bytes(payload)), np.uint8))
    return [Mailboxes(SharedMemory(segments, rank, True, fence), payload, NoWaiting()) for rank in range(ranks)]
