"""The weights of a mean: every replica learns those of the others, before they meet the values."""

from __future__ import annotations

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.plan import dense_reduction


def weights_of_all(communicator: Communicator, weight: float, where: str) -> Array:
    """Return each rank's weight, in rank order, as float64.  Collective.

    Args:
        communicator: the ranks.
        weight: this rank's.
        where: the public name to blame in errors.

    Raises:
        CollectiveMismatchError: on every rank, when another rank makes another call.
    """
    weights = np.zeros(communicator.size)
    weights[communicator.rank] = weight
    reduction = dense_reduction(communicator, ((weights.dtype, weights.shape),), ReduceOp.SUM)
    with communicator.guard.call(where) as call:
        reduction.prepare([weights])
        call.agree("exchange the weights of a mean", sparingly=True)
        (everybodys,) = reduction.run([weights])
        call.expect_more()  # the values come next
    return everybodys
