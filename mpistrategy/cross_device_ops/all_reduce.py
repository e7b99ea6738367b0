"""The algorithms beside MpiAllReduce that leave sums to the communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps, Packs
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.later import later
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.packing import checked_num_packs
from mpistrategy.reduction.plan import ChooseRoute
from mpistrategy.reduction.routes.base import Route

if TYPE_CHECKING:
    from mpistrategy.mpi.multi_node.reduced_precision import between_nodes
    from mpistrategy.mpi.multi_node.two_level import allreduce_across
    from mpistrategy.reduction.routes.communicator import CommunicatorRoute, names_of
else:
    later(globals(), "mpistrategy.mpi.multi_node.reduced_precision", "between_nodes")
    later(globals(), "mpistrategy.mpi.multi_node.two_level", "allreduce_across")
    later(globals(), "mpistrategy.reduction.routes.communicator", "CommunicatorRoute", "names_of")


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
        self._num_packs = checked_num_packs(num_packs, "NcclAllReduce")


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
    _to_every_rank: ChooseRoute | None = None

    def __init__(self, num_packs: int = 1) -> None:
        self._num_packs = checked_num_packs(num_packs, "HierarchicalCopyAllReduce")

    def _route(
        self, communicator: Communicator, packs: Packs, op: ReduceOp, destination: Destination, wire: str | None
    ) -> Route:
        """Return the route of packs: on several nodes the same for all sizes, if MPI's sums have the same bits."""
        if communicator.nodes == 1 or "root" in names_of(communicator, packs, op, wire):
            return super()._route(communicator, packs, op, destination, wire)

        def across(source: Array, target: Array) -> None:
            dtype = between_nodes(communicator, wire, target.dtype, op._on_the_wire)
            allreduce_across(communicator, target, op._on_the_wire, source=source, wire=dtype)

        return CommunicatorRoute(communicator, packs, op, ["lanes"] * len(packs), across, wire=wire)
