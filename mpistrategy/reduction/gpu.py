"""Arrays in GPU memory: copied many at once, packed and combined on the strategy's path, broadcast and gathered.

One launch of a kernel copies up to `ARRAYS` arrays, each to an address of its own.  The whole table is passed as the
kernel's argument, by value: nothing is uploaded first, nothing has to be kept until the kernel has run, and calls on
several streams cannot disturb each other.  The same source is C++ but for a few words, and tests run it on the CPU.

Small and large arrays of a dtype are packed into buckets by this kernel; the results are views of the buckets.  The
16-bit floats are combined in float32 and rounded once, as on the host, and integers of 8 and 16 bits in 32 bits: in a
copy of the whole bucket.

Broadcasts and gathers send nothing to the host.  They are made inside an agreed call by all ranks, with the device of
the arrays current or not; `prepare` comes before the agreement, since it may fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import (
    DeviceArray,
    are_apart,
    by_value,
    check_device,
    check_no_capture,
    cupy_for,
    own_result,
)
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, divide_by, mean_dtype, sum_dtype_of_mean, wire_dtype
from mpistrategy.mpi.gpu.transports.choice import device_path
from mpistrategy.mpi.interface.gpu_transport import UNCHOSEN, DevicePath, chosen_path, communication_memory
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.two_level import BY_NCCL, between_nodes
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.transfer import (
    FEW_ELEMENTS,
    GPU_ALIGNMENT,
    Layout,
    Pack,
    Targets,
    Transfer,
    Way,
    packs_of,
)

NAME = "mpistrategy_move"
#: How many arrays go into one launch: with them the argument is just below the 4 KiB that every GPU takes.
ARRAYS = 170
THREADS = 256
#: How many bytes one block copies.  Each thread then moves 64 bytes, all of them on the way at the same time.
BLOCK_BYTES = 16384

#: The argument.  `size` counts bytes; `first` is the first of an array's blocks.
MOVES = np.dtype(
    {
        "names": ["source", "target", "size", "first"],
        "formats": [(dtype, ARRAYS) for dtype in (np.uint64, np.uint64, np.uint32, np.uint32)],
        "offsets": [offset * ARRAYS for offset in (0, 8, 16, 20)],
        "itemsize": 24 * ARRAYS,
    }
)

SOURCE = (
    f"""
#define ARRAYS {ARRAYS}
#define THREADS {THREADS}
#define BLOCK_BYTES {BLOCK_BYTES}u
#define NAME {NAME}
"""
    + r"""
typedef unsigned long long address;

struct Moves {
    address source[ARRAYS];
    address target[ARRAYS];
    unsigned int size[ARRAYS];
    unsigned int first[ARRAYS];
};

// ---- one block's part of one array

// Copy in units, where source and target are aligned alike; copy the bytes before and after them one by one.
template <typename Unit>
__device__ __forceinline__ void copy_units(address source, address target, unsigned int bytes) {
    const unsigned int before_first = (unsigned int)(0 - source) & (unsigned int)(sizeof(Unit) - 1);
    const unsigned int head = before_first < bytes ? before_first : bytes;
    const unsigned int units = (bytes - head) / (unsigned int)sizeof(Unit);
    const Unit* from = (const Unit*)(source + head);
    Unit* to = (Unit*)(target + head);
    unsigned int at = threadIdx.x;
    for (; at + 3 * THREADS < units; at += 4 * THREADS) {
        const Unit a = from[at], b = from[at + THREADS], c = from[at + 2 * THREADS], d = from[at + 3 * THREADS];
        to[at] = a;
        to[at + THREADS] = b;
        to[at + 2 * THREADS] = c;
        to[at + 3 * THREADS] = d;
    }
    for (; at < units; at += THREADS) to[at] = from[at];
    const unsigned int rest = head + units * (unsigned int)sizeof(Unit);
    for (at = threadIdx.x; at < head; at += THREADS) ((char*)target)[at] = ((const char*)source)[at];
    for (at = rest + threadIdx.x; at < bytes; at += THREADS) ((char*)target)[at] = ((const char*)source)[at];
}

__device__ __forceinline__ void copy(address source, address target, unsigned int bytes) {
    const unsigned int apart = (unsigned int)(source ^ target);
    if ((apart & 15u) == 0) copy_units<uint4>(source, target, bytes);
    else if ((apart & 7u) == 0) copy_units<uint2>(source, target, bytes);
    else if ((apart & 3u) == 0) copy_units<unsigned int>(source, target, bytes);
    else if ((apart & 1u) == 0) copy_units<unsigned short>(source, target, bytes);
    else copy_units<unsigned char>(source, target, bytes);
}

// ---- all arrays

// With fewer registers than five blocks leave to each, the compiler would keep some in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 5) NAME(const Moves moves, int count) {
    int low = 0, high = count - 1;  // the last array whose first block is not after this one
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (moves.first[middle] <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const unsigned int start = (blockIdx.x - moves.first[low]) * BLOCK_BYTES, left = moves.size[low] - start;
    copy(moves.source[low] + start, moves.target[low] + start, left < BLOCK_BYTES ? left : BLOCK_BYTES);
}
"""
)


@lru_cache(maxsize=1)
def kernel(cupy: Any) -> Any:
    """Return the kernel.

    CuPy compiles it with NVRTC the first time, for each device, and keeps the result in its cache on disk.
    """
    return cupy.RawModule(code=SOURCE, options=("-std=c++14",)).get_function(NAME)


#: Longer arrays are copied one by one: the kernel's numbers have 32 bits, and one launch more is nothing then.
LONGEST = 2**27
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice


def move(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Copy each source into its target, which has as many elements, on the current stream of the current device.

    One kernel does it for 170 arrays.  Targets that are not contiguous, or of another dtype, are left to CuPy, one by
    one.  A target in the memory of its source, such as an array that was reduced in place, has its values already.
    """
    plain = []
    for source, target in zip(sources, targets, strict=True):
        if source.data.ptr == target.data.ptr:
            continue
        if source.dtype == target.dtype and target.flags.c_contiguous:
            plain.append((source, target.data.ptr))
        else:
            target[...] = source.reshape(target.shape)
    _copy([source for source, _ in plain], [place for _, place in plain])


def fill(pack: Pack, arrays: Sequence[DeviceArray], bucket: DeviceArray) -> None:
    """Copy the arrays of a pack, which are of its dtype, into `bucket`, on the current stream of the current device."""
    start, itemsize = bucket.data.ptr, pack.dtype.itemsize
    _copy(pack.arrays_in(arrays), [start + member.start * itemsize for member in pack.members])


def _copy(sources: Sequence[DeviceArray], places: Sequence[int]) -> None:
    """Copy each source, which is on the current device, to a contiguous place, on its current stream."""
    cupy, one_by_one = cupy_for("arrays in GPU memory"), len(sources) == 1
    # Contiguous copies.  They may be dropped once the kernel is on the stream: CuPy's pools give their memory only to
    # later work on the stream.
    sources = [source if source.flags.c_contiguous else cupy.ascontiguousarray(source) for source in sources]
    moves = []
    for source, place in zip(sources, places, strict=True):
        nbytes = source.nbytes
        if nbytes and (one_by_one or nbytes > LONGEST):
            cupy.cuda.runtime.memcpyAsync(
                place, source.data.ptr, nbytes, _ON_DEVICE, cupy.cuda.get_current_stream().ptr
            )
        elif nbytes:
            moves.append((source.data.ptr, place, nbytes))
    for start in range(0, len(moves), ARRAYS):
        from_where, to_where, sizes = zip(*moves[start : start + ARRAYS], strict=True)
        template, blocks = _template(sizes)
        argument, count = template.copy(), len(sizes)  # ranks that are threads share the template
        argument["source"][0, :count] = from_where
        argument["target"][0, :count] = to_where
        kernel(cupy)((blocks,), (THREADS,), (by_value(argument), np.int32(count)))


@lru_cache(maxsize=256)
def _template(sizes: tuple[int, ...]) -> tuple[Array, int]:
    """Return the kernel's argument for arrays of so many bytes, without addresses; and how many blocks it takes."""
    template = np.zeros(1, MOVES)
    blocks = -(-np.array(sizes, np.int64) // BLOCK_BYTES)
    template["size"][0, : len(sizes)] = sizes
    template["first"][0, : len(sizes)] = np.cumsum(blocks) - blocks
    return template, int(blocks.sum())


# ------------------------------------------------------------------------------------------------- reductions


_PATHS = {
    "alone": "on the only replica",
    "mpi": "by MPI, which gets pointers to it",
    "staged": "through pinned memory of the host in chunks of 4 MiB, two of them under way",
    "nccl": "by NCCL, on the current stream",
}
#: Larger arrays travel by themselves: to pack them costs two copies, and saves next to nothing.
_ALONE_BYTES = 8 * 2**20


def gpu_packs(layouts: tuple[Layout, ...], bytes_per_pack: float, num_packs: float) -> tuple[Pack, ...]:
    """Return the packs of arrays in GPU memory: one for each large array, unless a number of packs is asked for."""
    alone_bytes = None if num_packs >= 1 else _ALONE_BYTES
    return packs_of(layouts, bytes_per_pack, num_packs, None, alone_bytes, GPU_ALIGNMENT)


@dataclass
class _Bucket:
    """A pack on its way.

    Attributes:
        pack: the arrays.
        payload: the flat array that travels: the result, or its numbers in another dtype.
        result: new flat memory, or an array that is its own result; of the pack's dtype, but for a mean of integers.
        rounded: memory of the dtype that NCCL sends between nodes, where it differs from the payload's; else None.
    """

    pack: Pack
    payload: DeviceArray
    result: DeviceArray
    rounded: DeviceArray | None = None


class GpuRoute(Transfer):
    """The route of arrays in GPU memory; its results need no more rounding or division.

    MPI and NCCL get pointers to GPU memory only from ranks that are known to make the same call.

    Args:
        ranks: the ranks that take part.
        packs: the arrays, which are all on one GPU.
        op: how they are combined.
        word: which path is asked for; see `mpistrategy.options.path_word`.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
        root: the rank that gets the results; None: all ranks.
        in_place: whether the arrays are their results: each travels by itself, from memory that every path takes.

    Attributes:
        word: the argument.
    """

    sparingly = False
    writes_targets = True

    def __init__(
        self,
        ranks: Ranks,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        word: str,
        wire: str | None,
        root: int | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        self.packs = packs
        self.word: str = word
        self._root = root
        self._ranks, self._op, self._wire, self._in_place = ranks, op, wire, in_place

    def direct(self, arrays: Sequence[DeviceArray], targets: Sequence[Any]) -> Targets:
        """Return the targets that are their arrays themselves, which can be reduced where they are."""
        lone = {pack.members[0].index for pack in self.packs if len(pack.members) == 1}
        pairs = enumerate(zip(arrays, targets, strict=True))
        own = [own_result(array, target) if number in lone else None for number, (array, target) in pairs]
        are_own = are_apart([target for target in own if target is not None])
        return own if are_own else None  # memory of two targets would be combined twice

    def bring(self, arrays: Sequence[DeviceArray], targets: Targets = None) -> list[_Bucket]:
        """Pack the arrays into buckets, on the current stream; `targets` are of `direct`."""
        prepare(self._ranks, arrays, "a reduction of arrays in GPU memory")
        cupy, own_targets = cupy_for(_WHAT), arrays if self._in_place else targets
        with arrays[0].device:
            return [self._filled(cupy, pack, arrays, own_targets) for pack in self.packs]

    def _sent_as(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype in which a pack is combined: integers of a MEAN have 64 bits."""
        return sum_dtype_of_mean(dtype) if self._op is ReduceOp.MEAN and dtype.kind in "iu" else wire_dtype(dtype)

    def _filled(self, cupy: Any, pack: Pack, arrays: Sequence[DeviceArray], targets: Targets) -> _Bucket:
        take, first = partial(communication_memory, cupy, pack.size), pack.members[0].index
        target: DeviceArray = None if targets is None or len(pack.members) > 1 else targets[first]
        memory = take(pack.dtype) if target is None else target
        if target is None:
            fill(pack, arrays, memory)
        dtype, payload = self._sent_as(pack.dtype), memory.reshape(-1)
        if dtype != pack.dtype:
            payload = take(dtype)
            payload[...] = memory.reshape(-1)
        is_whole = self._op is ReduceOp.MEAN and pack.dtype.kind in "iu"
        result = take(mean_dtype(pack.dtype)) if is_whole else memory
        bucket = _Bucket(pack, payload, result)
        wire: Any = between_nodes(self._ranks, self._wire, dtype, self._op._on_the_wire, BY_NCCL)
        knows = wire is not None and (wire.kind == "f" or int(cupy.__version__.partition(".")[0]) >= 14)
        if knows and self._root is None:  # a CuPy before 14 knows no bfloat16: all digits are sent
            bucket.rounded = take(wire)
        return bucket

    def run(self, arrays: Sequence[DeviceArray], memory: list[_Bucket]) -> list[DeviceArray]:
        """Return the results, on the current stream; with a root they are undefined on the other ranks."""
        with arrays[0].device:
            self.send(self._ranks, device_path(self._ranks, self.word), memory)
            return self.unpacked(memory)

    def send(self, ranks: Ranks, path: DevicePath, memory: list[_Bucket]) -> None:
        """Combine the buckets, on the current stream of its device."""
        # All buckets are sent before results take memory: a rank without free memory must not miss a collective.
        op = self._op._on_the_wire
        for bucket in memory:
            payload = bucket.payload
            if payload.size:
                if bucket.rounded is not None and path.name == "nccl":
                    bucket.rounded[...] = payload
                    path.reduce(ranks, bucket.rounded, op)
                    payload[...] = bucket.rounded
                else:
                    path.reduce(ranks, payload, op, self._root, self._wire)
                divide_by(self._op._divisor(payload.dtype, ranks.size), payload)
            if bucket.result.dtype != bucket.pack.dtype:
                np.true_divide(payload, ranks.size, out=bucket.result)
            elif payload.dtype != bucket.pack.dtype:
                bucket.result[...] = payload.reshape(bucket.result.shape)

    def unpacked(self, memory: list[_Bucket]) -> list[DeviceArray]:
        """Return the results of the buckets, on the current stream of their device.

        They are views of the buckets, and copies of numbers, which would keep all of a large one.
        """
        results: list[Any] = [None] * sum(len(pack.members) for pack in self.packs)
        for pack, result in [(bucket.pack, bucket.result) for bucket in memory]:
            make, kind, itemsize = type(result), result.dtype.type, result.dtype.itemsize  # CuPy is quicker with a type
            for member in pack.members:
                view = make(member.shape, kind, result.data + member.start * itemsize)
                results[member.index] = view.copy() if view.size == 1 and result.size > FEW_ELEMENTS else view
        return results

    def way(self, pack: Pack, arrays: Sequence[DeviceArray]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        dtype, copies = self._sent_as(pack.dtype), () if self._in_place else ("all into a bucket",)
        if dtype != pack.dtype:
            copies = (*copies, f"into {dtype.name} and back")
        path = chosen_path(self._ranks)
        if path is UNCHOSEN:
            return "in GPU memory, on a path that the ranks choose at the first such call", copies
        return f"in GPU memory, {_PATHS[path.name]} ({path.name}: {path.reason})", copies


# ----------------------------------------------------------------------------------------- broadcasts and gathers


_WHAT = "arrays in GPU memory"


def prepare(ranks: Ranks, arrays: Sequence[DeviceArray], where: str) -> None:
    """Raise where the ranks cannot send these arrays; before they agree on the call.

    Raises:
        DeviceError: for arrays that are not on the GPU that this rank drives, or on several.
        UnsupportedError: while the current stream is captured.
    """
    check_device(arrays, gpu_of(ranks.devices, ranks.rank), where)
    check_no_capture(cupy_for(_WHAT), where)
    with arrays[0].device:
        chosen_path(ranks).check()


def copy_in_memory(array: DeviceArray) -> DeviceArray:
    """Return a contiguous copy in memory that every path takes."""
    with array.device:
        copy = communication_memory(cupy_for(_WHAT), array.size, array.dtype).reshape(array.shape)
        copy[...] = array
    return copy


def room_for_rows(communicator: Ranks, block: DeviceArray, rows: Sequence[int]) -> tuple[DeviceArray, DeviceArray]:
    """Return memory for the blocks of all ranks along the first axis, and in it this rank's block, which comes first.

    ``rows[r]`` is the length of rank r's block.
    """
    with block.device:
        width = prod(block.shape[1:])
        memory = communication_memory(cupy_for(_WHAT), sum(rows) * width, block.dtype)
        own_block = memory[sum(rows[: communicator.rank]) * width :][: block.size]
        own_block[...] = block.reshape(-1)
        chosen_path(communicator).check()
        return own_block, memory.reshape((sum(rows), *block.shape[1:]))
