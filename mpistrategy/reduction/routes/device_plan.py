"""Repeated all-reduces of arrays in GPU memory: checks, packs and the kernel's arguments are made once.

Left for each call are the addresses, which change from call to call with CuPy's pool, and the work itself.  The calls
make the same messages as those of `mpistrategy.reduction.routes.gpu.GpuRoute`, and ask CUDA for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, divide_by, wire_dtype
from mpistrategy.arrays.gpu import DeviceArray, by_value, cupy_for, is_captured, is_of_cuda_malloc, layout_of
from mpistrategy.arrays.nest import Leaves
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import DevicePath, communication_memory, device_paths
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Layout, Pack, layouts_of
from mpistrategy.reduction.routes.copy_kernel import AS_IT_IS, THREADS, kernel
from mpistrategy.reduction.routes.gpu import gpu_packs
from mpistrategy.reduction.routes.gpu_copy import Launch, launches
from mpistrategy.reduction.routes.gpu_operations import combination
from mpistrategy.reduction.routes.mailboxes import MISFIT, Run

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


def repeated_on_gpu(
    ranks: Communicator,
    where: Leaves,
    op: ReduceOp,
    arrays: Sequence[DeviceArray],
    signature_of: Callable[[tuple[Any, ...]], Signature],
    *,
    word: str,
    bytes_per_pack: float,
    num_packs: float,
) -> Run | None:
    """Return a ``run(value, out)``: the whole call for nests of CuPy arrays like these; None where there is none.

    It returns MISFIT, before anything has been sent, for what it is not for: arrays that are not contiguous or on
    another GPU, an `out` that is not `value`, and all calls before the ranks have chosen their path.

    Args:
        ranks: who takes part.
        where: how to reach the leaves.
        op: how they are combined.
        arrays: the leaves.
        signature_of: returns the signature of the call for dtypes and shapes.
        word: which path is asked for; see `mpistrategy.options.path_word`.
        bytes_per_pack, num_packs: see `mpistrategy.reduction.layout.packing.plan`.
    """
    cupy, layouts = cupy_for(_WHAT), layouts_of(arrays)
    signature, gpu = signature_of(tuple(map(layout_of, arrays))), gpu_of(ranks.devices, ranks.rank)
    if kernel(cupy) is None or not are_exact(layouts, op):
        return None
    packs = [_PlannedPack(cupy, pack) for pack in gpu_packs(layouts, bytes_per_pack, num_packs)]
    known, addresses_of = device_paths(ranks).known, _Arrays(cupy, gpu).addresses
    #: Which of the results, pack after pack, belongs to each leaf.
    order = np.argsort([index for pack in packs for index in pack.indices]).tolist()
    most_bytes, nested = max(pack.nbytes for pack in packs), not where.single
    combine = _combiner(ranks, op)
    compare = _agreement(ranks, signature)

    def run(value: Any, out: Any) -> Any:
        path = known.get(word)
        if path is None or not (out is None or out is value):
            return MISFIT
        leaves = where.take(value) if nested else (value,)
        found = addresses_of(leaves)
        # An array that is there twice is an error, which is found elsewhere; arrays without elements are at address 0.
        if found is None or (out is not None and nested and len({*found}) < len(found)):
            return MISFIT
        addresses: Addresses = np.array(found, np.uint64) if nested else found
        buckets: list[DeviceArray] = []
        path.make_room(most_bytes)
        for pack in packs:
            own = _own(leaves[pack.first]) if out is not None and pack.is_one else None
            buckets.append(pack.filled(addresses) if own is None else own)
        compare()
        for bucket in buckets:
            combine(path, bucket)
        # All is sent before the results, which may need memory: a rank that has none left must not miss there.
        made: list[DeviceArray] = []
        for pack, bucket in zip(packs, buckets, strict=True):
            if out is None:
                made += pack.results(bucket)
            elif bucket.data.ptr != addresses[pack.first]:
                pack.move(bucket.data.ptr, addresses, back=True)
        if out is not None:
            return out
        return where.build(map(made.__getitem__, order)) if nested else made[0]

    run.__dict__["signature"] = signature  # for the flight record
    return run


def repeated_in_arena(
    ranks: Communicator, buckets: Sequence[DeviceArray], op: ReduceOp, signature: Signature, word: str
) -> Callable[[Any, Any], Any]:
    """Return a ``run(arena, out)``: the whole call for an arena in GPU memory, whose buckets are reduced in place.

    It returns MISFIT, and nothing has been sent, for other arrays in the arena's nest, before the ranks have chosen
    their path, on another current GPU, and while the current stream is captured.  It keeps nothing of the arena, which
    may be closed while the flight record has the call.
    """
    cupy = cupy_for(_WHAT)
    current, mine = cupy.cuda.runtime.getDevice, buckets[0].data.device_id
    known, most_bytes = device_paths(ranks).known, max(bucket.nbytes for bucket in buckets)
    combine = _combiner(ranks, op)
    compare = _agreement(ranks, signature)

    def run(arena: Any, out: Any) -> Any:
        path = known.get(word)
        if path is None or not (out is None or out is arena) or not arena._is_unchanged():
            return MISFIT
        if current() != mine or is_captured(cupy):
            return MISFIT
        path.make_room(most_bytes)
        compare()
        for bucket in arena._mine:
            combine(path, bucket)
        return arena._result

    run.__dict__["signature"] = signature
    return run


def _combiner(ranks: Communicator, op: ReduceOp) -> Callable[[DevicePath, DeviceArray], None]:
    """Return what combines a bucket on a path."""
    text, is_mean = op._on_the_wire, op is ReduceOp.MEAN

    def combine(path: DevicePath, bucket: DeviceArray) -> None:
        if not bucket.size:
            return
        if not is_mean:
            path.allreduce(ranks, bucket, text)
            return
        of_path, divisor = combination(path, ranks, op, bucket.dtype)
        path.allreduce(ranks, bucket, of_path)
        divide_by(divisor, bucket)

    return combine


def _own(array: DeviceArray) -> DeviceArray | None:
    """Return an array, flat, that every path can combine where it is; None for other memory than cudaMalloc's."""
    return array.reshape(-1) if is_of_cuda_malloc(array) else None


def _agreement(ranks: Communicator, signature: Signature) -> Callable[[], None]:
    """Return what compares the call; calls with pointers to GPU memory are always compared."""
    guard = ranks.guard
    return partial(guard.compare_digest, guard.digest(signature), signature, due=True)
