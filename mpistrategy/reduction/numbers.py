"""Numbers of each rank that all ranks learn with the check of a call: the weights of a mean, lengths of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.plan import Plan, usual_route


class NumbersOfRanks:
    """So many numbers of each rank, as float64.

    Args:
        communicator: the ranks.
        count: how many of each rank.
    """

    def __init__(self, communicator: Communicator, count: int) -> None:
        self._rank, layouts = communicator.rank, ((np.dtype(np.float64), (communicator.size, count)),)
        route = usual_route(communicator, layouts, ReduceOp.SUM, 0, None)
        self._plan = Plan(communicator, layouts, ReduceOp.SUM, route)
        self._numbers: Array = np.zeros(layouts[0][1])

    def bring(self, mine: Any) -> None:
        """Give this rank's numbers, before the ranks agree on the call."""
        self._numbers[self._rank] = mine
        self._plan.bring((self._numbers,))

    def found(self) -> Array:
        """Return the numbers of all ranks, a row for each, after that."""
        return self._plan.run((self._numbers,))[0]
