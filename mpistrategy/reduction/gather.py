"""Gather: the replicas' arrays side by side along one axis, in rank order, on every rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import array_where_it_is, is_on_device, like_given, on_device_of
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.gpu import check_device, layout_of
from mpistrategy.arrays.values import IndexedSlices, contribution, event_of_reads
from mpistrategy.errors import OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.reduction.inputs import is_plain_array
from mpistrategy.reduction.layout.packing import Layout, layouts_of
from mpistrategy.reduction.plan import NumbersOfRanks, Transfer
from mpistrategy.reduction.plans import NestPlan
from mpistrategy.reduction.reducer import EachArray
from mpistrategy.reduction.routes import on_device
from mpistrategy.reduction.routes.base import CallPlan, Targets
from mpistrategy.reduction.routes.mailboxes import MailboxArrays
from mpistrategy.reduction.sparse import gather_all

_Values: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"


class Gathering(Transfer):
    """How the ranks' arrays come together along an axis.

    On a node small arrays lie in the mailboxes, beside the check of the call and their lengths.  Else the ranks learn
    the lengths with the check, and then send the arrays.

    Args:
        communicator: the ranks.
        layouts: dtype and shape of each of this rank's arrays.
        axes: along which axis each comes together.
        on_host: whether all of them are there.
        into: see `gather`.
    """

    def __init__(
        self,
        communicator: Ranks,
        layouts: tuple[Layout, ...],
        axes: Sequence[int],
        *,
        on_host: bool,
        into: Targets = None,
    ) -> None:
        self._communicator, self._axes, self._into = communicator, axes, into
        self.layouts: tuple[Layout, ...] = layouts
        self._lengths = [shape[axis] for (_, shape), axis in zip(layouts, axes, strict=True)]
        self._mine = np.array(self._lengths, np.int64)
        header, boxes = ((self._mine.dtype, self._mine.shape),), communicator.mailboxes
        #: Whether this rank's arrays lie in its mailbox.
        self._fits = False
        self._in_mailboxes: MailboxArrays | None = None
        if boxes is not None and MailboxArrays.has_room(boxes, header, boxes.size):
            self._fits = on_host and MailboxArrays.has_room(boxes, header + layouts, boxes.size)
            self._in_mailboxes = MailboxArrays(boxes, header + layouts if self._fits else header)
        else:
            self._numbers = NumbersOfRanks(communicator, len(layouts))

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> Any:
        """Do what must be done before the ranks agree on the call.

        Returns:
            Memory for the lengths; of small arrays for the results, if all ranks have as many as this one.
        """
        if self._in_mailboxes is None:
            return self._numbers.bring(self._mine)
        self._in_mailboxes.put([self._mine, *arrays])
        return [
            np.empty((*shape[:axis], self._communicator.size * shape[axis], *shape[axis + 1 :]), dtype)
            for (dtype, shape), axis in zip(self.layouts if self._fits else (), self._axes, strict=False)
        ]

    def run(self, arrays: Sequence[Any], memory: Any) -> list[Array]:
        """Return all ranks' arrays, after the agreement."""
        if self._in_mailboxes is None:
            lengths = self._numbers.found(memory).astype(np.int64)
        else:
            seen = self._in_mailboxes.seen()
            if self._fits and all(theirs[0].tolist() == self._lengths for theirs in seen):
                for number, (result, axis) in enumerate(zip(memory, self._axes, strict=True), 1):
                    np.concatenate([theirs[number] for theirs in seen], axis, out=result)
                results: list[Array] = memory
                return results
            lengths = np.array([theirs[0] for theirs in seen])
        moved = [_moved(array, axis, 0) for array, axis in zip(arrays, self._axes, strict=True)]
        gathered = gather_all(self._communicator, list(zip(moved, lengths.T.tolist(), strict=True)), self._into)
        if not any(self._axes):
            return gathered
        both = list(zip(gathered, self._axes, strict=True))
        return self._communicator.guard.on_all(lambda: [_contiguous(_moved(array, 0, axis)) for array, axis in both])


def _compared(layouts: Sequence[tuple[str, tuple[int, ...]]], axes: Sequence[int]) -> _Values:
    """Return what must be equal on all ranks: dtypes, and shapes without the axis along which arrays are gathered."""
    return tuple((name, shape[:axis] + shape[axis + 1 :]) for (name, shape), axis in zip(layouts, axes, strict=True))


def gather(communicator: Ranks, values: Sequence[Any], axis: Any, call: Call, into: Targets = None) -> list[Array]:
    """Return, for each of the values, all ranks' arrays concatenated along `axis`; arrays in GPU memory stay there.

    Args:
        communicator: the ranks.
        values: this rank's arrays; dtypes and all axes but `axis` are equal on all ranks, the length along `axis` may
            differ and may be 0.
        axis: an int; negative counts from the end.
        call: the guard's call that all ranks make.
        into: memory for each result on the host, or None: used where that saves a copy, and if `axis` is 0.

    Raises:
        ShapeError: for scalars and for an axis out of range.
        OptionTypeError: for an axis that is not an int.
        UnsupportedError: for IndexedSlices.
    """
    arrays = [_checked(value, call.where) for value in values]
    axes = [checked_axis(axis, array.ndim, call.where) for array in arrays]
    placed = [array for array in arrays if is_on_device(array)]
    if placed:
        check_device(placed, gpu_of(communicator.devices, communicator.rank), call.where)
        on_device.prepare(communicator, placed, call.where)
    compared = _compared([_layout(array) for array in arrays], axes)
    way = Gathering(communicator, layouts_of(arrays), axes, on_host=not placed, into=into)
    agree = partial(call.agree, "gather", op=f"axis {axes}", values=compared, sparingly=not placed)
    gathered = way.carried_out(arrays, agree)
    if placed:
        communicator.guard.wait_for_gpu(event_of_reads(map(contribution, values)))
    return [like_given(result, contribution(value)) for result, value in zip(gathered, values, strict=True)]


class Gather(EachArray):
    """`all_gather` and `gather` of any nest of arrays; the argument is the axis."""

    def made(self, call: Call, mine: Sequence[Any]) -> list[Any]:
        """Return all ranks' arrays; see `EachArray.made`."""
        return gather(self.reducer.communicator, mine, self.argument, call)

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of a nest of NumPy's arrays; None for others."""
        where = nest.leaves_of(value)
        arrays = [] if where is None else where.take(value)
        if where is None or not nest.only_text_keys(value) or not all(map(is_plain_array, arrays)):
            return None
        ranks, axes = self.reducer.communicator, [checked_axis(self.argument, each.ndim, call.where) for each in arrays]
        compared = _compared([_layout(array) for array in arrays], axes)
        signature = Signature(
            *("gather", f"axis {axes}", where.text, compared, "", "", call.name, call.where, call.place)
        )
        transfer, kinds = Gathering(ranks, layouts_of(arrays), axes, on_host=True), {*map(type, arrays)}
        return NestPlan(self, where, transfer, signature, kinds=kinds, timeout=self.timeout)


def _checked(value: Any, where: str) -> Any:
    value = contribution(value)
    if isinstance(value, IndexedSlices):
        raise UnsupportedError.at(
            where, found="IndexedSlices", expected="an array", fix="Gather its values and indices."
        )
    return array_where_it_is(value, where)


def _layout(array: Any) -> tuple[str, tuple[int, ...]]:
    return layout_of(array) if is_on_device(array) else (dtype_name(array.dtype), array.shape)


def _moved(array: Any, source: int, target: int) -> Any:
    """Return an array with one axis moved; what `numpy.moveaxis` does, in GPU memory too."""
    axes = [axis for axis in range(array.ndim) if axis != source]
    return array.transpose([*axes[:target], source, *axes[target:]])


def _contiguous(array: Any) -> Any:
    with on_device_of(array):
        return array if array.flags.c_contiguous else array.copy()


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
