"""Which route a value takes, by its size: thresholds that were measured, one set for all ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

#: The route of `Ranks.allreduce`: none (one rank), between threads, in a node's shared memory; within nodes and
#: between them, with every rank as a lane; by MPI's Allreduce; and by MPI's Reduce and Bcast, which an algorithm may
#: want instead.
RouteName = Literal["none", "threads", "node_sum", "lanes", "mpi", "root", "alltoallv"]


@dataclass(frozen=True)
class Thresholds:
    """The thresholds, in bytes.

    Attributes:
        cell_bytes: up to here a value travels in the mailboxes of two ranks, with the check of the call; of more ranks
            in proportion less, since every rank reads all mailboxes.
        window_bytes: from here on the ranks of a node add up an array themselves; below it MPI does it.
        chunk_bytes: what each rank has under way in it at a time.
        pack_bytes: arrays below this are packed with others of their dtype.
        lanes_bytes: on several nodes of equally many ranks a buffer is reduced by lanes from here on.  Below it the
            waits for all ranks of the node cost more than they save (4 nodes of 4 ranks, MPICH, CPU over that of a bare
            Allreduce, by lanes and by one Allreduce: 256 KiB 1.9 and 1.4, 1 MiB 1.2 and 1.3).
        source: where the thresholds come from, in words.
    """

    cell_bytes: int = 32 * 2**10
    window_bytes: int = 8 * 2**10
    chunk_bytes: int = 512 * 2**10
    pack_bytes: int = 64 * 2**10
    lanes_bytes: int = 512 * 2**10
    source: str = "the defaults"

    def sizes(self) -> dict[str, int]:
        """Return the thresholds by name: they decide the route of a value, and so the bits of its sum."""
        return {name: size for name, size in asdict(self).items() if name != "source"}


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
