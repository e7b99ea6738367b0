"""NcclAllReduce: arrays in GPU memory by NCCL, all others by MPI."""

from __future__ import annotations

from mpistrategy.cross_device_ops.all_reduce import ByMpi
from mpistrategy.reduction.layout.packing import checked_num_packs


class NcclAllReduce(ByMpi):
    """Sums arrays in GPU memory with NCCL, on CuPy's current stream; all others as `MpiAllReduce` does.

    The call returns when the work is on the stream; what is put on the stream afterwards finds the result.  What NCCL
    does not do as the host does goes by way of the host: MIN and MAX of floats (a NaN must win), and products of
    complex numbers.  Where NCCL cannot be used (CuPy finds none, or two ranks share a GPU) the ranks take
    the next best way, and rank 0 says so with a FallbackWarning.

    Args:
        num_packs: arrays in GPU memory are split into about so many packs for each dtype, whatever bytes_per_pack says;
            0 leaves it to bytes_per_pack.

    Raises:
        OptionError: for a negative num_packs.
        OptionTypeError: for one that is no number.
    """

    in_rank_order = True
    device_path = "nccl"

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = checked_num_packs(num_packs, "NcclAllReduce")
