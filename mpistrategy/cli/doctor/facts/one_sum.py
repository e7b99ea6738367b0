"""One sum of known numbers by the library, on all ranks of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpistrategy.mpi.over_mpi.ranks import MpiRanks

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.facts.ranks import Ranks

_COUNT = 2**20


def is_right(ranks: Ranks) -> bool:
    """Return whether every rank gets the right sum.  Collective."""
    pattern = np.resize(np.arange(251, dtype=np.float32), _COUNT)
    mine, total = pattern + np.float32(ranks.rank), np.empty_like(pattern)
    communicator = MpiRanks()
    try:
        communicator.allreduce(total, source=mine)
    finally:
        communicator.free()
    size = ranks.size
    return ranks.all_right(bool((total == pattern * size + size * (size - 1) / 2).all()))
