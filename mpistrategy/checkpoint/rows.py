"""Rows: this rank's part of a global array, restored on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.foreign import is_foreign
from mpistrategy.errors import OptionTypeError, ShapeError
from mpistrategy.objects.other_names import NamesOurs


class Rows(NamesOurs):
    """This rank's rows of a global array, for checkpoints.

    The global array is the rows of all ranks, one after the other in rank order.  A checkpoint restores it on any
    number of ranks, also on the number that saved it: of n rows in all, each of p ranks gets the next ceil(n / p), the
    last ones fewer or none.  The restored rows are a new array in `value`.

    Args:
        value: an array of shape (rows, ...) of NumPy, CuPy, torch or JAX, not copied.  The number of rows may differ
            between the ranks, and may be 0; the dtype and the other axes must not.

    Attributes:
        value: the array.  Assign another one at any time.  A restore assigns one of the same library, on the same
            device.

    Raises:
        OptionTypeError: for anything else than an array.
        ShapeError: for an array without axes.

    >>> import os, tempfile, numpy as np, mpistrategy as ms
    >>> field = ms.Rows(np.arange(6.0).reshape(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder, ms.OneDeviceStrategy("CPU:0").scope():
    ...     checkpoint = ms.Checkpoint(field=field)
    ...     path = checkpoint.save(os.path.join(folder, "first")).path
    ...     field.value = np.empty((0, 2))
    ...     _ = checkpoint.restore(path)
    >>> field.value.tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """

    _words_of = "Rows"

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def value(self) -> Any:
        """This rank's rows."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        if not (isinstance(value, np.ndarray) or is_on_device(value) or is_foreign(value)):
            raise OptionTypeError.at(
                "Rows",
                found=f"a {type(value).__name__}",
                expected="an array of shape (rows, ...)",
                fix="Write ms.Rows(np.asarray(...)).",
            )
        if not value.shape:
            raise ShapeError.at("Rows", found="an array without axes", expected="an array of shape (rows, ...)")
        self._value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's rows."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.value.dtype

    def __repr__(self) -> str:
        return f"Rows({self.value!r})"
