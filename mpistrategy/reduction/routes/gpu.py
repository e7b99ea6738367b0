"""The route of arrays in GPU memory: packed on the device, combined on the strategy's path.

Small and large arrays of a dtype are packed into buckets by one kernel; the results are views of the buckets.  The
16-bit floats are converted to float32 on the way in and rounded once on the way out, as on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import divide_by, mean_dtype, wire_dtype
from mpistrategy.arrays.gpu import DeviceArray, check_no_capture, cupy_for
from mpistrategy.mpi.gpu.transports.setup import device_path
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import ON_THE_STREAM, DevicePath, communication_memory, device_paths
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Layout, Pack
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


#: Larger arrays travel by themselves: to pack them costs two copies, and saves next to nothing.
_ALONE_BYTES = 8 * 2**20


def gpu_packs(layouts: tuple[Layout, ...], bytes_per_pack: float, num_packs: float) -> tuple[Pack, ...]:
    """Return the packs of arrays in GPU memory: one for each large array, unless a number of packs is asked for."""
    sizes = [prod(shape) * wire_dtype(dtype).itemsize for dtype, shape in layouts]
    large = tuple(index for index, nbytes in enumerate(sizes) if nbytes >= _ALONE_BYTES)
    if num_packs >= 1 or not large:
        return packing.plan(layouts, bytes_per_pack, num_packs)
    small = tuple(index for index, nbytes in enumerate(sizes) if nbytes < _ALONE_BYTES)
    return packing.plan(layouts, bytes_per_pack, indices=small) + packing.plan(layouts, 1, indices=large)


class GpuRoute:
    """See `mpistrategy.reduction.routes.base.Route`; for one call, and its results need no more rounding or division.

    Args:
        ranks: who takes part.
        packs: the arrays, which are all on one GPU.
        op: how they are combined.
        word: which path is asked for; see `mpistrategy.options.path_word`.
        wire: what travels between the nodes; see `mpistrategy.mpi.multi_node.reduced_precision.on`.
        operation: who combines them, and who gets the results.
        targets: for arrays that travel one by one, and that the path takes as they are: themselves, or such memory for
            each result; None for arrays that are packed, and whose results are new.
    """

    def __init__(
        self,
        ranks: Communicator,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        word: str,
        wire: str | None,
        operation: GpuOperation = ALL_REDUCE,
        targets: Sequence[DeviceArray | None] | None = None,
    ) -> None:
        self.packs: tuple[Pack, ...] = packs
        self._operation = operation
        self._ranks, self._op, self._word, self._wire = ranks, op, word, wire
        #: For each pack.
        self._targets: list[Any] = [
            None if targets is None or len(pack.members) > 1 else targets[pack.members[0].index] for pack in packs
        ]
        self._most_bytes = max((pack.nbytes for pack in packs), default=0)
        self._buckets: list[DeviceArray] = []
        #: Memory that the results will need beside the buckets: taken before the ranks agree, and free when they do.
        self._kept: list[DeviceArray] = []

    def bring(self, arrays: Sequence[DeviceArray], targets: Targets = None) -> None:
        """Pack: memory may be short, which all ranks hear of when they agree."""
        with arrays[0].device:
            self.make_room(self._ranks)
            self.pack(arrays)

    def make_room(self, ranks: Communicator, word: str = "") -> None:
        """Let the path of these ranks for a word, if there is one, take the memory that it needs."""
        if (known := device_paths(ranks).known.get(word or self._word)) is not None:
            known.make_room(self._most_bytes)

    def pack(self, arrays: Sequence[DeviceArray]) -> None:
        """Put what travels together, on the current stream."""
        cupy = cupy_for("arrays in GPU memory")
        check_no_capture(cupy, "a reduction of arrays in GPU memory")
        with arrays[0].device:
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
        with arrays[0].device:
            self.send(self._ranks, self.path(self._ranks), arrays)
        return self.results(arrays)

    def path(self, ranks: Communicator, word: str = "") -> DevicePath:
        """Return the path of these ranks for a word; the first time they choose it together."""
        return device_path(ranks, word or self._word, self._most_bytes)

    def send(self, ranks: Communicator, path: DevicePath, arrays: Sequence[DeviceArray]) -> None:
        """Combine what has been packed, on the current stream."""
        communicator = reduced_precision.on(ranks, self._wire)
        with arrays[0].device:
            # All is sent before the results, which may need memory: a rank that has none left must not miss there.
            for pack, bucket, target in zip(self.packs, self._buckets, self._targets, strict=True):
                if bucket is target and bucket is not arrays[pack.members[0].index]:
                    bucket[...] = arrays[pack.members[0].index]  # only now: until here it is the result before
                if pack.size:
                    self._operation.run(path, communicator, bucket.reshape(-1), self._op._on_the_wire)

    def results(self, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Return the results of what has been sent, on the current stream."""
        results: list[Any] = [None] * len(arrays)
        with arrays[0].device:
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
        path = device_paths(ranks).known.get(self._word)
        later = "" if path is None else f"all_reduce_async: on a stream of its own{_finished_by(ranks, path.name)}"
        return [
            Description(packs, self._way(ranks, dtype), copies, later, None)
            for (dtype, copies), packs in groups.items()
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


def _finished_by(ranks: Any, path_name: str) -> str:
    """Return who does the host's part of an all-reduce that goes on while the program computes."""
    if path_name in ON_THE_STREAM:
        return ""
    if getattr(ranks, "may_use_threads", False):
        return "; a thread of this rank does what the host must do"
    return "; wait() does what the host must do: MPI has no MPI_THREAD_MULTIPLE"


def _made_beside(wire: np.dtype[Any], wanted: Sequence[np.dtype[Any]], op: ReduceOp) -> list[np.dtype[Any]]:
    """Return the dtypes of what `finish` makes of a bucket: results of another dtype, and quotients of integers."""
    made = [dtype for dtype in sorted(set(wanted), key=str) if dtype != wire]
    if op is ReduceOp.MEAN and wire.kind in "iu":
        quotient = np.dtype(np.float64)
        return [quotient, *made, *(mean for mean in sorted({*map(mean_dtype, wanted)}, key=str) if mean != quotient)]
    return made
