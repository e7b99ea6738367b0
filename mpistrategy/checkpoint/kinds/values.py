"""Plain values, arrays and rows of global arrays.

Values and arrays that are equal on all ranks are saved once, others once for each rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from mpistrategy.arrays.convert import (
    NEVER_WRITTEN,
    as_device_array,
    as_target,
    hand_back,
    host_array,
    is_on_device,
    like_given,
    placed_as,
)
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.foreign import as_tensor, is_foreign, library_of
from mpistrategy.checkpoint.rows import Rows
from mpistrategy.checkpoint.state import UNDECIDED, Fit, Kind, Restore, State
from mpistrategy.checkpoint.storage.manifest import ROWS, Item
from mpistrategy.checkpoint.storage.plain_values import ABSENT, to_json


class Plain(Kind):
    """Python's numbers, strings, bytes and None; and lists, tuples and dicts that hold nothing else."""

    name = "plain"
    types: ClassVar[tuple[type, ...]] = (type(None), bool, int, str, float, complex, bytes)
    is_exact = True
    is_replaceable = True

    def add(self, entries: State, path: str, value: Any) -> None:
        entries.add_value(path, self.name, UNDECIDED, to_json(value))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not fit.expect(not _is_array(value) and fit.is_replaceable(path, value), path, item, value):
            return lambda: None
        plain = fit.own_value(path, item)

        def restore() -> Any:
            if type(value) is type(plain) is list:
                value[:] = plain
                return value
            if type(value) is type(plain) is dict:
                value.clear()
                value.update(plain)
                return value
            return plain

        return restore


class AnyArray(Kind):
    """An array of NumPy's, CuPy's or JAX's; restored in place, except for JAX's, which never change."""

    name = "array"
    types: ClassVar[tuple[type, ...]] = (np.ndarray,)
    is_replaceable = True

    def owns(self, value: Any) -> bool:
        return super().owns(value) or is_on_device(value) or is_foreign(value)

    def add(self, entries: State, path: str, value: Any) -> None:
        entries.add_array(path, self.name, UNDECIDED, host_array(value, "Checkpoint.save", path))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        in_place = _is_array(value) and not fresh
        here = _looked_at(value) if in_place else value
        fits = item.is_array and (fit.has_layout(path, item, here) if in_place else fit.is_replaceable(path, value))
        if not fit.knows_own(path, item) or not fit.expect(fits, path, item, value):
            return lambda: None
        if in_place and isinstance(value, np.ndarray) and not value.flags.writeable:
            return fit.problem(path, "a read-only array here")
        fit.fetched[path] = None

        def restore() -> Any:
            array = fit.staged.pop(path)
            if in_place and library_of(value) not in NEVER_WRITTEN:
                target = as_target(value, "Checkpoint.restore", path)
                target[...] = placed_as(array, target)
                hand_back(target, value)
                return value
            there = value if in_place else fit.here.live.get(path, ABSENT) if fresh else ABSENT
            return like_given(array, there) if _is_array(there) else self.made(array)

        return restore

    def made(self, array: Array) -> Any:
        """Return an array where none is here."""
        return array


class Tensor(AnyArray):
    """A tensor of torch's; restored in place."""

    name = "tensor"

    def owns(self, value: Any) -> bool:
        return library_of(value) == "torch" and is_foreign(value)

    def made(self, array: Array) -> Any:
        return as_tensor(array)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_on_device(value) or is_foreign(value)


def _looked_at(value: Any) -> Array:
    """Return an array of NumPy's or CuPy's of the same memory."""
    array: Array = as_device_array(value, "Checkpoint.restore") if is_on_device(value) else host_array(value)
    return array


class Scalar(AnyArray):
    """A NumPy scalar."""

    name = "scalar"
    types: ClassVar[tuple[type, ...]] = (np.generic,)

    def owns(self, value: Any) -> bool:
        return isinstance(value, self.types)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        is_number = item.is_array and item.shape == () and not isinstance(value, np.ndarray)
        if not fit.expect(is_number and fit.is_replaceable(path, value), path, item, value):
            return lambda: None
        if fit.knows_own(path, item):
            fit.fetched[path] = None
        return lambda: fit.staged.pop(path)[()]


class GlobalRows(Kind):
    """Rows; restored in place."""

    name = ROWS
    types: ClassVar[tuple[type, ...]] = (Rows,)

    def add(self, entries: State, path: str, value: Rows) -> None:
        entries.add_array(path, self.name, ROWS, host_array(value.value))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        here = fit.here.live.get(path, ABSENT) if value is ABSENT else value
        fits = here is ABSENT or (isinstance(here, Rows) and (fresh or _fits(fit.here.items[path], item)))
        if not fit.expect(fits, path, item, here):
            return lambda: None
        fit.fetched[path] = None

        def restore() -> Any:
            array = fit.staged.pop(path)
            made = array if here is ABSENT else like_given(array, here.value)
            if value is ABSENT:
                return Rows(made)
            value.value = made
            return value

        return restore


def _fits(here: Item, saved: Item) -> bool:
    """Return whether saved rows are of this dtype, with these axes after the first."""
    return here.dtype == saved.dtype and here.shape[1:] == saved.shape[1:]
