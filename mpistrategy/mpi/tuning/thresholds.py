"""Which route a value takes, by its size: thresholds that were measured, one set for all ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

#: The route of `Communicator.allreduce`: none (one rank), between threads, in a node's shared memory; within nodes and
#: between them, with every rank as a lane or pairwise; by MPI's Allreduce; and by MPI's Reduce and Bcast,
#: which an algorithm may want instead.
RouteName = Literal["none", "threads", "node_sum", "lanes", "across", "mpi", "root", "alltoallv"]

_PIECE_BYTES_BETWEEN_NODES = 2**26

#: What `Rates.measured_over_estimated` may correct: two routes between nodes, and MPI's part of the third.
CostName = Literal["flat", "pairwise", "counterparts"]


@dataclass(frozen=True)
class Rates:
    """How fast the job's nodes are: how long a call will take, and which route between nodes is the cheapest.

    They are the same on all ranks, as the thresholds are: `files.agreed`.  The defaults are assumed, for a network of
    1 Gbit/s; `mpistrategy bench --save` measures them.

    Attributes:
        cell_seconds: a small call in the mailboxes of the ranks of one node.
        message_seconds: the same call between nodes.
        window_bytes_per_second: an array that the ranks of a node add up through memory which they share.
        arena_bytes_per_second: a bucket of an arena, in place.
        mpi_bytes_per_second: a buffer by MPI, within a node.
        link_bytes_per_second: what one node sends to the others, while as much arrives.
        copy_bytes_per_second: one rank copies arrays into a buffer.
        add_bytes_per_second: one rank adds an array of so many bytes to another one.
        memory_bytes_per_second: all ranks of a node copy or add together.
        cores: of a node; more ranks than these take turns.
        latency_seconds: a short message of MPI, from a rank to one on another node.
        python_message_seconds: a rank makes a message and receives one, by calls from Python.
        lanes_seconds: what the all-reduce by lanes costs a call besides: its waits for all ranks of a node.
        measured_over_estimated: triples of what was measured, its bytes, and its time over the estimate of
            `costs` that does without these triples.  Between two sizes, it is interpolated.
    """

    cell_seconds: float = 2.5e-6
    message_seconds: float = 1e-4
    window_bytes_per_second: float = 8e9
    arena_bytes_per_second: float = 14e9
    mpi_bytes_per_second: float = 8e9
    link_bytes_per_second: float = 1.18e8  # 1 Gbit/s
    copy_bytes_per_second: float = 1e10
    add_bytes_per_second: float = 1e10
    memory_bytes_per_second: float = 2e11
    cores: float = 128.0
    latency_seconds: float = 5e-5
    python_message_seconds: float = 4e-6
    lanes_seconds: float = 2.5e-5
    measured_over_estimated: tuple[tuple[CostName, int, float], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the rates by name, of what JSON can hold."""
        return asdict(self) | {"measured_over_estimated": [list(each) for each in self.measured_over_estimated]}


@dataclass(frozen=True)
class Thresholds:
    """The thresholds, in bytes.

    Attributes:
        cell_bytes: up to here a value travels in the mailboxes of two ranks, with the check of the call; of more ranks
            in proportion less, since every rank reads all mailboxes.
        window_bytes: from here on the ranks of a node add up an array themselves; below it MPI does it.
        chunk_bytes: what each rank has under way in it at a time.
        pack_bytes: arrays below this are packed with others of their dtype.
        piece_bytes: on one node MPI is given larger buffers in pieces of this.
        across_bytes: on several nodes a buffer is from here on reduced within the nodes and between them; below it MPI
            does all.
        across_piece_bytes: how much of it is one piece; more where its blocks would become short messages.
        window_bytes_by_dtype: pairs of a dtype's name and its own `window_bytes`.  It is the one threshold between two
            ways of adding, NumPy's and MPI's; the others say how much travels at a time, or what a network is worth.
        source: where the thresholds come from, in words.
        rates: how fast the job's nodes are.
        lanes_bytes: on several nodes a buffer may be reduced with every rank as a lane from here on.  Below it the
            waits for all ranks of the node cost more than they save (4 nodes of 4 ranks, MPICH, CPU over that of a bare
            Allreduce, by lanes and by one Allreduce: 256 KiB 1.9 and 1.4, 1 MiB 1.2 and 1.3).
    """

    cell_bytes: int = 32 * 2**10
    window_bytes: int = 8 * 2**10
    chunk_bytes: int = 512 * 2**10
    pack_bytes: int = 64 * 2**10
    piece_bytes: int = 2**20
    across_bytes: int = 256 * 2**10
    across_piece_bytes: int = 2**20
    window_bytes_by_dtype: tuple[tuple[str, int], ...] = ()
    source: str = "the defaults"
    rates: Rates = Rates()
    lanes_bytes: int = 512 * 2**10

    def sizes(self) -> dict[str, Any]:
        """Return the thresholds by name, for JSON: they decide the route of a value, and so the bits of its sum."""
        sizes = {name: getattr(self, name) for name in SIZES}
        return sizes | {"window_bytes_by_dtype": dict(self.window_bytes_by_dtype)}

    def mpi_piece_bytes(self, nodes: int) -> int:
        """Return how much of a buffer one call of MPI's Allreduce takes: between nodes short pieces cost messages."""
        return self.piece_bytes if nodes == 1 else max(self.piece_bytes, _PIECE_BYTES_BETWEEN_NODES)

    def window_bytes_for(self, dtype: np.dtype[Any]) -> int:
        """Return from how many bytes on a buffer of this dtype is added up by the ranks of a node."""
        return self._exceptions.get(dtype, self.window_bytes) if self.window_bytes_by_dtype else self.window_bytes

    @cached_property
    def _exceptions(self) -> dict[np.dtype[Any], int]:
        return {np.dtype(name): nbytes for name, nbytes in self.window_bytes_by_dtype}


#: The thresholds that are one number each.
SIZES = tuple(field.name for field in fields(Thresholds) if field.type == "int")
DEFAULT = Thresholds()
#: Where the shipped thresholds differ, by how the library's name begins. Intel's own Allreduce is the faster one up
#: to there (2 ranks, times raw: 64 KiB 2.4, else 4.7; 512 KiB 1.3, else 1.4; with far cores and `out=` 1.1, else 5).
#: Open MPI's own Allreduce is the faster one up to there on several nodes.
_OF_LIBRARIES = {
    "Intel": replace(DEFAULT, window_bytes=3 * 2**19),
    "Open MPI": replace(DEFAULT, lanes_bytes=2**20),
}


def default_for(library: str) -> Thresholds:
    """Return the shipped thresholds for an MPI library."""
    return next((thresholds for name, thresholds in _OF_LIBRARIES.items() if library.startswith(name)), DEFAULT)
