"""Repeated all-reduces of arrays in GPU memory: checks, packs and the kernel's arguments are made once.

Left for each call are the addresses, which change from call to call with CuPy's pool, and the work itself.  The calls
make the same messages as those of `mpistrategy.reduction.routes.gpu.GpuRoute`, and ask CUDA for the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, divide_by, wire_dtype
from mpistrategy.arrays.gpu import DeviceArray, by_value, cupy_for, is_captured, is_of_cuda_malloc, layout_of
from mpistrategy.arrays.nest import Leaves
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import DevicePath, communication_memory, device_paths
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Layout, Pack, layouts_of
from mpistrategy.reduction.routes.base import CallPlan
from mpistrategy.reduction.routes.copy_kernel import AS_IT_IS, THREADS, kernel
from mpistrategy.reduction.routes.gpu import gpu_packs
from mpistrategy.reduction.routes.gpu_copy import Launch, launches

#: Where arrays are: an array of uint64, or the one address.
Addresses = Array | list[int]

_WHAT = "arrays in GPU memory"
_ON_DEVICE = 3  # cudaMemcpyKind

_memory_of, _address_of, _gpu_of = attrgetter("data"), attrgetter("ptr"), attrgetter("device_id")
#: CuPy's flags are a new object each time, for which a thousand arrays pay; this is what it is made of.
_is_contiguous, _is_flagged = attrgetter("_c_contiguous"), attrgetter("flags.c_contiguous")


class _Table:
    """One launch of the copying kernel; its argument is kept, and the addresses are written into it.

    CUDA has copied an argument when the launch returns.

    Args:
        launch: copies arrays of a pack as they are.
        indices: which of the plan's arrays are those of the pack.
        starts: where they begin in its bucket, in bytes.
    """

    def __init__(self, launch: Launch, indices: Array, starts: Array) -> None:
        argument = launch.template.copy()
        self._sources, self._targets = (argument[name][0, : launch.count] for name in ("source", "target"))
        self._arrays, self._before = indices[launch.arrays], launch.before_source
        self._starts = starts[launch.arrays] + launch.before_target
        self._call = (launch.blocks,), (THREADS,), (by_value(argument), np.int32(launch.count))

    def pack(self, function: Any, addresses: Any, bucket: int) -> None:
        np.add(addresses[self._arrays], self._before, out=self._sources)
        np.add(self._starts, np.uint64(bucket), out=self._targets)
        function(*self._call)

    def unpack(self, function: Any, addresses: Any, bucket: int) -> None:
        np.add(self._starts, np.uint64(bucket), out=self._sources)
        np.add(addresses[self._arrays], self._before, out=self._targets)
        function(*self._call)


class _PlannedPack:
    """What travels together: arrays of one dtype, which is that of the wire.

    Args:
        cupy: the package.
        pack: the arrays.
    """

    def __init__(self, cupy: Any, pack: Pack) -> None:
        members, itemsize = pack.members, pack.dtype.itemsize
        self._cupy, self._function = cupy, kernel(cupy)
        self._copy, self._stream = cupy.cuda.runtime.memcpyAsync, cupy.cuda.get_current_stream
        self.size, self.dtype, self.nbytes = pack.size, pack.dtype, pack.nbytes
        self.indices = [member.index for member in members]
        self.first, self.is_one = self.indices[0], len(members) == 1
        moves = tuple((AS_IT_IS, m.stop - m.start, itemsize, itemsize) for m in members)
        indices, starts = np.array(self.indices), pack.starts * np.uint64(itemsize)
        self._tables = [] if self.is_one else [_Table(launch, indices, starts) for launch in launches(moves)]
        #: Where each result begins, in bytes, and its shape.
        self._places = [(member.start * itemsize, member.shape) for member in members]
        #: Which of them are copied: a number would keep all of a large bucket.
        self._lone = [place for place, m in enumerate(members) if m.stop - m.start == 1 and pack.size > FEW_ELEMENTS]

    def filled(self, addresses: Addresses) -> DeviceArray:
        """Return a new bucket with the arrays that are at these addresses; all of the plan's."""
        bucket = communication_memory(self._cupy, self.size, self.dtype)
        self.move(bucket.data.ptr, addresses)
        return bucket

    def move(self, bucket: int, addresses: Addresses, *, back: bool = False) -> None:
        """Copy the arrays to a bucket, or back."""
        if self.is_one:
            ours, theirs = bucket, int(addresses[self.first])
            if self.nbytes:
                target, source = (theirs, ours) if back else (ours, theirs)
                self._copy(target, source, self.nbytes, _ON_DEVICE, self._stream().ptr)
            return
        for table in self._tables:
            (table.unpack if back else table.pack)(self._function, addresses, bucket)

    def results(self, bucket: DeviceArray) -> list[DeviceArray]:
        """Return the results: the bucket, or views of it."""
        if self.is_one:
            shape = self._places[0][1]
            return [bucket if len(shape) == 1 else bucket.reshape(shape)]
        memory, make = bucket.data, self._cupy.ndarray
        kind = self.dtype.type  # for which CuPy takes less time than for a dtype
        views = [make(shape, kind, memory + start) for start, shape in self._places]
        for number in self._lone:
            views[number] = views[number].copy()
        return views


class _Arrays:
    """Whether arrays are such as a plan is for: on this rank's GPU, which is current, contiguous, and not captured.

    Args:
        cupy: the package.
        gpu: the index of the GPU that this rank drives; None: whichever is the current one.
    """

    def __init__(self, cupy: Any, gpu: int | None) -> None:
        self._cupy, self._gpu = cupy, gpu
        self._current = cupy.cuda.runtime.getDevice
        self._has_several = cupy.cuda.runtime.getDeviceCount() > 1
        self._flag = _is_contiguous if hasattr(cupy.empty(1), "_c_contiguous") else _is_flagged

    def addresses(self, arrays: Sequence[DeviceArray]) -> list[int] | None:
        """Return where the arrays are; None for others."""
        memory = [*map(_memory_of, arrays)]
        if self._has_several:
            current = self._current()
            if self._gpu not in (None, current) or {*map(_gpu_of, memory)} != {current}:
                return None
        return [*map(_address_of, memory)] if all(map(self._flag, arrays)) and not is_captured(self._cupy) else None


def are_exact(layouts: Sequence[Layout], op: ReduceOp) -> bool:
    """Return whether results are what arrives: no dtype is converted on the way, and no integers are divided."""
    return all(dtype == wire_dtype(dtype) and not (op is ReduceOp.MEAN and dtype.kind in "iu") for dtype, _ in layouts)


def plan_on_gpu(
    otherwise: CallPlan,
    ranks: Communicator,
    leaves: Leaves,
    op: ReduceOp,
    arrays: Sequence[DeviceArray],
    signature: Signature,
    *,
    word: str,
    bytes_per_pack: float,
    num_packs: float,
    timeout: float | None,
) -> CallPlan | None:
    """Return the plan of nests of CuPy arrays like these; None where there is none.

    Args:
        otherwise: see `DevicePlan`.
        ranks: who takes part.
        leaves: how to reach the arrays.
        op: how they are combined.
        arrays: the leaves.
        signature: of the call, but for the dtypes and shapes.
        word: which path is asked for; see `mpistrategy.options.path_word`.
        bytes_per_pack, num_packs: see `mpistrategy.reduction.layout.packing.plan`.
        timeout: how long the call may wait for the other ranks, in seconds; None: as long as the strategy says.
    """
    cupy, layouts = cupy_for(_WHAT), layouts_of(arrays)
    if kernel(cupy) is None or not are_exact(layouts, op):
        return None
    packs = [_PlannedPack(cupy, pack) for pack in gpu_packs(layouts, bytes_per_pack, num_packs)]
    signature = signature._replace(values=tuple(map(layout_of, arrays)))
    gpu = gpu_of(ranks.devices, ranks.rank)
    return DevicePlan(otherwise, ranks, leaves, op, packs, _Arrays(cupy, gpu), signature, word, timeout)


class DevicePlan(CallPlan):
    """The plan of nests of CuPy arrays.

    Args:
        otherwise: does the calls that this plan is not for: of arrays that are not contiguous or on another GPU, with
            an `out` that is not the value, and all calls before the ranks have chosen their path.
        ranks: who takes part.
        leaves: how to reach the arrays.
        op: how they are combined.
        packs: the arrays.
        arrays: says where they are.
        signature: of the call.
        word: which path is asked for.
        timeout: how long the call may wait for the other ranks, in seconds; None: as long as the strategy says.
    """

    def __init__(
        self,
        otherwise: CallPlan,
        ranks: Communicator,
        leaves: Leaves,
        op: ReduceOp,
        packs: Sequence[_PlannedPack],
        arrays: _Arrays,
        signature: Signature,
        word: str,
        timeout: float | None,
    ) -> None:
        self._otherwise, self._ranks, self._leaves, self._op = otherwise, ranks, leaves, op
        self._packs, self._addresses_of, self._word, self._timeout = packs, arrays.addresses, word, timeout
        self._signature, self._digest = signature, ranks.guard.digest(signature)
        self._known, self._most_bytes = device_paths(ranks).known, max(pack.nbytes for pack in packs)
        #: Which of the results, pack after pack, belongs to each leaf.
        self._order = np.argsort([index for pack in packs for index in pack.indices]).tolist()

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        call.structure = self._leaves.text
        nested, path = not self._leaves.single, self._known.get(self._word)
        leaves = self._leaves.take(value)
        is_here = path is not None and (out is None or out is value)
        found = self._addresses_of(leaves) if is_here else None
        # An array that is there twice is an error, which is found elsewhere; arrays without elements are at address 0.
        if found is None or path is None or (out is not None and len({*found}) < len(found)):
            return self._otherwise.run(call, value, out, weight)
        addresses: Addresses = np.array(found, np.uint64) if nested else found
        buckets: list[DeviceArray] = []
        path.make_room(self._most_bytes)
        for pack in self._packs:
            own = _own(leaves[pack.first]) if out is not None and pack.is_one else None
            buckets.append(pack.filled(addresses) if own is None else own)
        if self._timeout is not None:
            call.timeout = self._timeout
        call.agree_on(self._signature, self._digest)
        for bucket in buckets:
            self._combine(path, bucket)
        # All is sent before the results, which may need memory: a rank that has none left must not miss there.
        made: list[DeviceArray] = []
        for pack, bucket in zip(self._packs, buckets, strict=True):
            if out is None:
                made += pack.results(bucket)
            elif bucket.data.ptr != addresses[pack.first]:
                pack.move(bucket.data.ptr, addresses, back=True)
        return self._leaves.build(map(made.__getitem__, self._order)) if out is None else out

    def _combine(self, path: DevicePath, bucket: DeviceArray) -> None:
        """Combine a bucket on a path."""
        if not bucket.size:
            return
        path.allreduce(self._ranks, bucket, self._op._on_the_wire)
        divide_by(self._op._divisor(bucket.dtype, self._ranks.size), bucket)


def _own(array: DeviceArray) -> DeviceArray | None:
    """Return an array, flat, that every path can combine where it is; None for other memory than cudaMalloc's."""
    return array.reshape(-1) if is_of_cuda_malloc(array) else None
