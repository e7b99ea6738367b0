"""The route of arrays in GPU memory: packed on the device, combined on the strategy's path.

Small and large arrays of a dtype are packed into buckets by one kernel; the results are views of the buckets.  The
16-bit floats are combined in float32 and rounded once, as on the host, and integers of 8 and 16 bits in 32 bits: in a
copy of the whole bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import divide_by, mean_dtype, sum_dtype_of_mean, wire_dtype
from mpistrategy.arrays.gpu import (
    DeviceArray,
    check_no_capture,
    cupy_for,
)
from mpistrategy.mpi.gpu.transports.choice import device_path
from mpistrategy.mpi.interface.gpu_transport import DevicePath, communication_memory, device_paths
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import by_nccl
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Layout, Member, Pack
from mpistrategy.reduction.routes.base import Copies, Description, Targets
from mpistrategy.reduction.routes.gpu_copy import fill

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
    if num_packs >= 1:
        return packing.plan(layouts, bytes_per_pack, num_packs, _own_dtype, None, packing.GPU_ALIGNMENT)
    return packing.plan(layouts, bytes_per_pack, 0, _own_dtype, _ALONE_BYTES, packing.GPU_ALIGNMENT)


def _own_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the packs of arrays: their own, whatever they are combined in."""
    return dtype


@dataclass
class _Bucket:
    """A pack on its way.

    Attributes:
        pack: the arrays.
        memory: of the pack's dtype: new and flat, or the result that the caller has given.
        is_given: whether it is the latter.
        waiting: the array that is copied there when it is sent: until then it holds the result before.
        sent: what travels: the memory, or numbers in another dtype in its place; flat.
        result: the memory, or that of a mean of integers.
        rounded: memory for it in the dtype in which NCCL sends it between nodes, and rounds each sum; None for its own.
    """

    pack: Pack
    memory: DeviceArray
    is_given: bool
    waiting: DeviceArray | None
    sent: DeviceArray
    result: DeviceArray
    rounded: DeviceArray | None = None


class GpuRoute:
    """See `mpistrategy.reduction.routes.base.Route`; its results need no more rounding or division.

    Args:
        ranks: who takes part.
        packs: the arrays, which are all on one GPU.
        op: how they are combined.
        word: which path is asked for; see `mpistrategy.options.path_word`.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
        root: the rank that combines them; None: all ranks do, as the path does it best, and all get the result.
        sends: whether `root` sends the result to the others.
        targets: where results go, of each array, or None: memory that the path takes as it is, such as the array's own.
            Only arrays that travel one by one have one.
    """

    def __init__(
        self,
        ranks: Ranks,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        word: str,
        wire: str | None,
        root: int | None = None,
        *,
        sends: bool = False,
        targets: Targets = None,
    ) -> None:
        self.packs: tuple[Pack, ...] = packs
        self._root, self._sends, self._targets = root, sends, targets
        self._ranks, self._op, self._word, self._wire = ranks, op, word, wire

    def bring(self, arrays: Sequence[DeviceArray], targets: Targets = None) -> list[_Bucket]:
        """Pack: memory may be short, which all ranks hear of when they agree."""
        with arrays[0].device:
            device_paths(self._ranks).check()
            return self.pack(arrays, targets)

    def _sent_as(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype in which a pack is combined: integers of a MEAN have 64 bits."""
        return sum_dtype_of_mean(dtype) if self._op is ReduceOp.MEAN and dtype.kind in "iu" else wire_dtype(dtype)

    def pack(self, arrays: Sequence[DeviceArray], targets: Targets = None) -> list[_Bucket]:
        """Put together what travels together, on the current stream; `targets` take the place of the route's."""
        cupy = cupy_for("arrays in GPU memory")
        check_no_capture(cupy, "a reduction of arrays in GPU memory")
        given = self._targets if targets is None else targets
        with arrays[0].device:
            return [self._filled(cupy, pack, arrays, given) for pack in self.packs]

    def _filled(self, cupy: Any, pack: Pack, arrays: Sequence[DeviceArray], targets: Targets) -> _Bucket:
        take, first = partial(communication_memory, cupy, pack.size), pack.members[0].index
        lone = arrays[first] if len(pack.members) == 1 else None
        given: DeviceArray = None if lone is None or targets is None else targets[first]
        waiting = None if given is None or given is lone else lone
        memory = take(pack.dtype) if given is None else given
        if given is None:
            fill(pack, arrays, memory)
        dtype, sent = self._sent_as(pack.dtype), memory.reshape(-1)
        if dtype != pack.dtype:
            source, sent = (memory if waiting is None else waiting), take(dtype)
            sent[...], waiting = source.reshape(-1), None
        is_whole = self._op is ReduceOp.MEAN and pack.dtype.kind in "iu"
        result = take(mean_dtype(pack.dtype)) if is_whole else memory
        bucket = _Bucket(pack, memory, given is not None, waiting, sent, result)
        wire: Any = by_nccl(self._ranks, self._wire, dtype, self._op._on_the_wire)
        knows = wire is not None and (wire.kind == "f" or int(cupy.__version__.partition(".")[0]) >= 14)
        if knows and self._root is None:  # a CuPy before 14 knows no bfloat16: all digits are sent
            bucket.rounded = take(wire)
        return bucket

    def run(self, arrays: Sequence[DeviceArray], memory: list[_Bucket]) -> list[DeviceArray]:
        """Return the results, on the current stream."""
        with arrays[0].device:
            self.send(self._ranks, self.path(self._ranks), memory)
            return self.results(memory)

    def path(self, ranks: Ranks, word: str = "") -> DevicePath:
        """Return the path of these ranks for a word; the first time they choose it together."""
        return device_path(ranks, word or self._word)

    def send(self, ranks: Ranks, path: DevicePath, memory: list[_Bucket]) -> None:
        """Combine what has been packed, on the current stream of its device."""
        # All is sent before the results, which may need memory: a rank that has none left must not miss there.
        op, root = self._op._on_the_wire, self._root
        for each in memory:
            sent = each.sent
            if each.waiting is not None:
                each.memory[...] = each.waiting
            if sent.size:
                if each.rounded is not None and path.name == "nccl":
                    each.rounded[...] = sent
                    path.reduce(ranks, each.rounded, op, root)
                    sent[...] = each.rounded
                else:
                    path.reduce(ranks, sent, op, root, self._wire)
                if self._sends and root is not None:
                    path.bcast(ranks, sent, root)
                divide_by(self._op._divisor(sent.dtype, ranks.size), sent)
            if each.result is not each.memory:
                np.true_divide(sent, ranks.size, out=each.result)
            elif sent.dtype != each.memory.dtype:
                each.memory[...] = sent.reshape(each.memory.shape)

    def results(self, memory: list[_Bucket]) -> list[DeviceArray]:
        """Return the results of what has been sent, on the current stream of its device, pack after pack."""
        results: list[Any] = [None] * sum(len(pack.members) for pack in self.packs)
        for each in memory:
            members = each.pack.members
            views = [each.memory] if each.is_given else _views(members, each.result)
            for member, view in zip(members, views, strict=True):
                results[member.index] = view
        return results

    def describe(self, ranks: Ranks, arrays: Sequence[DeviceArray]) -> list[Description]:
        found = []
        for pack in self.packs:
            first = pack.members[0].index
            target = None if self._targets is None or len(pack.members) > 1 else self._targets[first]
            dtype = self._sent_as(pack.dtype)
            copies: Copies = ("all into a bucket",)
            if dtype != pack.dtype:
                copies = (*(copies if target is None else ()), f"into {dtype.name} and back")
            elif target is not None:
                copies = () if target is arrays[first] else ("all into the result",)
            found.append(Description(pack, self._way(ranks), copies))
        return found

    def _way(self, ranks: Ranks) -> str:
        paths = device_paths(ranks)
        if self._word not in paths.known:
            return "in GPU memory, on a path that the ranks choose at the first such call"
        name = paths.known[self._word].name
        sent = " and sent from there" if self._sends else ""
        how = "" if self._root is None else f", combined on rank {self._root}{sent}"
        return f"in GPU memory, {_PATHS[name]}{how} ({name}: {paths.reasons[self._word]})"


def _views(members: Sequence[Member], bucket: DeviceArray) -> list[DeviceArray]:
    """Return the results of a pack: views of its bucket, and copies of numbers, which would keep all of a large one."""
    make, kind, itemsize = type(bucket), bucket.dtype.type, bucket.dtype.itemsize  # CuPy is quicker with a type
    views = [make(each.shape, kind, bucket.data + each.start * itemsize) for each in members]
    if bucket.size <= FEW_ELEMENTS:
        return views
    return [view.copy() if view.size == 1 else view for view in views]
