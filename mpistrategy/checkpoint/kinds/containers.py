"""Dicts, lists and tuples that hold other kinds, objects with `state_dict`, and objects with `variables`.

A forged manifest may name far more elements than it has.  `_check_complete` therefore stops at the first one that is
missing: the work is limited by the size of the manifest.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from mpistrategy.arrays.values import DistributedValues
from mpistrategy.checkpoint.state import UNDECIDED, Fit, Kind, Restore, State, has_state, members_of
from mpistrategy.checkpoint.storage.manifest import Item
from mpistrategy.checkpoint.storage.plain_values import ABSENT, NOT_PLAIN, below, to_json
from mpistrategy.checkpoint.storage.shards import shown
from mpistrategy.errors import OptionTypeError

_KEYS = (str, int)


class Container(Kind):
    """A dict, list or tuple: what is plain all through is one plain value, else its elements are entered."""

    is_exact = True
    is_replaceable = True

    def add(self, entries: State, path: str, value: Any) -> None:
        plain = to_json(value)
        if plain is not NOT_PLAIN:
            entries.add_value(path, "plain", UNDECIDED, plain)
            return
        self._add_item(entries, path, value)
        for key, child in self.children(value):
            entries.add(below(path, key), child)

    def children(self, value: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the elements with their keys."""
        yield from enumerate(value)

    def _add_item(self, entries: State, path: str, value: Any) -> None:
        entries.items[path] = Item(self.name, more=len(value))

    def _expect(self, fit: Fit, path: str, item: Item, value: Any) -> bool:
        return fit.expect(value is ABSENT or self.owns(value), path, item, value)


class Dict(Container):
    """A dict, or one of the standard library's classes of dicts; restored in place."""

    name = "dict"
    types: ClassVar[tuple[type, ...]] = (dict, OrderedDict, defaultdict, Counter)

    def children(self, value: Any) -> Iterator[tuple[Any, Any]]:
        yield from value.items()

    def _add_item(self, entries: State, path: str, value: Any) -> None:
        keys = list(value)
        if not all(type(key) in _KEYS for key in keys) or len(set(map(str, keys))) < len(keys):
            raise OptionTypeError.at(
                entries.where, found=f"the keys {keys!r:.80} of {path!r}", expected="strings or ints, all different"
            )
        entries.items[path] = Item(self.name, more=keys)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not self._expect(fit, path, item, value):
            return lambda: None
        there = _empty_like(fit.here.live.get(path)) if value is ABSENT else value
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


class List(Container):
    """A list; restored in place."""

    name = "list"
    types: ClassVar[tuple[type, ...]] = (list,)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not self._expect(fit, path, item, value):
            return lambda: None
        children = _elements(fit, path, item, value, fresh)

        def restore() -> Any:
            restored = [child() for child in children]
            if value is ABSENT:
                return restored
            value[:] = restored
            return value

        return restore


class Tuple(Container):
    """A tuple, named or not; a new one of the same class is made."""

    name = "tuple"
    types: ClassVar[tuple[type, ...]] = (tuple,)

    def owns(self, value: Any) -> bool:
        return super().owns(value) or (isinstance(value, tuple) and hasattr(value, "_fields"))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not self._expect(fit, path, item, value):
            return lambda: None
        children = _elements(fit, path, item, value, fresh)
        there: Any = fit.here.live.get(path) if value is ABSENT else value
        make = getattr(type(there), "_make", tuple)
        if make is not tuple and item.more != len(there):
            return fit.problem(path, f"{item.more} elements in the checkpoint, a {type(there).__name__} here")
        return lambda: make(child() for child in children)


class Component(Kind):
    """A `PerReplica` or `Mirrored`: this rank's component, restored in place if that can be."""

    name = "component"
    types: ClassVar[tuple[type, ...]] = (DistributedValues,)
    is_replaceable = True

    def add(self, entries: State, path: str, value: DistributedValues) -> None:
        entries.items[path] = Item(self.name, more=[type(value).__name__, len(value.values)])
        for number, component in enumerate(value.values):
            entries.add(below(path, number), component)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        here = fit.here.live.get(path, ABSENT) if value is ABSENT else value
        fits = isinstance(here, DistributedValues) and fit.here.items[path].more == item.more
        if not fit.expect(fits, path, item, here):
            return lambda: None
        there = () if value is ABSENT else value.values
        components = _elements(fit, path, dataclasses.replace(item, more=len(here.values)), there, fresh)

        def restore() -> Any:
            found = here if value is not ABSENT else copy.copy(here)
            found.values = tuple(component() for component in components)
            return found

        return restore


class LoadsItsState(Kind):
    """Base of the kinds of objects with `load_state_dict(state)`."""

    @staticmethod
    def _loading(value: Any, state: Restore) -> Restore:
        """Return what lets `value` load the state that `state` returns."""

        def restore() -> Any:
            value.load_state_dict(state())
            return value

        return restore


class Module(LoadsItsState):
    """A module of torch's, known by its methods: its parameters and buffers are restored in place."""

    name = "module"

    def owns(self, value: Any) -> bool:
        return has_state(value) and callable(getattr(value, "named_parameters", None))

    def add(self, entries: State, path: str, value: Any) -> None:
        entries.items[path] = Item(self.name)
        entries.add(below(path, "state"), dict(value.state_dict()))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not fit.expect(self.owns(value), path, item, value):
            return lambda: None
        here = dict(value.state_dict())
        saved = fit.manifest.items[below(path, "state")].more or []
        if sorted(map(str, saved)) != sorted(here):
            missing, more = sorted(here.keys() - set(saved)), sorted(set(saved) - here.keys())
            return fit.problem(path, f"not in the checkpoint: {missing}; not in the module here: {more}")
        state = fit.restore_of(below(path, "state"), here)
        return self._loading(value, state)


class StatefulObject(LoadsItsState):
    """An object with `state_dict()` and `load_state_dict(state)`: it loads its state itself, and may refuse."""

    name = "object"

    def owns(self, value: Any) -> bool:
        return has_state(value)

    def add(self, entries: State, path: str, value: Any) -> None:
        entries.items[path] = Item(self.name)
        entries.add(below(path, "state"), value.state_dict())

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not fit.expect(callable(getattr(value, "load_state_dict", None)), path, item, value):
            return lambda: None
        state = fit.restore_of(below(path, "state"), ABSENT, fresh=True)
        return self._loading(value, state)


class WithVariables(Kind):
    """An object with variables, such as a metric; its variables are restored in place."""

    name = "variables"

    def owns(self, value: Any) -> bool:
        return members_of(value) is not None

    def add(self, entries: State, path: str, value: Any) -> None:
        members = members_of(value) or ()
        entries.items[path] = Item(self.name, more=len(members))
        for number, member in enumerate(members):
            entries.add(below(path, number), member)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        here = fit.here.items.get(path)
        if not fit.expect(here is not None and here.kind == self.name, path, item, value):
            return lambda: None
        _elements(fit, path, item, value.variables, fresh)  # the arrays go into the variables
        return lambda: value


def _empty_like(value: Any) -> dict[Any, Any]:
    """Return an empty dict, of the class of `value` if that is a dict."""
    empty = copy.copy(value) if isinstance(value, dict) else {}
    empty.clear()
    return empty


def _elements(fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> list[Restore]:
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
    """Raise ValueError unless the checkpoint has all elements that it names."""
    for key in keys:
        if below(path, key) not in fit.manifest.items:
            raise ValueError(f"nothing in the checkpoint for {shown(key)}")
