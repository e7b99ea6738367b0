"""Collectives that treat each array of a nest alike: their base class, and the collectives.

A call checks its arrays and takes memory, which is all that can fail on one rank.  Then the ranks agree on the call,
the data move, and the results are put into a nest like the value.
"""

from __future__ import annotations

import ast
import importlib
import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from numbers import Number
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import (
    array_where_it_is,
    copy_of,
    host_array,
    is_on_device,
    layout_of,
    like_given,
    on_device_of,
    reducible,
)
from mpistrategy.arrays.dtypes import COMBINE, Array, host_wire_dtype, quietly
from mpistrategy.arrays.values import IndexedSlices, contribution, event_of_reads
from mpistrategy.errors import (
    LeafError,
    OptionError,
    OptionTypeError,
    ReduceOpError,
    ShapeError,
    UnsupportedError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.mismatch_report import ASKS
from mpistrategy.mpi.gpu.transports.choice import device_path
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.settings import checked_count, checked_switch
from mpistrategy.options import ReduceOp
from mpistrategy.reduction import gpu
from mpistrategy.reduction.inputs import arrays_of, check_order, in_kind
from mpistrategy.reduction.plan import CallPlan, NestPlan, NumbersOfRanks, carry_out
from mpistrategy.reduction.reducer import General
from mpistrategy.reduction.transfer import Layout, Targets, Transfer, divide, in_mailboxes, layouts_of

Values: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"

#: So much of an array travels by shares at a time; the ranks need twice as much memory besides.
PIECE_BYTES = 8 * 2**20


class Collective(Transfer):
    """How the arrays of a call move, and the signature that the ranks compare first.

    Args:
        ranks: the ranks that take part.
        arrays: this rank's arrays, or arrays like them.
        op: the operation or the argument, in words.

    Attributes:
        verb: the name of the collective.
        op: the argument.
        values: the dtype of each array, and the part of its shape that is equal on all ranks.
    """

    verb: str

    def __init__(self, ranks: Ranks, arrays: Sequence[Any], op: str) -> None:
        self._ranks = ranks
        self.op: str = op
        self.values: Values = tuple(map(layout_of, arrays))

    def signature(self, call: Call, destination: str = "") -> Signature:
        """Return the signature that the ranks compare."""
        return Signature(
            self.verb,
            self.op,
            call.structure,
            self.values,
            destination,
            name=call.name,
            call=call.where,
            place=call.place,
            step=call.step,
        )


def dense(value: Any, where: str) -> Any:
    """Return this rank's value; UnsupportedError for IndexedSlices."""
    component = contribution(value)
    if isinstance(component, IndexedSlices):
        raise UnsupportedError.at(
            where,
            found="IndexedSlices",
            expected="an array",
            fix="Use to_dense(), or give its values and its indices.",
        )
    return component


def move(
    ranks: Ranks,
    collective: Collective,
    arrays: Sequence[Any],
    components: Sequence[Any],
    call: Call,
    destination: str = "",
) -> list[Any]:
    """Return the results of arrays, once all ranks make the same call, with this destination.

    The arrays are those of this rank's `components`, whose memory may be used again after the call; the results are of
    their kinds.
    """
    gpu_arrays = [array for array in arrays if is_on_device(array)]
    if gpu_arrays:
        gpu.prepare(ranks, gpu_arrays, call.where)
    results = carry_out(call, collective, arrays, collective.signature(call, destination))
    ranks.guard.wait_for_gpu(event_of_reads(components))
    return [*map(in_kind, results, components)]


class EachArray(General):
    """A collective that treats each array of a nest alike; a subclass defines `collective`."""

    @abstractmethod
    def collective(self, call: Call, arrays: Sequence[Any], value: Any) -> Collective:
        """Return how arrays like these move, the arrays of a value.

        Raises:
            MpiStrategyError: for arrays that cannot move.
        """

    def checked(self, value: Any, where: str) -> Any:
        """Return this rank's value as an array."""
        return array_where_it_is(dense(value, where), where)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return a nest of the results; see `CallPlan.run`."""
        leaves, structure = nest.flatten_without_none(value)
        call.structure = structure.text
        call.wait_as(self.merged_options.timeout_seconds)
        arrays = [self.checked(leaf, call.where) for leaf in leaves]
        components = [*map(contribution, leaves)]
        return structure.pack(
            move(self.reducer.communicator, self.collective(call, arrays, value), arrays, components, call)
        )

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of a nest of arrays and numbers on the host; None for other nests."""
        where = nest.leaves_of(value)
        leaves = [] if where is None else where.take(value)
        arrays = arrays_of(leaves)
        if where is None or arrays is None or not all(a.dtype.isnative and not a.dtype.hasobject for a in arrays):
            return None
        call.structure, kinds = where.text, {*map(type, leaves)}
        collective, timeout_seconds = self.collective(call, arrays, value), self.merged_options.timeout_seconds
        signature, layouts = collective.signature(call), layouts_of(arrays)
        return NestPlan(self, where, collective, signature, timeout_seconds, kinds, layouts)


# ------------------------------------------------------------------------------------------------- gather


class Gathering(Collective):
    """How the ranks' arrays come together along an axis.

    On a node small arrays lie in the mailboxes, beside the check of the call and their lengths.  Else the ranks learn
    the lengths with the check, and then send the arrays.

    Args:
        ranks: the ranks that take part.
        arrays: this rank's arrays, or arrays like them.
        axes: the axis of each array.
        into: see `gather`.
    """

    verb = "gather"

    def __init__(self, ranks: Ranks, arrays: Sequence[Any], axes: Sequence[int], into: Targets = None) -> None:
        super().__init__(ranks, arrays, f"axis {axes}")
        self._axes, self._into = axes, into
        rows = zip(self.values, axes, strict=True)
        self.values: Values = tuple((name, shape[:axis] + shape[axis + 1 :]) for (name, shape), axis in rows)
        self._lengths = [array.shape[axis] for array, axis in zip(arrays, axes, strict=True)]
        self._own_lengths = np.array(self._lengths, np.int64)
        self.sparingly: bool = not any(map(is_on_device, arrays))
        header, layouts = layouts_of([self._own_lengths]), layouts_of(arrays)
        # The ranks' lengths differ: a rank whose arrays do not fit shows its lengths where the others look for them.
        self._in_mailboxes = (
            in_mailboxes(ranks, header + layouts, ranks.size) or in_mailboxes(ranks, header, ranks.size)
            if self.sparingly
            else None
        )
        if self._in_mailboxes is None:
            self._numbers = NumbersOfRanks(ranks, len(arrays))

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> Any:
        """Give the lengths, and small arrays, before the ranks agree on the call."""
        if self._in_mailboxes is None:
            return self._numbers.bring(self._own_lengths)
        self._in_mailboxes.put([self._own_lengths, *arrays])
        return None

    def run(self, arrays: Sequence[Any], memory: Any) -> list[Array]:
        """Return all ranks' arrays, after the agreement."""
        if self._in_mailboxes is None:
            lengths = self._numbers.numbers_of_ranks(memory).astype(np.int64)
        else:
            arrays_of_ranks = self._in_mailboxes.arrays_of_ranks()
            lengths = np.array([own_arrays[0] for own_arrays in arrays_of_ranks])
            if len(arrays_of_ranks[0]) > 1 and lengths.tolist() == [self._lengths] * len(arrays_of_ranks):
                return [*map(np.concatenate, [*zip(*arrays_of_ranks, strict=True)][1:], self._axes)]
        blocks = [np.moveaxis(array, axis, 0) for array, axis in zip(arrays, self._axes, strict=True)]
        gathered = gather_all(self._ranks, list(zip(blocks, lengths.T.tolist(), strict=True)), self._into)
        if not any(self._axes):
            return gathered
        return self._ranks.guard.on_all(lambda: [*map(_moved_back, gathered, self._axes)])


def _moved_back(array: Any, axis: int) -> Any:
    """Return an array with its first axis where it was, contiguous."""
    result = np.moveaxis(array, 0, axis)
    return result if result.flags.c_contiguous else copy_of(result)


def gather(ranks: Ranks, values: Sequence[Any], axis: int, call: Call, into: Targets = None) -> list[Any]:
    """Return each array of all ranks, concatenated along `axis`, in the kinds of this rank's values.

    Args:
        ranks: the ranks that take part.
        values: this rank's arrays, equal on all ranks in dtypes and shapes, but for the length along `axis`.
        axis: from 0 on.
        call: the guard's call that all ranks make.
        into: memory for each result on the host, or None: used where that saves a copy, and if `axis` is 0.
    """
    arrays = [array_where_it_is(value, call.where) for value in values]
    return move(ranks, Gathering(ranks, arrays, [axis] * len(arrays), into), arrays, values, call)


class Gather(EachArray):
    """`all_gather` and `gather` of any nest of arrays; the argument is the axis."""

    def collective(self, call: Call, arrays: Sequence[Any], value: Any) -> Collective:
        axes = [checked_axis(self.argument, array.ndim, call.where) for array in arrays]
        return Gathering(self.reducer.communicator, arrays, axes)


def checked_axis(axis: Any, ndim: int, where: str) -> int:
    """Return `axis` as an index from 0 on.

    Raises:
        OptionTypeError: when it is not an int.
        ShapeError: when there is no such axis.
    """
    if axis is None:
        raise ShapeError.at(where, found="axis=None", expected="an int", fix="Pass axis=0 for the first axis.")
    try:
        index = operator.index(axis)
    except TypeError as error:
        raise OptionTypeError.at(where, found=f"axis={axis!r}", expected="an int") from error
    if not -ndim <= index < ndim:
        expected = "an array with at least one axis" if ndim == 0 else f"an axis from {-ndim} to {ndim - 1}"
        fix = "Make it an array of one element first: np.atleast_1d(x)." if ndim == 0 else ""
        raise ShapeError.at(where, found=f"axis={index} of an array with {ndim} axes", expected=expected, fix=fix)
    return index % ndim


# ------------------------------------------------------------------------------------------------- scan


def room_for_shares(ranks: Ranks, flat: Array) -> tuple[Array, Array]:
    """Return the send and the receive buffer of `by_shares`: a row for each rank."""
    length = min(flat.size, max(1, PIECE_BYTES // flat.itemsize))
    shape = ranks.size, -(-length // ranks.size)
    return np.zeros(shape, flat.dtype), np.zeros(shape, flat.dtype)


def by_shares(ranks: Ranks, flat: Array, memory: tuple[Array, Array], work: Callable[[Array], object]) -> None:
    """Let each rank work on all ranks' values of its share of an array, piece by piece.

    `work` gets a row of each rank, in rank order, and writes that rank's results into it.  Each number travels twice,
    however many ranks there are.
    """
    send_buffer, receive_buffer = memory
    for start in range(0, flat.size, max(1, send_buffer.size)):
        piece = flat[start : start + send_buffer.size]
        send_buffer.reshape(-1)[: piece.size] = piece
        ranks.alltoall(send_buffer, receive_buffer)
        work(receive_buffer)
        ranks.alltoall(receive_buffer, send_buffer)
        piece[...] = send_buffer.reshape(-1)[: piece.size]


class Scanning(Collective):
    """The scan of arrays on the host, by shares.

    Args:
        ranks: the ranks that take part.
        arrays: this rank's arrays, or arrays like them.
        op: how they are combined.
        exclusive: whether a rank's own value is left out.
    """

    verb = "scan"

    def __init__(self, ranks: Ranks, arrays: Sequence[Array], op: ReduceOp, *, exclusive: bool) -> None:
        super().__init__(ranks, arrays, f"{op.value}, exclusive" if exclusive else op.value)
        self._op, self._is_exclusive = op, exclusive

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Copy the arrays in the dtype of the sum; take memory for messages, and for results that are rounded."""
        totals = [np.array(array, host_wire_dtype(array.dtype), order="C") for array in arrays]
        results = [t if t.dtype == a.dtype else np.empty(a.shape, a.dtype) for t, a in zip(totals, arrays, strict=True)]
        return totals, results, [room_for_shares(self._ranks, total) for total in totals]

    @quietly
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the scans."""
        totals, results, rooms = memory
        for total, result, room in zip(totals, results, rooms, strict=True):
            by_shares(self._ranks, total.reshape(-1), room, self._scan)
            if result is not total:
                result[...] = total
        return list(results)

    def _scan(self, rows: Array) -> None:
        for before, row in pairwise(rows):
            COMBINE[self._op.value](before, row, out=row)
        if self._is_exclusive:
            rows[1:] = rows[:-1].copy()
            rows[0] = identity(rows.dtype, self._op)


class Scan(EachArray):
    """`ReplicaContext.scan`; the argument is the operation, whether it is exclusive, and the type of that flag."""

    def checked(self, value: Any, where: str) -> Any:
        return host_array(reducible(dense(value, where), where), where)

    def collective(self, call: Call, arrays: Sequence[Any], value: Any) -> Collective:
        reduce_op, is_exclusive, _ = self.argument
        op, where = ReduceOp._parse(reduce_op, call.where), call.where
        if op is ReduceOp.MEAN:
            raise ReduceOpError.at(
                where,
                found="MEAN",
                expected="SUM, MIN, MAX or PROD",
                fix="A mean of the first ranks has another divisor on each rank: divide a SUM by rank + 1.",
            )
        exclusive = checked_switch(where, "exclusive", is_exclusive)
        for array in arrays:
            check_order(reducible(array, where).dtype, op, where)
        return Scanning(self.reducer.communicator, arrays, op, exclusive=exclusive)


def identity(dtype: np.dtype[Any], op: ReduceOp) -> Any:
    """Return the identity element of SUM, PROD, MIN or MAX for numbers of this dtype."""
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 1 if op is ReduceOp.PROD else 0
    least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-np.inf, np.inf)
    return most if op is ReduceOp.MIN else least


# ------------------------------------------------------------------------------------------------- reduce-scatter


class Scattered(General):
    """`reduce_scatter`: each rank's part of an all-reduce; the `out` of its calls is the axis."""

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return this rank's parts; see `CallPlan.run`."""
        leaves, structure = nest.flatten_without_none(value)
        components = [dense(leaf, call.where) for leaf in leaves]
        axes = [checked_axis(out, reducible(component, call.where).ndim, call.where) for component in components]
        call.structure = f"{structure.text} along axis {', '.join(map(str, axes))}"
        op, paths = ReduceOp._parse(self.argument, call.where), partial(nest.leaf_paths, value)
        results = self.reducer.all_reduce_leaves(
            call, op, leaves, paths, options=self.options, num_none=structure.num_none
        )
        return structure.pack([*map(self._own_part, results, axes, components)])

    def _own_part(self, result: Any, axis: int, component: Any) -> Any:
        """Return a copy of this rank's part of a reduced array, in the kind of array of the input."""
        ranks, array = self.reducer.communicator, reducible(result, "ReplicaContext.reduce_scatter")
        step = -(-array.shape[axis] // ranks.size)
        part = slice(ranks.rank * step, (ranks.rank + 1) * step)
        return like_given(copy_of(array[(slice(None),) * axis + (part,)]), component)


# ------------------------------------------------------------------------------------------------- IndexedSlices


def concatenate(communicator: Ranks, slices: IndexedSlices, op: ReduceOp, call: Call) -> IndexedSlices:
    """Return all ranks' slices in rank order, on every rank; MEAN divides the values by the number of ranks."""
    call.expect_more()
    values, indices = gather(communicator, [slices.values, slices.indices], 0, call)
    if op is ReduceOp.MEAN:
        values = communicator.guard.on_all(lambda: divide(values, communicator.size))
    return IndexedSlices(values, indices, slices.dense_shape)


def gather_all(communicator: Ranks, blocks: Sequence[tuple[Array, list[int]]], into: Targets = None) -> list[Array]:
    """Return, for each (block, rows), the blocks of all ranks along the first axis.  Collective.

    ``rows[r]`` is the length of rank r's block.  Results on the host are in the memory of `into`, which may have the
    blocks, where it has memory of that size.  If a rank has no memory for the result, all ranks raise.
    """
    targets = [None] * len(blocks) if into is None else into
    rooms = communicator.guard.on_all(lambda: [*map(partial(_room, communicator), blocks, targets)])
    for (block, rows), (own_block, result) in zip(blocks, rooms, strict=True):
        counts = [count * prod(block.shape[1:]) for count in rows]
        if not is_on_device(result):
            communicator.allgatherv(own_block, counts, result)
        elif result.size:
            with on_device_of(result):
                device_path(communicator).allgather(communicator, own_block, counts, result.reshape(-1))
    return [result for _, result in rooms]


def _room(communicator: Ranks, block_and_rows: tuple[Array, list[int]], target: Array | None) -> tuple[Array, Array]:
    """Return a block, contiguous, and memory for the blocks of all ranks."""
    block, rows = block_and_rows
    if is_on_device(block):
        return gpu.room_for_rows(communicator, block, rows)
    shape = (sum(rows), *block.shape[1:])
    fits = target is not None and (target.shape, target.dtype) == (shape, block.dtype)
    memory: Array = target if target is not None and fits else np.empty(shape, block.dtype)
    return block.copy() if np.may_share_memory(block, memory) else np.ascontiguousarray(block), memory


# ------------------------------------------------------------------------------------------------- broadcast


def broadcast(
    ranks: Ranks, values: Sequence[Any], root: int, call: Call, destination: str = "", *, in_place: bool = False
) -> list[Any]:
    """Return rank `root`'s values, in the kinds of this rank's values.  Arrays in GPU memory stay there.

    Args:
        ranks: the ranks that take part.
        values: this rank's arrays and numbers, of any dtype of fixed size; dtypes and shapes are equal on all ranks.
        root: the rank that sends its values.
        call: the guard's call that all ranks make.
        destination: of the results, as the ranks compare it.
        in_place: whether a contiguous value on the host may itself be the result.

    Raises:
        LeafError, DTypeError: for values that are not arrays of a fixed size.
        UnsupportedError: for IndexedSlices.
    """
    components = [dense(value, call.where) for value in values]
    arrays = [array_where_it_is(value, call.where) for value in components]
    return move(ranks, FromRoot(ranks, arrays, root, in_place=in_place), arrays, components, call, destination)


class FromRoot(Collective):
    """How one rank's arrays come to all ranks.

    On a node small arrays on the host lie in its mailbox, beside the check of the call; else MPI sends them after it.

    Args:
        ranks: the ranks that take part.
        arrays: this rank's arrays, or arrays like them.
        root: the rank that sends its arrays.
        structure: returns the structure of their nest, for ranks that ask for it.
        in_place: whether contiguous arrays on the host may themselves be the results.

    Attributes:
        structure: the argument.
    """

    verb = "broadcast"
    sparingly = False

    def __init__(
        self,
        ranks: Ranks,
        arrays: Sequence[Any],
        root: int,
        structure: Callable[[], str] = str,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(ranks, arrays, f"from rank {root}")
        self._root, self._in_place = root, in_place
        self.structure: Callable[[], str] = structure
        on_host = not any(map(is_on_device, arrays))
        self._in_mailboxes = in_mailboxes(ranks, layouts_of(arrays), 2) if on_host else None

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> Any:
        """Copy the arrays, before the ranks agree on the call; return memory for the results."""
        if self._in_mailboxes is not None:
            if self._ranks.rank == self._root:
                self._in_mailboxes.put(arrays)
            return None
        return [
            gpu.copy_in_memory(a)
            if is_on_device(a)
            else a
            if self._in_place and a.flags.c_contiguous
            else np.array(a, order="C")
            for a in arrays
        ]

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the root's arrays, after that."""
        if self._in_mailboxes is not None:
            return [*map(np.array, self._in_mailboxes.arrays_of_ranks()[self._root])]
        for result in memory:
            if not is_on_device(result):
                self._ranks.bcast(result, self._root)
            elif result.size:
                with result.device:
                    device_path(self._ranks).bcast(self._ranks, result.reshape(-1), self._root)
        return list(memory)

    def answer(self) -> None:
        """Send the root's structure."""
        structure_of(self._ranks, self._root, self.structure)
        self._ranks.guard.agreed = False  # there is one more agreement


class Broadcast(EachArray):
    """`Strategy.broadcast` of any nest; the argument is the root."""

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the root's values; see `CallPlan.run`.  A rank without a value asks the root for its structure."""
        ranks, where = self.reducer.communicator, call.where
        root = checked_root(self.argument, ranks.size, where)
        if value is None:
            if ranks.rank == root:
                raise LeafError.at(
                    where,
                    found=f"the value None on the root, rank {root}",
                    expected="a value there; the other ranks may give None",
                )
            call.structure = ASKS
            call.agree("broadcast", op=f"from rank {root}")
            text = structure_of(ranks, root)
            call.expect_more()
            value = described(text)
        return super().run(call, value, out, weight)

    def collective(self, call: Call, arrays: Sequence[Any], value: Any) -> FromRoot:
        ranks, (leaves, structure) = self.reducer.communicator, nest.flatten_without_none(value)
        kinds = [*map(type, map(contribution, leaves))]  # a plan keeps no values
        describe = partial(description, structure, layouts_of(arrays), kinds, call.where)
        return FromRoot(ranks, arrays, checked_root(self.argument, ranks.size, call.where), describe)


def structure_of(ranks: Ranks, root: int, describe: Callable[[], str] = str) -> str:
    """Return the description of rank `root`'s nest, on ranks that have agreed to exchange it."""
    return ranks.allgather_text(ranks.guard.on_all(describe if ranks.rank == root else str))[root]


def description(structure: nest.Structure, layouts: Sequence[Layout], kinds: Sequence[type], where: str) -> str:
    """Return the structure, the dtypes and the shapes of a nest as a text, from which other ranks make a nest like it.

    Args:
        structure: of the nest.
        layouts: the dtype and the shape of each leaf.
        kinds: the type of each leaf.
        where: the public name in the error.

    Raises:
        UnsupportedError: for containers other than dict, list and tuple, for keys that are no plain values, and for
            arrays of other libraries, on GPUs, and with fields.
    """
    try:
        text = repr((structure.pack(range(len(layouts))), [*map(_layout, layouts, kinds)]))
        if nest.flatten_without_none(ast.literal_eval(text)[0])[1] == structure:
            return text
    except (SyntaxError, TypeError, ValueError):  # no literals
        pass
    raise UnsupportedError.at(
        where,
        found=f"a nest {structure.text:.200}, and None on other ranks",
        expected="numbers and NumPy arrays in dict, list and tuple, whose structure is sent to ranks that give None",
        fix="Give every rank a value of this structure; only the root's numbers matter.",
    )


def _layout(layout: Layout, kind: type) -> tuple[str, tuple[int, ...], bool]:
    """Return the name of the dtype of a leaf, its shape, and whether it is a number."""
    (dtype, shape), is_number = layout, issubclass(kind, (np.generic, Number)) and not issubclass(kind, bool)
    if dtype.names is not None or not (is_number or issubclass(kind, (np.ndarray, bool, str, bytes))):
        raise TypeError
    return dtype.name if dtype.type.__module__ == "ml_dtypes" else dtype.newbyteorder("=").str, shape, is_number


def described(text: str) -> Any:
    """Return a nest of zeros with the structure of a description."""
    skeleton, layouts = ast.literal_eval(text)
    return nest.flatten_without_none(skeleton)[1].pack([_zeros(*layout) for layout in layouts])


def _zeros(name: str, shape: tuple[int, ...], is_number: bool) -> Any:
    # The root has ml_dtypes; it is imported here, for the quick import.
    zeros = np.zeros(shape, name if name[0] in "<>|=" else getattr(importlib.import_module("ml_dtypes"), name))
    return zeros[()] if is_number else zeros


def checked_root(root: Any, size: int, where: str, name: str = "root") -> int:
    """Return `root` as a rank.

    Raises:
        OptionTypeError, OptionError: when it is not a rank.
    """
    rank = checked_count(where, name, root, least=None)
    if not 0 <= rank < size:
        raise OptionError.at(where, found=f"{name}={rank}", expected=f"a rank from 0 to {size - 1}")
    return rank
