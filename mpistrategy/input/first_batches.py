"""The check that the ranks iterate over the same global batches: it compares the first batches.

Structures, dtypes and shapes are compared as in any call.  Of the rows each rank sends a digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import to_array
from mpistrategy.arrays.digests import digest, outliers
from mpistrategy.arrays.dtypes import dtype_name
from mpistrategy.errors import CollectiveMismatchError, DatasetWarning, MpiStrategyError
from mpistrategy.input.datasets import common_length, to_rows
from mpistrategy.input.iterators import END
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.interface.ranks import Ranks

LEVELS = ("warn", "raise", "off")
WHERE = "Strategy.distribute_dataset"
#: The most bytes of a batch that are compared; at least one row of every array.
MOST_BYTES = 2**20
_PER_RANK = "For different batches on each rank, use strategy.distribute_datasets_from_function."


def first_batch(communicator: Ranks, level: str, number: str, name: str | None, batches: Iterator[Any]) -> Any:
    """Return the first global batch, compared with the other ranks' first ones; END without one.  Collective.

    Args:
        communicator: the ranks.
        level: what to do when the rows differ: "warn" or "raise"; "off" compares nothing.
        number: the dataset's number in words, which the ranks compare.
        name: the name= that the program gave the dataset.
        batches: this rank's batches, at the first one.

    Raises:
        CollectiveMismatchError: on every rank, for another structure, shape or dtype, or none on some rank.
        Exception: what `batches` raises; RemoteError on the other ranks.
    """
    guard = communicator.guard
    if level == "off" or communicator.size == 1 or guard.closed:  # there is not a rank to compare with
        return next(batches, END)
    with Call(guard, "next(distributed dataset)", name=number, called=name, anywhere=True) as call:
        with call.guard.own_work():
            batch = next(batches, END)
            values, rows = ((), "") if batch is END else _values_and_rows(batch)
        call.structure = "no batch at all" if batch is END else nest.flatten(batch)[1].text
        try:
            call.agree("compare the first batch", values=values)
        except CollectiveMismatchError as error:
            error.add_note(_PER_RANK)
            raise
        digests = communicator.allgather_text(rows)
        if len(set(digests)) > 1:
            call.expect_more()  # the warning may be an error there
            problem = f"first batches with other rows: {outliers(digests)[1]}"
            cure = f'{_PER_RANK} Shuffle with one seed on all ranks. To turn off this check: check_batches="off".'
            if level == "raise":
                raise CollectiveMismatchError.at(WHERE, found=problem, expected="the same global batches", fix=cure)
            if communicator.rank == 0:
                lost = "Each rank gets its part of its own batches, so the other rows are lost."
                warn(f"{WHERE}: found {problem}. {lost} {cure}", DatasetWarning)
            call.agree("warn of the first batch")
    return batch


def _values_and_rows(batch: Any) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], str]:
    """Return the dtypes and shapes of the arrays of a batch, and a digest of their rows."""
    arrays = [to_rows(leaf) for leaf in nest.flatten(batch)[0]]
    common_length(arrays, WHERE)
    pairs = [_dtype_and_digest(array, MOST_BYTES // len(arrays)) for array in arrays]
    values = tuple((dtype, tuple(array.shape)) for (dtype, _), array in zip(pairs, arrays, strict=True))
    return values, " ".join(rows for _, rows in pairs)


def _dtype_and_digest(array: Any, most: int) -> tuple[str, str]:
    """Return the dtype of an array, and a digest of its first rows, of `most` bytes, about.

    Only these rows are read from a file; none of objects.
    """
    try:
        first = to_array(array[:1], WHERE)
    except MpiStrategyError:  # objects, sparse arrays
        return f"{type(array).__name__} of {getattr(array, 'dtype', '?')}", ""
    rows = to_array(array[: max(1, most // max(1, first.nbytes))], WHERE)
    return dtype_name(first.dtype), f"{digest(np.ascontiguousarray(rows)):x}"
