"""Transfers: how a list of arrays is packed, moved in a call that all ranks make, and finished; on the host, all of it.

Many small arrays become few large buffers: grouped by dtype, in order, up to a number of bytes.  A pack is summed in
one call, and the results are views of it: fresh memory without other users.

A route is the transfer of arrays in the dtypes in which they are combined: one way for bytes to travel.  Arrays on the
host go with the check of the call, or through the communicator.

On one node each rank writes small arrays into its mailbox, next to the digest of its call.  When all digests are equal,
all data are there, too, and every rank adds them up in rank order: the same bits everywhere.

Between nodes the sums of a few floats go in the first message, which compares the calls.  Each travels as float64, and
is added up by MPI.

Other arrays go through the communicator: small arrays are packed, large arrays go as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.convert import are_apart, is_on_device
from mpistrategy.arrays.dtypes import (
    COMBINE,
    Array,
    Combine,
    divide_by,
    division,
    dtype_name,
    host_wire_dtype,
    is_buffer,
    mean_dtype,
    quietly,
)
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.two_level import Wire, between_nodes
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, MailboxSlot
from mpistrategy.mpi.shared_memory.node_sum import LEAST_BYTES, Combination, in_rank_order
from mpistrategy.mpi.shared_memory.segments import aligned
from mpistrategy.mpi.tuning.thresholds import RouteName
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import ReduceOp

#: What bytes_per_pack=0 stands for.
DEFAULT_BYTES_PER_PACK = 32 * 2**20
#: A number that is a view of a larger pack would keep all of it.
FEW_ELEMENTS = 64
#: From so many bytes on the results of one node are written where the arrays are.  Below, its ranks add up in memory
#: that they share, and copy (2 ranks, 1 MiB: 0.43 ms, in place 0.61; 8 MiB: 3.3 and 3.2; 25 MiB: 10.3 and 8.5).
_LEAST_IN_PLACE = 8 * 2**20
#: From so many bytes on a copy takes longer than to find out that the result can be written to its target.
_LEAST_DIRECT = 64 * 2**10

#: What one thread of a GPU reads at once.
GPU_ALIGNMENT = 16

Layout = tuple[np.dtype[Any], tuple[int, ...]]
#: The kinds of dtypes that are reduced as they are.
_KINDS = "fiuc"
_Wire = Callable[[np.dtype[Any]], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Member:
    """One array's place in a pack."""

    index: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """One buffer: its dtype on the wire, its length, and the arrays in it, which may have another dtype."""

    dtype: np.dtype[Any]
    size: int
    members: tuple[Member, ...]

    @property
    def nbytes(self) -> int:
        """The length of the buffer in bytes."""
        return self.size * self.dtype.itemsize

    def arrays_in(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays that are in the pack."""
        return arrays if len(self.members) == len(arrays) else [arrays[member.index] for member in self.members]

    def fill(self, arrays: Sequence[Array], buffer: Array) -> Array:
        """Return the buffer, with the arrays' values, converted to the wire dtype.

        For packs without gaps, such as packs on the host.
        """
        np.concatenate(self.arrays_in(arrays), axis=None, out=buffer, casting="unsafe")
        return buffer

    def room(self, targets: Targets, make: Callable[..., Array] = np.empty) -> Array:
        """Return memory for the combination: the target of a lone array, if it has the pack's dtype; else new."""
        first, is_lone = self.members[0], len(self.members) == 1
        target = None if targets is None or not is_lone else targets[first.index]
        if target is not None and target.dtype == self.dtype:
            return target
        return make(first.shape if is_lone else (self.size,), self.dtype)

    def views(self, buffer: Array) -> list[tuple[int, Array]]:
        """Return (index, view of `buffer` with the array's shape) for every member."""
        return [
            (m.index, buffer[m.start : m.stop] if len(m.shape) == 1 else buffer[m.start : m.stop].reshape(m.shape))
            for m in self.members
        ]

    def unpack(self, buffer: Array, results: list[Any]) -> None:
        """Write the views of `buffer` into the results of all arrays; a number is copied out of a large pack."""
        members = self.members
        if len(members) == 1:  # the buffer itself may be an array of the caller's
            results[members[0].index] = buffer if buffer.shape == members[0].shape else buffer.reshape(members[0].shape)
            return
        copies_numbers = self.size > FEW_ELEMENTS
        for m in members:
            # To ask is quicker than to reshape.
            array = buffer[m.start : m.stop] if len(m.shape) == 1 else buffer[m.start : m.stop].reshape(m.shape)
            results[m.index] = array.copy() if copies_numbers and m.stop - m.start == 1 else array


def layouts_of(arrays: Sequence[Any]) -> tuple[Layout, ...]:
    """Return the dtype and the shape of each array."""
    return tuple([(array.dtype, array.shape) for array in arrays])


@lru_cache(maxsize=256)
def packs_of(
    layouts: tuple[Layout, ...],
    bytes_per_pack: float = 0,
    num_packs: float = 0,
    wire: _Wire | None = host_wire_dtype,
    alone_bytes: float | None = None,
    alignment: int = 1,
) -> tuple[Pack, ...]:
    """Return the packs of arrays with these layouts.

    Args:
        layouts: dtype and shape of each array.
        bytes_per_pack: an upper bound for a pack of several arrays, 0 for the library's own.
        num_packs: split each dtype's bytes into about so many packs instead, 0 means bytes_per_pack decides.
        wire: returns the dtype in which an array of a dtype travels; None: in its own.
        alone_bytes: arrays of so many bytes and more travel by themselves; None: all are packed.
        alignment: each array begins at a multiple of so many bytes: in GPU memory of 16, which kernels move at a time.
    """
    groups: dict[tuple[np.dtype[Any], int | None], list[int]] = {}
    for index, (own_dtype, shape) in enumerate(layouts):
        dtype = own_dtype if wire is None else wire(own_dtype)
        is_large = alone_bytes is not None and prod(shape) * dtype.itemsize >= alone_bytes
        groups.setdefault((dtype, index if is_large else None), []).append(index)
    packs: list[Pack] = []
    for (dtype, _), indices in groups.items():
        limit, line = int(bytes_per_pack) or DEFAULT_BYTES_PER_PACK, max(1, alignment // dtype.itemsize)
        if num_packs >= 1:
            total = sum(-(-prod(layouts[index][1]) // line) * line for index in indices) * dtype.itemsize
            limit = max(1, -(-total // int(num_packs)))
        members: list[Member] = []
        for index in indices:
            count = prod(layouts[index][1])
            start = -(-members[-1].stop // line) * line if members else 0
            if members and (start + count) * dtype.itemsize > limit:
                packs.append(Pack(dtype, members[-1].stop, tuple(members)))
                members, start = [], 0
            members.append(Member(index, start, start + count, layouts[index][1]))
        packs.append(Pack(dtype, members[-1].stop, tuple(members)))
    return tuple(packs)


def dtypes_of_results(layouts: tuple[Layout, ...], op: ReduceOp) -> list[np.dtype[Any]]:
    """Return the dtype of each result."""
    return [mean_dtype(dtype) if op is ReduceOp.MEAN else dtype for dtype, _ in layouts]


def is_simple(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Return whether arrays of a dtype are reduced as they are.

    They are NumPy's own, native, and ordered for MIN and MAX.
    """
    fits = op not in (ReduceOp.MIN, ReduceOp.MAX) or dtype.kind != "c"
    return dtype.kind in _KINDS and dtype.isnative and dtype.type.__module__ == "numpy" and fits


# ------------------------------------------------------------------------------------------------- transfers

#: For each array memory that a result in its own dtype may be written to, contiguous and sharing none with another
#: array; or None.
Targets: TypeAlias = "Sequence[Array | None] | None"
#: How a pack travels, and the copies on this rank; in words.
Way: TypeAlias = "tuple[str, tuple[str, ...]]"


class Transfer(ABC):
    """The work on arrays of certain layouts before the ranks agree on a call, and after the agreement.

    Attributes:
        packs: the buffers that travel: several arrays in one, or one array by itself.
        writes_targets: whether `bring` takes targets.
        sparingly: whether `run` needs no barrier before it; see `Call.agree`.
        least_in_place: from how many bytes on results are best written over the arrays.
        weight: of this rank's arrays, for weighted means; set before each call.
    """

    weight: float

    packs: tuple[Pack, ...] = ()
    writes_targets: bool = False
    sparingly: bool = True
    least_in_place: int = 0

    def direct(self, arrays: Sequence[Array], targets: Sequence[Any]) -> Targets:
        """Return for each array the target itself where its result may be written there while others are read.

        None for an array means that its result is copied there at the end; None instead of a list: all results are.
        """
        sources = [array for target, array in zip(targets, arrays, strict=True) if target is not array]
        if not sources and sum([array.nbytes for array in arrays]) < self.least_in_place:
            return None
        # Arrays that own their memory share none with each other.
        if (sources or any(target.base is not None for target in targets)) and not are_apart([*targets, *sources]):
            return None
        return [target if isinstance(target, np.ndarray) and is_buffer(target) else None for target in targets]

    @abstractmethod
    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Do all that can fail, before the ranks agree on the call: copy, and take memory for the results.

        Returns:
            The memory, for `run`.  Results may be written to `targets`, which keep their values until then.
        """

    @abstractmethod
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the results, after the agreement."""

    def answer(self) -> None:
        """Answer ranks that ask for the structure of the values, after an agreement that says so."""
        raise NotImplementedError(type(self).__name__)

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack of these arrays travels."""
        raise NotImplementedError(type(self).__name__)

    def describe(self, arrays: Sequence[Array]) -> list[tuple[Pack, Way]]:
        """Return the packs of these arrays and how they travel, for `Strategy.explain`."""
        return [(pack, self.way(pack, arrays)) for pack in self.packs if pack.size]


def copies_of(pack: Pack, arrays: Sequence[Array]) -> tuple[str, ...]:
    """Return the copies that are made before a pack of these arrays travels, and afterwards."""
    if any(array.dtype != pack.dtype for array in pack.arrays_in(arrays)):
        return (f"all into {pack.dtype.name} and the results back",)
    if len(pack.members) > 1:
        return ("all into the pack",)
    return () if is_buffer(arrays[pack.members[0].index]) else ("all in order",)


def ways_in_words(ways: Sequence[tuple[Pack, Way]]) -> list[str]:
    """Return two lines for the packs of a dtype that take one way."""
    groups: dict[Any, list[Pack]] = {}
    for pack, way in ways:
        groups.setdefault((way, pack.dtype, len(pack.members) > 1), []).append(pack)
    lines = []
    for ((way, copies), dtype, _), group in groups.items():
        count, nbytes = sum(len(pack.members) for pack in group), sum(pack.nbytes for pack in group)
        buffers = f"{counted(count, 'array')} in {counted(len(group), 'buffer')}"
        subject = f"{buffers}, {dtype_name(dtype)}, {size_in_words(nbytes)}"
        lines += [f"{subject}: {way}", f"  copies: {', '.join(copies) or 'none'}"]
    return lines


def counted(number: int, noun: str) -> str:
    """Return "1 array", "2 arrays"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------ from a sum to the result


def finish(total: Array, dtype: np.dtype[Any], op: ReduceOp, count: int, out: Array | None = None) -> Array:
    """Turn a sum in the wire dtype into the result: divide for MEAN, and round once to the result's dtype.

    Sums of integers wrap around, as NumPy's do.  On the host the result is written into `out`, if given: an array of
    the result's dtype and shape.
    """
    if op is ReduceOp.MEAN:
        return rounded(divide(total, count, out), mean_dtype(dtype), out)
    return rounded(total, dtype, out)


@quietly
def rounded(result: Array, dtype: np.dtype[Any], out: Array | None = None) -> Array:
    """Return `result` in `dtype`, in `out` if given; else no copy where it is that already."""
    if out is None:
        return result.astype(dtype, copy=False)
    if out is not result:
        np.copyto(out, result, casting="unsafe")
    return out


@quietly
def divide(total: Array, count: int | float, out: Array | None = None) -> Array:
    """Return ``total / count`` in the dtype of a mean: in place where it is the same dtype, else in `out` if given."""
    target = mean_dtype(total.dtype)
    if target == total.dtype:
        divide_by(count, total)
        return total
    if is_on_device(total):
        quotient: Array = np.true_divide(total, count, dtype=np.float64).astype(target, copy=False)
        return quotient
    # Divided in float64 and rounded as it is written: no array of that dtype is made.
    return np.true_divide(total, np.float64(count), out=np.empty(total.shape, target) if out is None else out)


# ------------------------------------------------------------------------------------------------- the communicator


#: Writes the combination of a source, which is flat, into its target of the same dtype and size, which may have the
#: source's memory.
ReducePair = Callable[[Array, Array], None]


class CommunicatorRoute(Transfer):
    """The route of arrays on the host without another route.

    Args:
        ranks: the ranks that take part.
        packs: the buffers.
        op: how they are combined.
        name: the way that all packs take; None: each pack takes the usual way.
        reduce_pair: combines one pack; None: `Ranks` does it.
        combination: how the arrays of a node are combined.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
    """

    def __init__(
        self,
        ranks: Ranks,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        name: RouteName | None = None,
        reduce_pair: ReducePair | None = None,
        wire: str | None = None,
        combination: Combination = in_rank_order,
    ) -> None:
        self.packs = packs
        self.writes_targets: bool = any(len(pack.members) == 1 for pack in packs)
        self._ranks, self._text, self._name, self._wire = ranks, op._on_the_wire, name, wire
        self._reduce_pair, self._combination = reduce_pair, combination
        self._nbytes = sum(pack.nbytes for pack in packs)
        self._node = ranks.node_sum if "node_sum" in map(self.name_of, packs) else None
        self.least_in_place: int = 0 if self._node is None else _LEAST_IN_PLACE
        self._divisors = {pack.dtype: op._divisor(pack.dtype, ranks.size) for pack in packs}

    def name_of(self, pack: Pack) -> RouteName:
        """Return the name of the way that a pack takes."""
        if self._name is not None:
            return self._name
        if self.dtype_between_nodes(pack.dtype) is not None:
            return "lanes"
        route_of_all = self._ranks.route(self._nbytes, pack.dtype, self._text)
        return route_of_all if route_of_all == "node_sum" else self._ranks.route(pack.nbytes, pack.dtype, self._text)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> list[tuple[Array, Array]]:
        """Return the source of each pack, flat, and memory for its result.

        A lone array is itself the source, if it can travel so; its result may be its target.  Others are copied.
        """
        memory = []
        make = np.empty if self._node is None else self._node.new
        for pack in self.packs:
            array = arrays[pack.members[0].index]
            travels = len(pack.members) == 1 and array.dtype == pack.dtype and is_buffer(array)
            target = pack.room(targets if travels else None, make)
            source = array.reshape(-1) if travels else pack.fill(arrays, target.reshape(-1))
            memory.append((source, target))
        return memory

    @quietly
    def run(self, arrays: Sequence[Array], memory: list[tuple[Array, Array]]) -> list[Array]:
        """Return the combinations, in the memory that was taken."""
        pairs: dict[np.dtype[Any], list[tuple[Array, Array]]] = {}
        for pack, (source, target) in zip(self.packs, memory, strict=True):
            if pack.size:
                pairs.setdefault(pack.dtype, []).append((source, target))
        for dtype, pairs_of_dtype in pairs.items():
            self._combine(dtype, pairs_of_dtype)
        results: list[Any] = [None] * len(arrays)
        for pack, (_, target) in zip(self.packs, memory, strict=True):
            pack.unpack(target, results)
        return results

    def _combine(self, dtype: np.dtype[Any], pairs: Sequence[tuple[Array, Array]]) -> None:
        wire, divisor = self.dtype_between_nodes(dtype), self._divisors[dtype]
        if self._node is not None and self._reduce_pair is None:
            flat_pairs = [(source, target.reshape(-1)) for source, target in pairs]
            self._node.run(flat_pairs, self._text, divisor, self._combination)
            return
        for source, target in pairs:
            if self._reduce_pair is not None:
                self._reduce_pair(source, target)
            else:
                self._ranks.allreduce(target.reshape(-1), self._text, source, by_lanes=self._name == "lanes", wire=wire)
            divide_by(divisor, target)

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        name, copies, wire = self.name_of(pack), copies_of(pack, arrays), self.dtype_between_nodes(pack.dtype)
        stays = name == "node_sum" and pack.nbytes >= LEAST_BYTES
        text, more = _WAYS["node_results" if stays else name]
        text = text if wire is None else f"{text}, as {wire.name} between them"
        return text, (copies or more) if name in ("root", "none") else copies + more

    def dtype_between_nodes(self, dtype: np.dtype[Any]) -> Wire:
        """Return the dtype in which sums of a dtype travel between nodes; None for their own."""
        return None if self._wire is None else between_nodes(self._ranks, self._wire, dtype, self._text)


#: How the packs of a way travel, and further copies.
_WAYS: dict[str, Way] = {
    "node_sum": (
        "through memory of the node, a share by each rank",
        ("the others' shares into it", "the result out of it"),
    ),
    "node_results": (
        "through memory of the node, a share by each rank; the results stay there",
        ("the others' shares into it",),
    ),
    "lanes": (
        "within each node, by MPI's Allreduce between the nodes, and back",
        ("all into memory of the node", "the result out of it"),
    ),
    "mpi": ("by MPI's Allreduce", ()),
    "alltoallv": ("from rank to rank: each gets a share of all values, and sends their combination", ()),
    "root": ("by MPI's Reduce to one rank, and from there by Bcast", ("all into the result",)),
    "threads": ("between the threads of this process", ()),
    "none": ("stays here, the only replica", ("all into the result",)),
}


# ------------------------------------------------------------------------------------------------- mailboxes


class MailboxArrays:
    """Arrays of each rank that all ranks of the node see, as they are.

    Args:
        mailboxes: the mailboxes of the ranks.
        layouts: dtype and shape of each array; they fit: see `fits_mailbox`.
    """

    def __init__(self, mailboxes: Mailboxes, layouts: tuple[Layout, ...]) -> None:
        self._mailboxes = mailboxes
        #: The arrays of each slot and rank; and this rank's arrays of each slot.
        self.slots: list[list[list[Array]]] = [
            [_arrays_in(payload, layouts) for payload in slot.payloads] for slot in mailboxes.slots
        ]
        self.own_arrays: list[list[Array]] = [arrays[mailboxes.local_rank] for arrays in self.slots]

    def put(self, arrays: Sequence[Any]) -> None:
        """Copy this rank's arrays into its mailbox; the other ranks see them after the next agreement."""
        for place, array in zip(self.own_arrays[(self._mailboxes.sequence + 1) & 1], arrays):  # noqa: B905
            place[...] = array

    def arrays_of_ranks(self) -> list[list[Array]]:
        """Return each rank's arrays, after the agreement and before the next one."""
        return self.slots[self._mailboxes.sequence & 1]


def fits_mailbox(mailboxes: Mailboxes, layouts: tuple[Layout, ...], readers: int) -> bool:
    """Return whether arrays fit into a mailbox together, if each rank reads the mailboxes of so many ranks."""
    nbytes = sum(aligned(prod(shape) * dtype.itemsize) for dtype, shape in layouts)
    return all(dtype.itemsize for dtype, _ in layouts) and nbytes * max(2, readers) <= 2 * mailboxes.payload_bytes


def in_mailboxes(ranks: Ranks, layouts: tuple[Layout, ...], readers: int) -> MailboxArrays | None:
    """Return arrays in the mailboxes of the ranks; None where they do not fit, see `fits_mailbox`."""
    boxes = ranks.mailboxes
    return MailboxArrays(boxes, layouts) if boxes is not None and fits_mailbox(boxes, layouts, readers) else None


def _arrays_in(memory: Array, layouts: tuple[Layout, ...]) -> list[Array]:
    """Return the arrays that lie one after another in the bytes of a payload, or of each row of `memory`."""
    arrays, start = [], 0
    for dtype, shape in layouts:
        nbytes = prod(shape) * dtype.itemsize
        arrays.append(memory[..., start : start + nbytes].view(dtype).reshape((*memory.shape[:-1], *shape)))
        start += aligned(nbytes)
    return arrays


class MailboxRoute(Transfer):
    """The route of arrays that fit into a mailbox."""

    def __init__(self, mailboxes: Mailboxes, layouts: tuple[Layout, ...], op: ReduceOp) -> None:
        self._mailboxes = mailboxes
        self._combine: Combine = COMBINE[op._on_the_wire]
        self.packs: tuple[Pack, ...] = packs_of(layouts)
        self.writes_targets: bool = any(len(p.members) == 1 and p.nbytes >= _LEAST_DIRECT for p in self.packs)
        layouts = flat_layouts(self.packs)
        arrays = MailboxArrays(mailboxes, layouts)
        divisions = [_division(op, pack, mailboxes.size) for pack in self.packs]
        #: For each slot and pack: the pack, the ranks' arrays, the same as the rows of one array where `combine_rows`
        #: takes them (None on a node of few ranks), and the division of the sum, with memory for the sum.
        self._operands = [
            list(zip(self.packs, zip(*rank_arrays, strict=True), self._rows_of(slot, layouts), divisions, strict=True))
            for rank_arrays, slot in zip(arrays.slots, mailboxes.slots, strict=True)
        ]
        self._places = [
            [place for pack, array in zip(self.packs, packs, strict=True) for place in pack.views(array)]
            for packs in arrays.own_arrays
        ]

    def _rows_of(self, slot: MailboxSlot, layouts: tuple[Layout, ...]) -> Sequence[Array | None]:
        return (
            _arrays_in(slot.rows, layouts)
            if slot.rows is not None and isinstance(self._combine, np.ufunc)
            else [None] * len(layouts)
        )

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> list[Array]:
        """Put this rank's arrays into its mailbox; return memory for the results of each pack."""
        for index, view in self._places[(self._mailboxes.sequence + 1) & 1]:
            view[...] = arrays[index]
        return [np.empty(pack.size, pack.dtype) if targets is None else pack.room(targets) for pack in self.packs]

    @quietly
    def run(self, arrays: Sequence[Any], memory: list[Array]) -> list[Array]:
        """Return the combination of all ranks' arrays, in the memory that was taken."""
        results: list[Any] = [None] * len(arrays)
        combine, operands = self._combine, self._operands[self._mailboxes.sequence & 1]
        # `strict` would take as long as a sum.
        for (pack, parts, rows, quotient), result in zip(operands, memory):  # noqa: B905
            total = result if result.ndim == 1 else result.reshape(-1)
            sums = total if quotient is None or quotient[2] is None else quotient[2]
            if rows is not None:
                combine_rows(combine, rows, sums)
            else:
                combine(parts[0], parts[1], sums)
                for part in parts[2:]:
                    combine(sums, part, sums)
            if quotient is not None:
                divide, operand, _ = quotient
                divide(sums, operand, total)
            pack.unpack(result, results)
        return results

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        return "in the ranks' mailboxes, with the check of the call", ("all into this rank's mailbox",)


def _division(op: ReduceOp, pack: Pack, count: int) -> tuple[Any, Array, Array | None] | None:
    """Return the division of a sum, its operand, and memory for the sum; None for a sum that is the result.

    A division in place takes two and a half times as long for a single number; for large arrays there is no memory.
    """
    divisor = op._divisor(pack.dtype, count)
    if divisor == 1:
        return None
    divide, operand = division(divisor, pack.dtype)
    return divide, np.asarray(operand), np.empty(pack.size, pack.dtype) if pack.size <= FEW_ELEMENTS else None


def combine_rows(combine: Any, rows: Array, total: Array) -> None:
    """Combine the rows of an array in their order.

    NumPy takes one row after the other where a row has several elements.  Single elements it would add up in pairs.
    """
    if total.size == 1:
        total[...] = combine.accumulate(rows[:, 0], dtype=rows.dtype)[-1]
    else:
        combine.reduce(rows, axis=0, dtype=rows.dtype, initial=None, out=total)


def flat_layouts(packs: Sequence[Pack]) -> tuple[Layout, ...]:
    """Return the layouts of packs."""
    return tuple((pack.dtype, (pack.size,)) for pack in packs)


# ------------------------------------------------------------------------------------------------- the first message


def fits_message(message: ControlChannel, layouts: tuple[Layout, ...], op: ReduceOp) -> bool:
    """Return whether the sums of these arrays travel in the first message, which each call has: few floats."""
    are_floats = all(dtype.kind == "f" and dtype.itemsize <= 8 for dtype, _ in layouts)
    return are_floats and op._on_the_wire == "SUM" and sum(prod(shape) for _, shape in layouts) <= len(message.values)


class FirstMessageRoute(Transfer):
    """The route of floats that fit into the first message.

    Args:
        communicator: the ranks.
        message: their first message.
        layouts: of arrays that fit.
        op: SUM or MEAN.
    """

    def __init__(self, communicator: Ranks, message: ControlChannel, layouts: tuple[Layout, ...], op: ReduceOp) -> None:
        self.packs: tuple[Pack, ...] = packs_of(layouts)
        self._divisor = op._divisor(np.dtype(np.float64), communicator.size)
        #: For each array its numbers in the message, their sums, and its dtype on the wire.
        ends = np.cumsum([prod(shape) for _, shape in layouts])
        places = zip(layouts, np.split(message.values, ends), np.split(message.sums, ends), strict=False)
        self._rows: list[tuple[Array, Array, np.dtype[Any]]] = [
            (numbers.reshape(shape), sums.reshape(shape), host_wire_dtype(dtype))
            for (dtype, shape), numbers, sums in places
        ]

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> None:
        """Write this rank's numbers into the message."""
        for (numbers, _, _), array in zip(self._rows, arrays, strict=True):
            numbers[...] = array

    @quietly
    def run(self, arrays: Sequence[Any], memory: None) -> list[Array]:
        """Return the sums, each rounded once to its dtype, in new memory."""
        return [np.asarray(sums / self._divisor, dtype) for _, sums, dtype in self._rows]

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        return "in the first message of the call, with its check", ()
