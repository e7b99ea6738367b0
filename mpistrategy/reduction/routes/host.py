"""The routes of arrays on the host: with the check of the call, or through the communicator.

On one node each rank writes small arrays into its mailbox, next to the digest of its call.  When all digests are equal,
all data are there, too, and every rank adds them up in rank order: the same bits everywhere.

Between nodes a few sums go in the first message, which compares the calls.  Each number travels as float64 and is added
up by MPI; a complex one as two.  An integer travels as two halves of 32 bits, so that sums are exact, and wrap around
as NumPy's do.

Other arrays go through the communicator: small arrays are packed, large arrays go as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, Combine, divide_by, division, host_wire_dtype, is_buffer, quietly
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import Wire, between_nodes
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, MailboxSlot
from mpistrategy.mpi.shared_memory.node_sum import LEAST_BYTES, Combination, in_rank_order
from mpistrategy.mpi.shared_memory.segments import aligned
from mpistrategy.mpi.tuning.thresholds import RouteName
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.transfer import Layout, Pack, Targets, Transfer, Way, copies_of, packs_of

#: Writes the combination of a source into its target, which may be the source itself: flat arrays of one dtype.
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
        self._node = ranks.node_sum if "node_sum" in map(self._name_of, packs) else None
        self._divisors = {pack.dtype: op._divisor(pack.dtype, ranks.size) for pack in packs}

    def _name_of(self, pack: Pack) -> RouteName:
        """Return the name of the way that a pack takes."""
        if self._name is not None:
            return self._name
        if self._dtype_between_nodes(pack.dtype) is not None:
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
            first, is_lone = pack.members[0], len(pack.members) == 1
            array = arrays[first.index]
            travels = is_lone and array.dtype == pack.dtype and is_buffer(array)
            target = targets[first.index] if travels and targets is not None else None
            if target is None or target.dtype != pack.dtype:
                target = make(first.shape if is_lone else (pack.size,), pack.dtype)
            source = array.reshape(-1) if travels else pack.fill(arrays, target.reshape(-1))
            memory.append((source, target))
        return memory

    @quietly
    def run(self, arrays: Sequence[Array], memory: list[tuple[Array, Array]]) -> list[Array]:
        """Return the combinations, in the memory that was taken."""
        pairs: dict[np.dtype[Any], list[tuple[Array, Array]]] = {}
        for pack, (source, target) in zip(self.packs, memory, strict=True):
            if pack.size:
                pairs.setdefault(pack.dtype, []).append((source, target.reshape(-1)))
        for dtype, pairs_of_dtype in pairs.items():
            self._combine(dtype, pairs_of_dtype)
        results: list[Any] = [None] * len(arrays)
        for pack, (_, target) in zip(self.packs, memory, strict=True):
            pack.unpack(target, results)
        return results

    def _combine(self, dtype: np.dtype[Any], pairs: Sequence[tuple[Array, Array]]) -> None:
        wire, divisor = self._dtype_between_nodes(dtype), self._divisors[dtype]
        if self._node is not None and self._reduce_pair is None:
            self._node.run(pairs, self._text, divisor, self._combination)
            return
        for source, target in pairs:
            if self._reduce_pair is not None:
                self._reduce_pair(source, target)
            else:
                self._ranks.allreduce(target, self._text, source, by_lanes=self._name == "lanes", wire=wire)
            divide_by(divisor, target)

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        name, copies, wire = self._name_of(pack), copies_of(pack, arrays), self._dtype_between_nodes(pack.dtype)
        stays = name == "node_sum" and pack.nbytes >= LEAST_BYTES
        text, more = _WAYS["node_results" if stays else name]
        text = text if wire is None else f"{text}, as {wire.name} between them"
        return text, (copies or more) if name in ("root", "none") else copies + more

    def _dtype_between_nodes(self, dtype: np.dtype[Any]) -> Wire:
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
        is_quick = slot.rows is not None and isinstance(self._combine, np.ufunc)
        return _arrays_in(slot.rows, layouts) if is_quick and slot.rows is not None else [None] * len(layouts)

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> list[Array]:
        """Put this rank's arrays into its mailbox; return memory for the results of each pack."""
        for index, view in self._places[(self._mailboxes.sequence + 1) & 1]:
            view[...] = arrays[index]
        return [np.empty(pack.size, pack.dtype) for pack in self.packs]

    def run(self, arrays: Sequence[Any], memory: list[Array]) -> list[Array]:
        """Return the combination of all ranks' arrays, in the memory that was taken."""
        results: list[Any] = [None] * len(arrays)
        combine, operands = self._combine, self._operands[self._mailboxes.sequence & 1]
        with np.errstate(all="ignore"):
            # `strict` would take as long as a sum.
            for (pack, parts, rows, quotient), total in zip(operands, memory):  # noqa: B905
                sums = total if quotient is None else quotient[2]
                if rows is not None:
                    combine_rows(combine, rows, sums)
                else:
                    combine(parts[0], parts[1], out=sums)
                    for part in parts[2:]:
                        combine(sums, part, out=sums)
                if quotient is not None:
                    divide, operand, _ = quotient
                    divide(sums, operand, total)
                pack.unpack(total, results)
        return results

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        return "in the ranks' mailboxes, with the check of the call", ("all into this rank's mailbox",)


def _division(op: ReduceOp, pack: Pack, count: int) -> tuple[Any, Array, Array] | None:
    """Return the division of a sum, its operand, and memory for the sum; None for a sum that is the result.

    A division in place takes two and a half times as long for a single number.
    """
    divisor = op._divisor(pack.dtype, count)
    if divisor == 1:
        return None
    divide, operand = division(divisor, pack.dtype)
    return divide, np.asarray(operand), np.empty(pack.size, pack.dtype)


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


_LOW, _HALF = 0xFFFFFFFF, 32


#: How many float64 carry one element exactly, by the kind of its dtype; and the most bytes of such an element.
_NUMBERS = {"f": (1, 8), "c": (2, 16), "i": (2, 8), "u": (2, 8)}


def _numbers_of(dtype: np.dtype[Any]) -> float:
    """Return how many float64 carry one element exactly; infinity for dtypes that do not travel so."""
    count, most_bytes = _NUMBERS.get(dtype.kind, (1, 0))
    return count if dtype.itemsize <= most_bytes else math.inf


def fits_message(message: ControlChannel, layouts: tuple[Layout, ...], op: ReduceOp) -> bool:
    """Return whether the sums of these arrays travel in the first message, which each call has."""
    count = sum(_numbers_of(dtype) * prod(shape) for dtype, shape in layouts)
    return op._on_the_wire == "SUM" and count <= len(message.values)


class FirstMessageRoute(Transfer):
    """The route of arrays whose numbers fit into the first message.

    Args:
        communicator: the ranks.
        message: their first message.
        layouts: of arrays that fit.
        op: SUM or MEAN.
    """

    def __init__(self, communicator: Ranks, message: ControlChannel, layouts: tuple[Layout, ...], op: ReduceOp) -> None:
        self.packs: tuple[Pack, ...] = packs_of(layouts)
        #: For each array its numbers in the message, their sums, its dtype on the wire, and the divisor of MEAN.
        self._rows: list[tuple[Array, Array, np.dtype[Any], int]] = []
        start = 0
        for dtype, shape in layouts:
            stop = start + int(_numbers_of(dtype)) * prod(shape)
            kind: Any = np.complex128 if dtype.kind == "c" else np.float64
            full = (2, *shape) if dtype.kind in "iu" else shape
            numbers, sums = (values[start:stop].view(kind).reshape(full) for values in (message.values, message.sums))
            wire, start = host_wire_dtype(dtype), stop
            self._rows.append((numbers, sums, wire, op._divisor(wire, communicator.size)))

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> None:
        """Write this rank's numbers into the message."""
        for (numbers, _, dtype, _), array in zip(self._rows, arrays, strict=True):
            if dtype.kind in "iu":
                number = np.asarray(array).astype(np.uint64)
                numbers[0], numbers[1] = number & np.uint64(_LOW), number >> np.uint64(_HALF)
            else:
                numbers[...] = array

    @quietly
    def run(self, arrays: Sequence[Any], memory: None) -> list[Array]:
        """Return the sums, each rounded once to its dtype, in new memory."""
        return [_read(sums, dtype, divisor) for _, sums, dtype, divisor in self._rows]

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        return "in the first message of the call, with its check", ()


def _read(sums: Array, dtype: np.dtype[Any], divisor: int) -> Array:
    if dtype.kind in "iu":
        low, high = sums.astype(np.uint64)
        return np.asarray(low + (high << np.uint64(_HALF))).astype(dtype)
    total = sums.copy()
    divide_by(divisor, total)
    return total.astype(dtype)
