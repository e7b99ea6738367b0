"""Broadcast: one rank's arrays on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import array_where_it_is, is_on_device, like_given
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.gpu import check_device, layout_of
from mpistrategy.arrays.values import IndexedSlices, contribution, event_of_reads
from mpistrategy.errors import OptionError, OptionTypeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory.segments import aligned

#: Arrays that are smaller share a message.
_SMALL_BYTES = 64 * 2**10


def broadcast(
    communicator: Communicator, values: Sequence[Any], root: int, call: Call, destination: str = ""
) -> list[Any]:
    """Return rank `root`'s value of each of `values`, of the kind that was given.  Arrays in GPU memory stay there.

    Args:
        communicator: the ranks.
        values: this rank's arrays, numbers or containers, of any dtype of fixed size; dtypes and shapes are equal on
            all ranks.
        root: whose values they get.
        call: the guard's call that all ranks make.
        destination: of the results, as the ranks compare it.

    Raises:
        LeafError, DTypeError: for what is not an array of a fixed size.
        UnsupportedError: for IndexedSlices.
    """
    given = [contribution(value) for value in values]
    if any(isinstance(value, IndexedSlices) for value in given):
        raise UnsupportedError.at(
            call.where, found="IndexedSlices", expected="an array", fix="Broadcast its values and indices."
        )
    arrays = [array_where_it_is(value, call.where) for value in given]
    placed = [array for array in arrays if is_on_device(array)]
    layouts = tuple(layout_of(each) if is_on_device(each) else (dtype_name(each.dtype), each.shape) for each in arrays)
    # Before the agreement: short memory must show while all ranks can still raise.
    messages, on_host = _packed([array for array in arrays if not is_on_device(array)])
    if placed:
        from mpistrategy.reduction.routes import on_device  # here, for the quick import

        check_device(placed, gpu_of(communicator.devices, communicator.rank), call.where)
        on_device.prepare(communicator, placed, call.where)
        memory, copies = on_device.packed(placed)
    sparingly = not placed
    call.agree("broadcast", op=f"from rank {root}", values=layouts, destination=destination, sparingly=sparingly)
    for message in messages:
        communicator.bcast(message, root)
    if placed:
        read = event_of_reads(given)
        on_device.bcast(communicator, memory, root)
    if placed:
        communicator.guard.wait_for_gpu(read)
    results = [copies.pop(0) if is_on_device(array) else on_host.pop(0) for array in arrays]
    return [like_given(result, value) for result, value in zip(results, given, strict=True)]


def checked_root(root: Any, size: int, where: str) -> int:
    """Return `root` as a rank.

    Raises:
        OptionTypeError, OptionError: when it is none.
    """
    expected = f"a rank from 0 to {size - 1}"
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)):
        raise OptionTypeError.at(where, found=f"root={root!r}", expected=expected)
    if not 0 <= root < size:
        raise OptionError.at(where, found=f"root={root}", expected=expected)
    return int(root)


def _packed(arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Return buffers to send, the small arrays in one, with copies of the arrays; and the copies, in their order."""
    small = [array for array in arrays if array.nbytes < _SMALL_BYTES]
    together = np.empty(sum(aligned(array.nbytes) for array in small), np.uint8)
    messages, results, start = [], [], 0
    for array in arrays:
        if array.nbytes < _SMALL_BYTES and len(small) > 1:
            copy: Array = np.ndarray(array.shape, array.dtype, together.data, start)
            start += aligned(array.nbytes)
            copy[...] = array
        else:
            copy = np.array(array, order="C", copy=True)
            messages.append(copy)
        results.append(copy)
    return [*messages, together] if start else messages, results
