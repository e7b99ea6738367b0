"""HierarchicalCopyAllReduce: first within each node, then between the nodes, then back."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.tuning.thresholds import RouteName
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.packing import checked_num_packs


class HierarchicalCopyAllReduce(PackedCrossDeviceOps):
    """Sums within each node, then between the nodes, and brings the result back within each node.

    Each rank of a node (as many of them as the smallest node has, up to 4) exchanges one slice with its counterparts on
    the other nodes, in pieces of about 1 MiB, several of them at a time: over the network goes no more than must.
    `MpiAllReduce` does the same with large values; this one does it with all.  Right for any number of ranks on any
    node.

    Args:
        num_packs: the values are split into about so many packs, whatever bytes_per_pack says; 0 leaves it to
            bytes_per_pack.

    Raises:
        OptionError: for a negative num_packs.
    """

    in_rank_order = True

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = checked_num_packs(num_packs, "HierarchicalCopyAllReduce")

    def reduce_buffer(
        self, communicator: Communicator, buffer: Array, op: str, destination: Destination, source: Array | None = None
    ) -> None:
        """Replace `buffer` by its combination over the ranks."""
        if self.route(communicator, buffer.nbytes, buffer.dtype, op) == "across":
            allreduce_across(communicator, buffer, op, source=source)
        else:
            communicator.allreduce(buffer, op, source)

    def route(self, communicator: Communicator, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route of a buffer of so many bytes: on several nodes the same for all sizes."""
        return "across" if communicator.nodes > 1 else communicator.route(nbytes, dtype, op)
