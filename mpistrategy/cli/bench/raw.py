"""The reference of every ratio: mpi4py as a user without this library would call it.

It calls MPI directly, since the reference must not go through the library.  Importing it starts MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.tuning.thresholds import library_name


class RawRanks:
    """All ranks of the job, on a separate communicator.  Collective, as all its methods are.

    Attributes:
        library: the MPI library and its version.
        ranks_on_node: the most ranks that one node has.
        nodes: how many nodes there are.
        allreduce: the plain call, on buffers that mpi4py looks at itself.
    """

    def __init__(self) -> None:
        comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.barrier: Callable[[], None] = comm.Barrier
        self.allreduce: Callable[..., None] = comm.Allreduce
        self.library: str = library_name(MPI.Get_library_version())
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        self.ranks_on_node: int = int(self.greatest(np.array([node.size]))[0])
        leaders = np.array([int(node.rank == 0)])
        comm.Allreduce(MPI.IN_PLACE, leaders)
        self.nodes: int = int(leaders[0])
        node.Free()

    def greatest(self, values: Array) -> Array:
        """Return the element-wise greatest over the ranks."""
        result = np.array(values)
        self._comm.Allreduce(MPI.IN_PLACE, result, MPI.MAX)
        return result

    def sum_each(self, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """The usual loop over a list of gradients."""
        allreduce = self._comm.Allreduce
        for source, target in zip(sources, targets, strict=True):
            allreduce(source, target)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()
