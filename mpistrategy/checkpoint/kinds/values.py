"""Plain values and arrays.  Those that are equal on all ranks are saved once, others once for each rank."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from mpistrategy.arrays.convert import host_array, is_on_device, placed_as
from mpistrategy.checkpoint.state import UNDECIDED, Fitting, Kind, Restore, State
from mpistrategy.checkpoint.storage.manifest import Item
from mpistrategy.checkpoint.storage.plain_values import ABSENT, to_json


class Plain(Kind):
    """Python's numbers, strings, bytes and None; and lists, tuples and dicts that hold nothing else."""

    name = "plain"
    types: ClassVar[tuple[type, ...]] = (type(None), bool, int, str, float, complex, bytes)
    is_exact = True
    is_replaceable = True

    def add(self, entries: State, path: str, value: Any) -> None:
        entries.add_value(path, self.name, UNDECIDED, to_json(value))

    def restore(self, fit: Fitting, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        is_array = isinstance(value, np.ndarray) or is_on_device(value)
        if not fit.expect(not is_array and fit.is_replaceable(path, value), path, item, value):
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
    """An array of NumPy's or CuPy's; restored in place."""

    name = "array"
    types: ClassVar[tuple[type, ...]] = (np.ndarray,)
    is_replaceable = True

    def owns(self, value: Any) -> bool:
        return super().owns(value) or is_on_device(value)

    def add(self, entries: State, path: str, value: Any) -> None:
        entries.add_array(path, self.name, UNDECIDED, host_array(value))

    def restore(self, fit: Fitting, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        in_place = self.owns(value) and not fresh
        fits = item.is_array and (fit.has_layout(item, value) if in_place else fit.is_replaceable(path, value))
        if not fit.expect(fits, path, item, value) or not fit.knows_own(path, item):
            return lambda: None
        if in_place and not is_on_device(value) and not value.flags.writeable:
            return fit.problem(path, "a read-only array here")
        fit.fetched[path] = None

        def restore() -> Any:
            array = fit.staged.pop(path)
            if not in_place:
                there = fit.here.live.get(path, ABSENT) if fresh else ABSENT
                return placed_as(array, there) if is_on_device(there) else array
            value[...] = placed_as(array, value)
            return value

        return restore


class Scalar(AnyArray):
    """A NumPy scalar."""

    name = "scalar"
    types: ClassVar[tuple[type, ...]] = (np.generic,)

    def owns(self, value: Any) -> bool:
        return isinstance(value, self.types)

    def restore(self, fit: Fitting, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        is_number = item.is_array and item.shape == () and not isinstance(value, np.ndarray)
        if not fit.expect(is_number and fit.is_replaceable(path, value), path, item, value):
            return lambda: None
        if fit.knows_own(path, item):
            fit.fetched[path] = None
        return lambda: fit.staged.pop(path)[()]
