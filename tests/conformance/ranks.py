"""The ranks that a replay runs on: those of an MPI job, or simulated ones, threads of one process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrategy.mpi import over_threads

from .values import Json

if TYPE_CHECKING:
    from mpi4py import MPI


class Ranks(Protocol):
    """Who takes part, and a way to bring outcomes together that no case can disturb.

    Attributes:
        rank: this rank's number.
        size: how many there are.
        strategies: what this rank's cases have made so far, for the next ones.
    """

    rank: int
    size: int
    strategies: dict[Any, Any]

    def gather_json(self, outcome: Json) -> list[Json]:
        """Return the outcomes of all ranks on rank 0, an empty list elsewhere."""


class MpiRanks:
    """The ranks of an mpi4py communicator that belongs to the caller; nothing but `gather_json` uses it."""

    #: Shared by all replays of this process, since strategies on the same ranks serve them all.
    strategies: dict[Any, Any] = {}  # noqa: RUF012

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def gather_json(self, outcome: Json) -> list[Json]:
        """Gather JSON bytes through buffer calls."""
        from mpi4py import MPI

        data = np.frombuffer(json.dumps(outcome).encode(), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self._comm.Allgather(np.array([data.size], np.int64), sizes)
        received = np.empty(int(sizes.sum()) if self.rank == 0 else 0, np.uint8)
        self._comm.Gatherv(data, [received, sizes, None, MPI.BYTE] if self.rank == 0 else None)
        if self.rank != 0:
            return []
        ends = np.cumsum(sizes)
        return [json.loads(received[end - size : end].tobytes()) for end, size in zip(ends, sizes, strict=True)]


class SimulatedRanks:
    """The replicas of `mpistrategy.testing.run_replicas`, seen from one of them."""

    def __init__(self) -> None:
        world = over_threads.world()
        if world is None:
            raise RuntimeError("SimulatedRanks are to be made in a program that run_replicas runs")
        self._replicas = world.duplicate()
        self.rank, self.size = self._replicas.rank, self._replicas.size
        self.strategies: dict[Any, Any] = {}

    def gather_json(self, outcome: Json) -> list[Json]:
        """Gather the same text that would travel over MPI."""
        texts = self._replicas.allgather_text(json.dumps(outcome))
        return [json.loads(text) for text in texts] if self.rank == 0 else []
