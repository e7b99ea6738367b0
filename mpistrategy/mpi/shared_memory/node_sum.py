"""NodeSum: how the ranks of one node add up their arrays (SUM, MIN, MAX, PROD), each rank a share of the elements.

One rank combines each element, in rank order, so that the bits are the same everywhere and in equal runs.  Arrays that
all ranks of the node see are combined where they are (`ShareOfNode`).  Of other arrays (`NodeSum.run`)
every rank copies the others' shares to where they see them: of a large array into a block of `NodeResults`, in which it
is combined and in which the result stays; else into buffers, in chunks that stay in the cache.  Of each chunk a rank
combines its own share, and shows the result.  The results of a chunk are copied out when the next one has been
combined: between its sum and its result a share may be exchanged with other nodes (`Exchange`).

A rank writes a chunk into the buffers of the chunk before the last.  It has then seen all results of that chunk, so no
rank reads the operands any more.  It writes results there when all ranks have sent their chunk, after they copied out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, divide_by, host_wire_dtype, quietly
from mpistrategy.mpi.shared_memory import mailboxes
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory
from mpistrategy.mpi.shared_memory.spin_wait import Counter, WaitUntil
from mpistrategy.mpi.tuning.thresholds import Thresholds

_COUNTERS = 4
_BUFFERS = 2
#: With many ranks on a node a chunk grows, so that each rank's share of it is worth a call of NumPy.
_LEAST_SHARE_BYTES = 16 * 2**10
_LARGEST_CHUNK_BYTES = 2**20
#: The chunks of all ranks' arrays together: about what a core's second cache holds beside other things.
_CACHE_BYTES = 512 * 2**10
_LEAST_PIECE_BYTES = 16 * 2**10
#: Smaller results are new memory each time.
LEAST_BYTES = 2**20
#: How large each rank's blocks may be together, and how many of a size there may be.
_MOST_BYTES = 2**30
_MOST_BLOCKS = 16
#: In place of a block's number.
NO_BLOCK = -1

#: ``combination(parts, targets, op, divisor)`` combines arrays of all ranks, in rank order, and writes the result,
#: divided, into each target; the first target may be the first part.
Combination: TypeAlias = Callable[[Sequence[Array], Sequence[Array], str, int], None]
#: Work in two halves: it yields once, between them.
Halves: TypeAlias = Iterator[None]
#: ``exchange(share)`` combines this rank's share of a chunk, after its sum on the node, with the shares of other nodes,
#: in place: it begins in the first half, and waits for the end in the second.
Exchange: TypeAlias = Callable[[Array], Halves]


def overlapped(pieces: Iterable[Halves]) -> None:
    """Do the pieces one after the other, the second half of each after the first half of the next."""
    before: Halves = iter(())
    for piece in pieces:
        next(piece)
        next(before, None)
        before = piece
    next(before, None)


def chunk_bytes_for(ranks: int, chunk_bytes: int) -> int:
    """Return the size of a chunk for so many ranks."""
    return max(chunk_bytes, min(ranks * _LEAST_SHARE_BYTES, _LARGEST_CHUNK_BYTES))


def segment_bytes(chunk_bytes: int) -> int:
    """Return how much memory each rank needs."""
    return _COUNTERS * ALIGNMENT + 2 * _BUFFERS * chunk_bytes


def share(count: int, part: int, parts: int, itemsize: int) -> tuple[int, int]:
    """Return where share `part` of `count` elements begins and ends; the borders are on cache lines."""
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-count // step)
    return min(count, lines * part // parts * step), min(count, lines * (part + 1) // parts * step)


def in_rank_order(parts: Sequence[Array], targets: Sequence[Array], op: str, divisor: int) -> None:
    """Combine arrays in their order; see `Combination`."""
    combine, total = COMBINE[op], targets[0]
    if len(parts) > 1:
        combine(parts[0], parts[1], out=total)
    elif total is not parts[0]:
        total[...] = parts[0]
    for part in parts[2:]:
        combine(total, part, out=total)
    divide_by(divisor, total)
    for target in targets[1:]:
        target[...] = total


class ShareOfNode:
    """This rank's share of the arrays of all ranks of the node, to be combined and written into each of `targets`.

    Args:
        arrays: flat, by local rank; 16-bit floats are added in float32 and rounded once.
        targets: flat, of the same size and dtype; may be the arrays themselves.
        op: "SUM", "MIN", "MAX" or "PROD".
        divisor: the result is divided by it; floating dtypes only.
        local_rank: this rank.
        combination: how they are combined; of 16-bit floats always in rank order.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        targets: Sequence[Array],
        op: str,
        divisor: int,
        local_rank: int,
        combination: Combination = in_rank_order,
    ) -> None:
        dtype, wide = arrays[0].dtype, host_wire_dtype(arrays[0].dtype)
        begin, end = share(arrays[0].size, local_rank, len(arrays), dtype.itemsize)
        step = piece_elements(len(arrays), dtype.itemsize)
        self._op, self._divisor, self._combination = op, divisor, combination
        self._wide = wide if wide != dtype else None
        places = [slice(start, min(start + step, end)) for start in range(begin, end, step)]
        #: The pieces, which stay in the cache: the parts of all ranks, and where the result goes.
        self._pieces = [([array[at] for array in arrays], [array[at] for array in targets]) for at in places]

    def combine(self) -> None:
        """Combine the share.  All ranks have written their arrays, and wait for each other before they read targets."""
        for parts, outs in self._pieces:
            if self._wide is None:
                self._combination(parts, outs, self._op, self._divisor)
            else:
                wide_parts = [part.astype(self._wide) for part in parts]
                in_rank_order(wide_parts, [wide_parts[0], *outs], self._op, self._divisor)


def piece_elements(ranks: int, itemsize: int) -> int:
    """Return how many elements of so many ranks' arrays fit the cache together."""
    return max(_LEAST_PIECE_BYTES, _CACHE_BYTES // ranks) // itemsize


class NodeResults:
    """The blocks of all ranks of one node, in which large arrays are added up, and in which their sums stay as results.

    Every rank has blocks of each size.  A result is a rank's own block, which is free again after the last reference to
    the result or a view of it.  If some rank has no free block of a call's size, and the call is not the first of this
    size, it makes a block for each rank: all ranks know of it.

    Args:
        share: returns so many bytes for each rank, of its own where they cannot be shared; collective.
        local_rank: this rank.
    """

    def __init__(self, share: Callable[[int], SharedMemory], local_rank: int) -> None:
        self._share, self._rank = share, local_rank
        #: How much larger this rank's blocks may become together.
        self._room = _MOST_BYTES
        #: By size: the segments of all ranks for each block, and the numbers of this rank's free blocks.
        self._blocks: dict[int, list[tuple[Array, ...]]] = {}
        self._free: dict[int, list[int]] = {}
        #: The blocks of this rank's results, by address and size.
        self._numbers: dict[tuple[int, int], int] = {}

    def free_block(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """Return a free block, which is free again once nobody refers to it; None without one."""
        nbytes = prod(shape) * dtype.itemsize
        free = self._free.get(nbytes)
        if not free:
            return None
        number = free.pop()
        # Views refer to this array over a memoryview, not to the segment below it.
        block = np.frombuffer(self._blocks[nbytes][number][self._rank].data, dtype)
        place = _place(block)
        self._numbers[place] = number
        weakref.finalize(block, _give_back, free, number, self._numbers, place).atexit = False
        return block.reshape(shape)

    def number_of(self, result: Array) -> int:
        """Return the number of the block that an array fills; `NO_BLOCK` for another array."""
        return self._numbers.get(_place(result), NO_BLOCK)

    def blocks(self, own: Array, numbers: Iterable[int]) -> list[Array]:
        """Return the block of each rank by its number, as arrays like this rank's `own`, which stands for its block."""
        blocks = self._blocks[own.nbytes]
        arrays = [blocks[number][rank].view(own.dtype) for rank, number in enumerate(numbers)]
        arrays[self._rank] = own
        return arrays

    def grow(self, nbytes: int) -> None:
        """Make one more block of a size for each rank, unless this is the first call of the size, or there are many."""
        blocks = self._blocks.get(nbytes)
        if blocks is None:
            self._blocks[nbytes], self._free[nbytes] = [], []
        elif len(blocks) < _MOST_BLOCKS and nbytes <= self._room:
            memory = self._share(nbytes)
            # Each block keeps a file open, and a process may often open 1024: 256 blocks at most.
            self._room = self._room - max(nbytes, _MOST_BYTES // 256) if memory.is_shared else 0
            if memory.is_shared:
                self._free[nbytes].append(len(blocks))
                blocks.append(memory.segments)


def _place(array: Array) -> tuple[int, int]:
    return array.__array_interface__["data"][0], array.nbytes


def _give_back(free: list[int], number: int, numbers: dict[tuple[int, int], int], place: tuple[int, int]) -> None:
    numbers.pop(place, None)
    free.append(number)


class NodeSum:
    """The sums of ordinary arrays among the ranks of one node.

    Args:
        memory: `segment_bytes(chunk_bytes)` for each rank, zeroed.
        chunk_bytes: the size of a chunk, of `chunk_bytes_for`.
        wait_until: how to wait for a peer.
        more: returns so many bytes more for each rank, of its own where they cannot be shared; collective.  Without it
            large arrays go in chunks, too.
    """

    def __init__(
        self,
        memory: SharedMemory,
        chunk_bytes: int,
        wait_until: WaitUntil,
        more: Callable[[int], SharedMemory] | None = None,
    ) -> None:
        self.local_rank: int = memory.local_rank
        self.size: int = len(memory.segments)
        self.chunk_bytes: int = chunk_bytes
        self._wait_until = wait_until
        self._sent_chunks, self._summed_chunks, self._arrivals, self._block_numbers = (
            Counter(memory, line) for line in range(_COUNTERS)
        )
        self._results = None if more is None else NodeResults(more, self.local_rank)
        begins = [_COUNTERS * ALIGNMENT + part * chunk_bytes for part in range(2 * _BUFFERS)]
        #: By buffer the ranks' operands, then by buffer their results; one array for each rank.
        self._parts = [[segment[begin:][:chunk_bytes] for segment in memory.segments] for begin in begins]
        self._typed: dict[np.dtype[Any], list[list[Array]]] = {}

    def barrier(self) -> None:
        """Wait for all ranks of the node; their earlier writes can be read after it."""
        number = self._arrivals.own_number[0] + 1
        self._arrivals.tell(number)
        self._wait_for(self._arrivals, number)

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory for a result, a target of `run`."""
        block = None if self._results is None else self._results.free_block(shape, dtype)
        return np.empty(shape, dtype) if block is None else block

    @quietly
    def run(
        self,
        pairs: Sequence[tuple[Array, Array]],
        op: str = "SUM",
        divisor: int = 1,
        combination: Combination = in_rank_order,
        exchange: Exchange | None = None,
    ) -> None:
        """Write the combination of all ranks' sources into the targets, for pairs of (source, target), and divide it.

        All are flat, contiguous, of one dtype; source and target may be the same.  `op` is "SUM", "MIN", "MAX" or
        "PROD".
        """
        overlapped(self._chunks(pairs, op, divisor, combination, exchange))

    def _chunks(
        self,
        pairs: Sequence[tuple[Array, Array]],
        op: str,
        divisor: int,
        combination: Combination,
        exchange: Exchange | None,
    ) -> Iterator[Halves]:
        """Do `run`: yield the chunks of the pairs that are in no blocks."""
        dtype = pairs[0][0].dtype
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = [[array.view(dtype) for array in part] for part in self._parts]
        elements = self.chunk_bytes // dtype.itemsize
        for source, target in pairs:
            results = self._results if source.nbytes >= LEAST_BYTES else None
            if results is not None and self._in_blocks(results, source, target, op, divisor, combination):
                continue
            for start in range(0, source.size, elements):
                slices = source[start : start + elements], target[start : start + elements]
                yield self._chunk(typed, *slices, op, divisor, combination, exchange)

    def _chunk(
        self,
        typed: list[list[Array]],
        source: Array,
        target: Array,
        op: str,
        divisor: int,
        combination: Combination,
        exchange: Exchange | None,
    ) -> Halves:
        """Add up this rank's share of a chunk; then copy out the shares of all ranks."""
        me, count, number = self.local_rank, source.size, self._sent_chunks.own_number[0] + 1
        operands, results = typed[number & 1], typed[_BUFFERS + (number & 1)]
        borders = [share(count, rank, self.size, source.itemsize) for rank in range(self.size)]
        begin, end = borders[me]
        operands[me][:begin], operands[me][end:count] = source[:begin], source[end:]
        self._sent_chunks.tell(number)
        self._wait_for(self._sent_chunks, number)
        total = results[me][begin:end]
        if end > begin:
            parts = [operand[begin:end] for operand in operands]
            parts[me] = source[begin:end]
            combination(parts, (total,), op, divisor)
        if exchange is None:
            self._summed_chunks.tell(number)
            yield
        else:
            yield from exchange(total)
            self._summed_chunks.tell(number)
        target[begin:end] = total
        self._wait_for(self._summed_chunks, number)
        for rank, (begin, end) in enumerate(borders):
            if rank != me and end > begin:
                target[begin:end] = results[rank][begin:end]

    def _in_blocks(
        self, results: NodeResults, source: Array, target: Array, op: str, divisor: int, combination: Combination
    ) -> bool:
        """Do `run` with one pair in a block of each rank; return False where a rank has no free block."""
        begin, end = share(target.size, self.local_rank, self.size, target.itemsize)
        is_block = results.number_of(target) != NO_BLOCK
        block = target if is_block else results.free_block(target.shape, target.dtype)
        if block is not None:
            block[:begin], block[end:] = source[:begin], source[end:]
        self._block_numbers.tell(NO_BLOCK if block is None else results.number_of(block))
        self.barrier()
        numbers = [number_of_rank[0] for number_of_rank in self._block_numbers.numbers]
        if block is None or NO_BLOCK in numbers:
            results.grow(target.nbytes)
            return False
        sources, targets = (results.blocks(array, numbers) for array in (source, target))
        ShareOfNode(sources, targets, op, divisor, self.local_rank, combination).combine()
        self.barrier()
        if block is not target:
            target[:begin], target[end:] = block[:begin], block[end:]
        return True

    def _wait_for(self, counter: Counter, number: int) -> None:
        for peer_number in counter.numbers:
            if peer_number[0] < number:
                self._wait_until(peer_number, number)
        counter.fence()


def bytes_for(ranks: int, thresholds: Thresholds) -> int:
    """Return how much memory each of so many ranks of a node needs for mailboxes and sums."""
    chunk_bytes = chunk_bytes_for(ranks, thresholds.chunk_bytes)
    return mailboxes.segment_bytes(thresholds.cell_bytes) + segment_bytes(chunk_bytes)
