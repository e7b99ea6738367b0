"""The route of arrays in GPU memory: packed on the device, combined on the strategy's path.

Small and large arrays of a dtype are packed into buckets by one kernel; the results are views of the buckets.  The
16-bit floats are converted to float32 on the way in and rounded once on the way out, as on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import divide_by, mean_dtype
from mpistrategy.arrays.gpu import DeviceArray, check_no_capture, cupy_for
from mpistrategy.mpi.gpu.transports.setup import device_path
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import communication_memory, device_paths
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Pack
from mpistrategy.reduction.routes.base import Copies, Description, Targets
from mpistrategy.reduction.routes.gpu_copy import fill
from mpistrategy.reduction.routes.gpu_operations import ALL_REDUCE, GpuOperation

_PATHS = {
    "alone": "on the only replica",
    "mpi": "by MPI, which gets pointers to it",
    "staged": "through pinned memory of the host in chunks of 4 MiB, three of them under way",
    "nccl": "by NCCL, on the current stream",
    "ipc": "each GPU reading its peers'",
}


class GpuRoute:
    """See `mpistrategy.reduction.routes.base.Route`; for one call, and its results need no more rounding or division.

    Args:
        ranks: who takes part.
        packs: the arrays, which are all on one GPU.
        op: how they are combined.
        word: which path is asked for; see `mpistrategy.options.path_word`.
        wire: what travels between the nodes; see `mpistrategy.mpi.multi_node.reduced_precision.on`.
        operation: who combines them, and who gets the results.
        targets: for arrays that travel one by one and lie in `communication_memory`: themselves, or such memory for
            each result; None: the arrays are packed, and the results are new.
    """

    def __init__(
        self,
        ranks: Communicator,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        word: str,
        wire: str | None,
        operation: GpuOperation = ALL_REDUCE,
        targets: Sequence[DeviceArray] | None = None,
    ) -> None:
        self.packs: tuple[Pack, ...] = packs
        self._operation = operation
        self._ranks, self._op, self._word, self._wire = ranks, op, word, wire
        #: For each pack.
        self._targets: list[Any] = [None if targets is None else targets[pack.members[0].index] for pack in packs]
        self._most_bytes = max((pack.nbytes for pack in packs), default=0)
        self._buckets: list[DeviceArray] = []
        #: Memory that the results will need beside the buckets: taken before the ranks agree, and free when they do.
        self._kept: list[DeviceArray] = []

    def bring(self, arrays: Sequence[DeviceArray], targets: Targets = None) -> None:
        """Pack: memory may be short, which all ranks hear of when they agree."""
        cupy = cupy_for("arrays in GPU memory")
        check_no_capture(cupy, "a reduction of arrays in GPU memory")
        with arrays[0].device:
            if (known := device_paths(self._ranks).known.get(self._word)) is not None:
                known.make_room(self._most_bytes)
            for pack, target in zip(self.packs, self._targets, strict=True):
                bucket = target
                if target is None or target.dtype != pack.dtype:
                    bucket = communication_memory(cupy, pack.size, pack.dtype)
                    fill(pack, arrays, bucket)
                self._buckets.append(bucket)
                if target is None:
                    wanted = [arrays[member.index].dtype for member in pack.members]
                    self._kept += [cupy.empty(pack.size, dtype) for dtype in _made_beside(pack.dtype, wanted, self._op)]

    def run(self, arrays: Sequence[DeviceArray], targets: Targets = None) -> list[DeviceArray]:
        """Return the results, on the current stream."""
        results: list[Any] = [None] * len(arrays)
        communicator = reduced_precision.on(self._ranks, self._wire)
        with arrays[0].device:
            path = device_path(self._ranks, self._word, self._most_bytes)
            # All is sent before the results, which may need memory: a rank that has none left must not miss there.
            for pack, bucket, target in zip(self.packs, self._buckets, self._targets, strict=True):
                if bucket is target and bucket is not arrays[pack.members[0].index]:
                    bucket[...] = arrays[pack.members[0].index]  # only now: until here it is the result before
                if pack.size:
                    self._operation.run(path, communicator, bucket, self._op._on_the_wire)
            self._kept.clear()  # CuPy's pool has it ready, for this stream
            for pack, bucket, target in zip(self.packs, self._buckets, self._targets, strict=True):
                divide_by(self._op._divisor(bucket.dtype, self._ranks.size), bucket)
                if target is None:
                    self._unpack(pack, bucket, arrays, results)
                    continue
                if target is not bucket:
                    target[...] = bucket  # converted on the way
                results[pack.members[0].index] = target
        return results

    def _unpack(self, pack: Pack, bucket: DeviceArray, arrays: Sequence[DeviceArray], results: list[Any]) -> None:
        count, op = self._ranks.size, self._op if bucket.dtype.kind in "iu" else ReduceOp.SUM  # others are divided
        dtypes = {arrays[member.index].dtype for member in pack.members}
        whole = len(dtypes) == 1  # then one kernel finishes all arrays of the pack
        finished = finish(bucket, dtypes.pop(), op, count) if whole else bucket
        for index, view in pack.views(finished):
            result = view if whole else finish(view, arrays[index].dtype, op, count)
            lone = view.size == 1 and pack.size > FEW_ELEMENTS and result is view
            results[index] = result.copy() if lone else result

    def describe(self, ranks: Communicator, arrays: Sequence[DeviceArray]) -> list[Description]:
        groups: dict[tuple[Any, Copies], list[Pack]] = {}
        for pack, target in zip(self.packs, self._targets, strict=True):
            copies: Copies = ((1, "all into a bucket"),)
            if pack.converts:
                copies = ((2, f"all into {pack.dtype.name} and the results back"),)
            elif target is not None:
                copies = () if target is arrays[pack.members[0].index] else ((1, "all into the result"),)
            groups.setdefault((pack.dtype, copies), []).append(pack)
        return [
            Description(packs, self._way(ranks, dtype), copies, "", None) for (dtype, copies), packs in groups.items()
        ]

    def _way(self, ranks: Communicator, dtype: np.dtype[Any]) -> str:
        paths, path = device_paths(ranks), device_paths(ranks).known.get(self._word)
        if path is None:
            return "in GPU memory, on a path that the ranks choose at the first such call"
        how = _PATHS[path.name] + (f", {self._operation.text}" if self._operation.text else "")
        why = path.by_host(reduced_precision.on(ranks, self._wire), dtype, self._op._on_the_wire)
        if why and path.name != "staged":
            how = f"{_PATHS['staged']}, since {why}"
        return f"in GPU memory, {how} ({path.name}: {paths.reasons.get(self._word, '')})"


def _made_beside(wire: np.dtype[Any], wanted: Sequence[np.dtype[Any]], op: ReduceOp) -> list[np.dtype[Any]]:
    """Return the dtypes of what `finish` makes of a bucket: results of another dtype, and quotients of integers."""
    made = [dtype for dtype in sorted(set(wanted), key=str) if dtype != wire]
    if op is ReduceOp.MEAN and wire.kind in "iu":
        quotient = np.dtype(np.float64)
        return [quotient, *made, *(mean for mean in sorted({*map(mean_dtype, wanted)}, key=str) if mean != quotient)]
    return made
