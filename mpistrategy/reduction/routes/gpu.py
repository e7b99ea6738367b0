"""The all-reduce of arrays in GPU memory to every rank: packed on the device, reduced on the strategy's path.

Small and large arrays of a dtype are packed into buckets by one kernel; the results are views of the buckets.  The
16-bit floats are converted to float32 on the way in and rounded once on the way out, as on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import divide_by, mean_dtype
from mpistrategy.arrays.gpu import DeviceArray, check_no_capture, cupy_for
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.gpu.transports.setup import device_path
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import communication_memory, device_paths
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.routes import gpu_packing

#: A number that is a view of a larger bucket would keep all of it.
_FEW_ELEMENTS = 64


class DeviceReduction:
    """One all-reduce of arrays on one GPU, to every rank.

    Args:
        ranks: who takes part.
        arrays: this rank's; CuPy arrays, all on one device.
        op: how they are combined.
        options: hints; `implementation` names the path.
        word: the path to ask for; "" means what the options and MPISTRATEGY_GPU_PATH say.
        num_packs: see `mpistrategy.reduction.layout.packing.plan`.
    """

    def __init__(
        self,
        ranks: Communicator,
        arrays: Sequence[DeviceArray],
        op: ReduceOp,
        options: CommunicationOptions,
        word: str = "",
        num_packs: float = 0,
    ) -> None:
        self._ranks, self._arrays, self._op = ranks, arrays, op
        self._word = path_word(options, word)
        self._packs = packing.plan(packing.layouts_of(arrays), options.bytes_per_pack, num_packs)
        self._device = arrays[0].device
        self._buckets: list[DeviceArray] = []
        #: Memory that the results will need beside the buckets: taken before the ranks agree, and free when they do.
        self._kept: list[DeviceArray] = []
        self._most_bytes = max((pack.nbytes for pack in self._packs), default=0)
        known = device_paths(ranks).known.get(self._word)
        if known is not None:
            with self._device:
                known.make_room(self._most_bytes)

    def prepare(self) -> None:
        """Pack, before the ranks agree: memory may be short, which all ranks hear of then."""
        cupy = cupy_for("arrays in GPU memory")
        check_no_capture(cupy, "a reduction of arrays in GPU memory")
        with self._device:
            for pack in self._packs:
                bucket = communication_memory(cupy, pack.size, pack.dtype)
                gpu_packing.fill(pack, self._arrays, bucket)
                self._buckets.append(bucket)
                wanted = [self._arrays[member.index].dtype for member in pack.members]
                self._kept += [cupy.empty(pack.size, dtype) for dtype in _made_beside(bucket.dtype, wanted, self._op)]

    def run(self, communicator: Communicator, call: Call) -> list[DeviceArray]:
        """Return the results, after the agreement; `communicator` may round what travels."""
        results: list[Any] = [None] * len(self._arrays)
        count = self._ranks.size
        with self._device:
            path = device_path(self._ranks, self._word, call, self._most_bytes)
            # All is sent before the results, which may need memory: a rank that has none left must not miss there.
            for pack, bucket in zip(self._packs, self._buckets, strict=True):
                if pack.size:
                    path.allreduce(communicator, bucket, self._op.on_the_wire)
            self._kept.clear()  # CuPy's pool has it ready, for this stream
            for pack, bucket in zip(self._packs, self._buckets, strict=True):
                mean = self._op is ReduceOp.MEAN
                divided = mean and bucket.dtype.kind not in "iu"
                if divided:
                    divide_by(count, bucket)
                op = ReduceOp.SUM if divided else self._op
                dtypes = {self._arrays[member.index].dtype for member in pack.members}
                whole = len(dtypes) == 1  # then one kernel finishes all arrays of the pack
                finished = finish(bucket, dtypes.pop(), op, count) if whole else bucket
                for index, view in pack.views(finished):
                    result = view if whole else finish(view, self._arrays[index].dtype, op, count)
                    lone = view.size == 1 and pack.size > _FEW_ELEMENTS and result is view
                    results[index] = result.copy() if lone else result
        return results


def _made_beside(wire: np.dtype[Any], wanted: Sequence[np.dtype[Any]], op: ReduceOp) -> list[np.dtype[Any]]:
    """Return the dtypes of what `finish` makes of a bucket: results of another dtype, and quotients of integers."""
    made = [dtype for dtype in sorted(set(wanted), key=str) if dtype != wire]
    if op is ReduceOp.MEAN and wire.kind in "iu":
        quotient = np.dtype(np.float64)
        return [quotient, *made, *(mean for mean in sorted({*map(mean_dtype, wanted)}, key=str) if mean != quotient)]
    return made
