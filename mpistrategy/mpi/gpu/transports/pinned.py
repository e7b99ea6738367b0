"""Pinned memory of the host for one piece of a buffer in GPU memory, and what becomes of the piece there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array

#: An address on the device, where in the slot its bytes are, and how many.
Span = tuple[int, int, int]


class Slot:
    """Pinned memory for one piece, and what tells when the copy out of it is done."""

    def __init__(self, nbytes: int) -> None:
        from cupyx import empty_pinned

        self.memory: Array = empty_pinned((nbytes,), np.uint8)
        self.address: int = self.memory.ctypes.data
        self.is_free: Any = None


@dataclass(frozen=True)
class Piece:
    """What is under way in one slot.

    Attributes:
        nbytes: how much of the slot it takes.
        brought: what is copied from the device to the slot.
        combine: what the ranks do then with the bytes of the slot.
        taken: what is copied from the slot to the device at last.
    """

    nbytes: int
    brought: Sequence[Span]
    combine: Callable[[Array], None]
    taken: Sequence[Span]
