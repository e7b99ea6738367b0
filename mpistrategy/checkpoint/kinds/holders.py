"""Restoring dicts, lists, tuples, and objects that have variables: what only holds other things.

A manifest that was made up may speak of far more things than it has.  So the first one that is missing is the end:
the work is limited by what the manifest has, and not by what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mpistrategy.checkpoint.storage.manifest import Item
from mpistrategy.checkpoint.storage.plain_values import ABSENT, below
from mpistrategy.checkpoint.storage.shards import shown

if TYPE_CHECKING:
    from mpistrategy.checkpoint.fitting import Fit

_KEYS = (str, int)


def fit_dict(fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Callable[[], Any]:
    """A dict: in place."""
    if not fit.expect(value is ABSENT or type(value) is dict, path, item, value):
        return lambda: None
    there = {} if value is ABSENT else value
    if type(item.more) is not list or len({str(key) for key in item.more if type(key) in _KEYS}) != len(item.more):
        raise ValueError(f"the keys {shown(item.more)}")
    _check_complete(fit, path, item.more)
    children = {key: fit.restore_of(below(path, key), there.get(key, ABSENT), fresh=fresh) for key in item.more}
    for key in there:
        if key not in children and fit.is_lasting(below(path, key)):
            children[key] = fit.missing(below(path, key), there[key])

    def restore() -> Any:
        restored = {key: child() for key, child in children.items()}
        there.clear()
        there.update(restored)
        return there

    return restore


def fit_list(fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Callable[[], Any]:
    """A list: in place."""
    if not fit.expect(value is ABSENT or type(value) is list, path, item, value):
        return lambda: None
    children = _elements(fit, path, item, value, fresh)

    def restore() -> Any:
        restored = [child() for child in children]
        if value is ABSENT:
            return restored
        value[:] = restored
        return value

    return restore


def fit_tuple(fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Callable[[], Any]:
    """A tuple: anew."""
    if not fit.expect(value is ABSENT or type(value) is tuple, path, item, value):
        return lambda: None
    children = _elements(fit, path, item, value, fresh)
    return lambda: tuple(child() for child in children)


def fit_variables(fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Callable[[], Any]:
    """An object that has variables, such as a metric."""
    here = fit.state.items.get(path)
    if not fit.expect(here is not None and here.kind == "variables", path, item, value):
        return lambda: None
    _elements(fit, path, item, value.variables, fresh)  # the arrays go into the variables
    return lambda: value


def _elements(fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> list[Callable[[], Any]]:
    """Return what restores each element."""
    there = () if value is ABSENT else value
    if type(item.more) is not int or item.more < 0:
        raise ValueError(f"{shown(item.more)} elements")
    _check_complete(fit, path, range(item.more))
    one = [there[index] if index < len(there) else ABSENT for index in range(item.more)]
    elements = [fit.restore_of(below(path, index), child, fresh=fresh) for index, child in enumerate(one)]
    extra = [index for index in range(item.more, len(there)) if fit.is_lasting(below(path, index))]
    return elements + [fit.missing(below(path, index), there[index]) for index in extra]


def _check_complete(fit: Fit, path: str, keys: Iterable[Any]) -> None:
    """Raise ValueError unless the checkpoint has all that it speaks of."""
    for key in keys:
        if below(path, key) not in fit.manifest.items:
            raise ValueError(f"nothing in the checkpoint for {shown(key)}")
