"""The dtype in which sums of float32 travel by NCCL: `CommunicationOptions.wire`.

NCCL adds numbers of the wire's dtype and rounds each sum to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def dtype_for(cupy: Any, ranks: Any, dtype: np.dtype[Any], op: str) -> np.dtype[Any] | None:
    """Return the dtype in which a buffer shall travel between these ranks; None for its own.

    A CuPy before 14 knows no bfloat16, and sends all digits.
    """
    wanted: Callable[[np.dtype[Any], str], np.dtype[Any] | None] | None = getattr(ranks, "wire_by_nccl", None)
    found = None if wanted is None else wanted(dtype, op)
    if found is not None and found.kind != "f" and int(cupy.__version__.partition(".")[0]) < 14:
        return None
    return found
