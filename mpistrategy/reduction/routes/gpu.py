"""The route of arrays in GPU memory: packed on the device, combined on the strategy's path.

Small and large arrays of a dtype are packed into buckets by one kernel; the results are views of the buckets.  The
16-bit floats are combined in float32 and rounded once, as on the host, and integers of 8 and 16 bits in 32 bits: piece
by piece, in memory for one piece.  No second copy of the buckets is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import divide_by, mean_dtype, wire_dtype
from mpistrategy.arrays.gpu import DeviceArray, check_no_capture, cupy_for
from mpistrategy.mpi.gpu.transports.pieces import PIECE, Pieces
from mpistrategy.mpi.gpu.transports.setup import device_path
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import ON_THE_STREAM, DevicePath, communication_memory, device_paths
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Layout, Pack
from mpistrategy.reduction.routes.base import Copies, Description, Targets
from mpistrategy.reduction.routes.gpu_copy import fill, move
from mpistrategy.reduction.routes.gpu_operations import ALL_REDUCE, GpuOperation

_PATHS = {
    "alone": "on the only replica",
    "mpi": "by MPI, which gets pointers to it",
    "staged": "through pinned memory of the host in chunks of 4 MiB, three of them under way",
    "nccl": "by NCCL, on the current stream",
}


#: Larger arrays travel by themselves: to pack them costs two copies, and saves next to nothing.
_ALONE_BYTES = 8 * 2**20


def gpu_packs(layouts: tuple[Layout, ...], bytes_per_pack: float, num_packs: float) -> tuple[Pack, ...]:
    """Return the packs of arrays in GPU memory: one for each large array, unless a number of packs is asked for."""
    sizes = [prod(shape) * dtype.itemsize for dtype, shape in layouts]
    large = tuple(index for index, nbytes in enumerate(sizes) if nbytes >= _ALONE_BYTES)
    plan = partial(packing.plan, layouts, wire=_own_dtype, alignment=packing.GPU_ALIGNMENT)
    if num_packs >= 1 or not large:
        return plan(bytes_per_pack, num_packs)
    small = tuple(index for index, nbytes in enumerate(sizes) if nbytes < _ALONE_BYTES)
    return plan(bytes_per_pack, indices=small) + plan(1, indices=large)


def _own_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the packs of arrays: their own, whatever they are combined in."""
    return dtype


class GpuRoute:
    """See `mpistrategy.reduction.routes.base.Route`; for one call, and its results need no more rounding or division.

    Args:
        ranks: who takes part.
        packs: the arrays, which are all on one GPU.
        op: how they are combined.
        word: which path is asked for; see `mpistrategy.options.path_word`.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
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
        self._most_bytes = max((_bytes_at_once(pack) for pack in packs), default=0)
        self._buckets: list[DeviceArray] = []
        #: Memory that the results will need beside the buckets: taken before the ranks agree, and free when they do.
        self._kept: list[DeviceArray] = []

    def bring(self, arrays: Sequence[DeviceArray], targets: Targets = None) -> None:
        """Pack: memory may be short, which all ranks hear of when they agree."""
        with arrays[0].device:
            self.make_room(self._ranks)
            self.pack(arrays)

    def make_room(self, ranks: Communicator, word: str = "") -> None:
        """Take the memory of pieces in another dtype, and that of the path of these ranks, if there is one."""
        for pack in self.packs:
            if (dtype := wire_dtype(pack.dtype)) != pack.dtype:
                self._pieces(ranks).make_room(pack.size, dtype)
        if (known := device_paths(ranks).known.get(word or self._word)) is not None:
            known.make_room(self._most_bytes)

    def _pieces(self, ranks: Communicator) -> Pieces:
        return ranks.once(Pieces, lambda: Pieces(cupy_for("arrays in GPU memory")))

    def pack(self, arrays: Sequence[DeviceArray]) -> None:
        """Put what travels together, on the current stream."""
        cupy = cupy_for("arrays in GPU memory")
        check_no_capture(cupy, "a reduction of arrays in GPU memory")
        with arrays[0].device:
            for pack, target in zip(self.packs, self._targets, strict=True):
                bucket = target
                if target is None:
                    bucket = communication_memory(cupy, pack.size, pack.dtype)
                    fill(pack, arrays, bucket)
                    self._kept += [cupy.empty(pack.size, dtype) for dtype in _made_beside(pack.dtype, self._op)]
                self._buckets.append(bucket)

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
        with arrays[0].device:
            # All is sent before the results, which may need memory: a rank that has none left must not miss there.
            for pack, bucket, target in zip(self.packs, self._buckets, self._targets, strict=True):
                if bucket is target and bucket is not arrays[pack.members[0].index]:
                    bucket[...] = arrays[pack.members[0].index]  # only now: until here it is the result before
                if pack.size:
                    self._combine(ranks, path, bucket.reshape(-1))

    def _combine(self, ranks: Communicator, path: DevicePath, bucket: DeviceArray) -> None:
        """Combine a bucket, and divide it where it is one of floats."""
        dtype = wire_dtype(bucket.dtype)

        def combine(values: DeviceArray) -> None:
            self._operation.run(path, ranks, values, self._op._on_the_wire, self._wire)
            divide_by(self._op._divisor(dtype, ranks.size), values)

        if dtype == bucket.dtype:
            combine(bucket)
        else:
            self._pieces(ranks).combine(bucket, dtype, combine, lambda part, piece: move([part], [piece]))

    def results(self, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Return the results of what has been sent, on the current stream."""
        results: list[Any] = [None] * len(arrays)
        with arrays[0].device:
            self._kept.clear()  # CuPy's pool has it ready, for this stream
            for pack, bucket, target in zip(self.packs, self._buckets, self._targets, strict=True):
                if target is None:
                    self._unpack(pack, bucket, results)
                else:
                    results[pack.members[0].index] = target
        return results

    def _unpack(self, pack: Pack, bucket: DeviceArray, results: list[Any]) -> None:
        is_divided = pack.dtype.kind not in "iu"
        finished = bucket if is_divided else finish(bucket, pack.dtype, self._op, self._ranks.size)
        for index, view in pack.views(finished):
            lone = view.size == 1 and pack.size > FEW_ELEMENTS
            results[index] = view.copy() if lone else view

    def describe(self, ranks: Communicator, arrays: Sequence[DeviceArray]) -> list[Description]:
        groups: dict[tuple[Any, Copies], list[Pack]] = {}
        for pack, target in zip(self.packs, self._targets, strict=True):
            copies: Copies = ((1, "all into a bucket"),)
            if target is not None:
                copies = () if target is arrays[pack.members[0].index] else ((1, "all into the result"),)
            if (dtype := wire_dtype(pack.dtype)) != pack.dtype:
                copies += ((2, f"into {dtype.name} and back, piece by piece"),)
            groups.setdefault((pack.dtype, copies), []).append(pack)
        path = device_paths(ranks).known.get(self._word)
        later = "" if path is None else f"all_reduce_async: on a stream of its own{_finished_by(ranks, path.name)}"
        return [Description(packs, self._way(ranks, dtype), copies, later) for (dtype, copies), packs in groups.items()]

    def _way(self, ranks: Communicator, dtype: np.dtype[Any]) -> str:
        paths, path = device_paths(ranks), device_paths(ranks).known.get(self._word)
        if path is None:
            return "in GPU memory, on a path that the ranks choose at the first such call"
        how = _PATHS[path.name] + (f", {self._operation.text}" if self._operation.text else "")
        why = path.by_host(ranks, wire_dtype(dtype), self._op._on_the_wire, self._wire)
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


def _made_beside(dtype: np.dtype[Any], op: ReduceOp) -> list[np.dtype[Any]]:
    """Return the dtypes of what `finish` makes of a bucket: quotients of integers."""
    if op is not ReduceOp.MEAN or dtype.kind not in "iu":
        return []
    return [*dict.fromkeys((np.dtype(np.float64), mean_dtype(dtype)))]


def _bytes_at_once(pack: Pack) -> int:
    """Return how much of a pack travels in one call."""
    dtype = wire_dtype(pack.dtype)
    return pack.nbytes if dtype == pack.dtype else min(pack.size, PIECE) * dtype.itemsize
