"""Parts of arrays for single ranks, which do not know beforehand how much each of the others sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import OptionError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks


def exchange(
    communicator: Ranks,
    call: Call,
    sent: Array,
    counts: Sequence[int],
    width: int,
    taken: Sequence[int] | None = None,
    **words: Any,
) -> tuple[Array, list[int]]:
    """Send parts of an array to all ranks.  Collective.

    Args:
        communicator: the ranks.
        call: the call that this is a part of; the ranks agree in it.
        sent: bytes.
        counts: how many units go to each rank.
        width: of a unit, in bytes.
        taken: how many units come from each rank; None if this is to be found out.
        words: what the ranks compare besides the call.

    Returns:
        The bytes that all ranks have sent to this one, in rank order, and how many units of each.

    Raises:
        OptionError: on every rank, where `taken` is wrong.
    """
    mine, found = np.array(counts, np.int64), np.empty(communicator.size, np.int64)
    call.agree(call.where, **words)
    communicator.alltoall(mine, found)
    call.expect_more()  # not before: the others may be in the exchange
    if taken is not None and found.tolist() != list(taken):
        raise OptionError.at(
            call.where,
            found=f"parts of {found.tolist()} elements for rank {communicator.rank}, from rank 0 on",
            expected=f"{list(taken)}, as its outputs are",
        )
    received = np.empty(int(found.sum()) * width, np.uint8)
    call.agree(call.where)
    communicator.alltoallv(sent, np.multiply(counts, width).tolist(), received, (found * width).tolist())
    return received, found.tolist()
