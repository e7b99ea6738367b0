"""The algorithms beside MpiAllReduce that leave sums to the communicator."""

from __future__ import annotations

from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.routes.base import Transfer
from mpistrategy.reduction.routes.communicator import CommunicatorRoute


class NcclAllReduce(PackedCrossDeviceOps):
    """Sums arrays in GPU memory with NCCL, on CuPy's current stream; all others as `MpiAllReduce` does.

    The call returns when the work is on the stream; what is put on the stream afterwards finds the result.  MIN and MAX
    of floats travel as integers of the same order, since a NaN must win.  Products of complex numbers, which NCCL does
    not know, go by way of the host.  Where NCCL cannot be used (CuPy finds none, or two ranks share a GPU) the ranks
    take the next best way, and rank 0 says so with a FallbackWarning.

    Args:
        num_packs: arrays in GPU memory are split into about so many packs for each dtype, whatever bytes_per_pack says;
            0 leaves it to bytes_per_pack.

    Raises:
        OptionError: for a negative num_packs.
        OptionTypeError: for one that is not a number.
    """

    _in_rank_order = True
    _device_path: str = "nccl"

    def __init__(self, num_packs: int = 1) -> None:
        self._set_num_packs(num_packs)


class HierarchicalCopyAllReduce(PackedCrossDeviceOps):
    """Sums within each node, then between the nodes, and brings the result back within each node.

    Every rank of a node has a slice, and MPI's Allreduce combines what the counterparts on the nodes have.  Over the
    network goes no more than must.  `MpiAllReduce` does the like with large values; this one does it with all.  Right
    for any number of ranks on any node.  Arrays in GPU memory go as with `MpiAllReduce`.

    Args:
        num_packs: the values are split into about so many packs, whatever bytes_per_pack says; 0 leaves it to
            bytes_per_pack.

    Raises:
        OptionError: for a negative num_packs.
    """

    _in_rank_order = True

    def __init__(self, num_packs: int = 1) -> None:
        self._set_num_packs(num_packs)

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Transfer:
        """Return the route of arrays: on several nodes the same for all sizes, if MPI's sums have the same bits."""
        packs, text = self._packs(layouts, options.bytes_per_pack), op._on_the_wire
        by_one = any(ranks.route(pack.nbytes, pack.dtype, text) == "root" for pack in packs)
        if destination.only_rank is not None or ranks.nodes == 1 or by_one:
            return super()._route(ranks, layouts, op, options, destination)
        return CommunicatorRoute(ranks, packs, op, "lanes", wire=options.wire)
