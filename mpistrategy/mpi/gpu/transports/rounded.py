"""The dtype in which sums of float32 travel by NCCL: `CommunicationOptions.wire`.

NCCL adds numbers of the wire's dtype and rounds each sum to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node.reduced_precision import by_nccl


def dtype_for(cupy: Any, ranks: Communicator, wire: str | None, dtype: np.dtype[Any], op: str) -> np.dtype[Any] | None:
    """Return the dtype in which a buffer shall travel between these ranks; None for its own.

    A CuPy before 14 knows no bfloat16, and sends all digits.
    """
    found = by_nccl(ranks, wire, dtype, op)
    if found is not None and found.kind != "f" and int(cupy.__version__.partition(".")[0]) < 14:
        return None
    return found
