"""Flatten and rebuild nested structures: dict, list, tuple, namedtuple, dataclass.

Everything else is a leaf, None and strings included.  A dictionary's leaves are in the order of its sorted keys, so
ranks that filled equal dictionaries in different orders agree.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from mpistrategy.errors import StructureError


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nest without its leaves.

    Attributes:
        text: a string for ranks to compare: the same for the same structure.
        num_leaves: the number of leaves.
    """

    text: str
    num_leaves: int
    rebuild: Callable[[Iterator[Any]], Any] = dataclasses.field(compare=False, repr=False)

    def pack(self, leaves: list[Any]) -> Any:
        """Return the nest with these leaves in place of its own."""
        return self.rebuild(iter(leaves))


LEAF = Structure("*", 1, next)


def flatten(nest: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of `nest` in order, and its structure.

    >>> leaves, structure = flatten({"b": [1, 2], "a": 3})
    >>> leaves, structure.text
    ([3, 1, 2], "{'a':*,'b':[*,*]}")
    >>> structure.pack([30, 10, 20])
    {'b': [10, 20], 'a': 30}
    """
    leaves: list[Any] = []
    try:
        return leaves, _visit(nest, leaves)
    except RecursionError:
        pass
    raise StructureError.at("nested structure", found="a structure that contains itself", expected="a finite nest")


def map_structure(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return `nest` with `function` applied to every leaf."""
    leaves, structure = flatten(nest)
    return structure.pack([function(leaf) for leaf in leaves])


def leaf_paths(nest: Any) -> list[str]:
    """Return how to reach each leaf, in the order of `flatten`, e.g. ``["['a']", "['b'][0]"]``."""
    return [path for path, _ in _walk(nest, "")]


def is_container(nest: Any) -> bool:
    """Return whether `nest` holds leaves instead of being one."""
    return isinstance(nest, (Mapping, list, tuple)) or _is_record(nest)


def _is_record(nest: Any) -> bool:
    if not dataclasses.is_dataclass(nest) or isinstance(nest, type):
        return False
    return not getattr(nest, "is_leaf", False) and not hasattr(nest, "__array__")  # zarr's arrays are dataclasses


def sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Return the keys in the order of their leaves."""
    try:
        return sorted(mapping)
    except TypeError:
        return sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))


def _visit(nest: Any, leaves: list[Any]) -> Structure:
    kind = type(nest)
    if kind is list or kind is tuple:
        children = [_visit(child, leaves) for child in nest]
        opening, closing = "[]" if kind is list else "()"
        return _combine(children, opening, [c.text for c in children], closing, kind)
    if isinstance(nest, Mapping):
        keys = sorted_keys(nest)
        children = [_visit(nest[key], leaves) for key in keys]
        original = list(nest)
        like = (
            None if kind is dict else nest
        )  # a kept structure must not keep the leaves alive; a plain dict is not needed

        def build_mapping(values: list[Any]) -> Any:
            by_key = dict(zip(keys, values, strict=True))
            items = {key: by_key[key] for key in original}
            return items if like is None else _like_mapping(like, items)

        opening = "{" if kind is dict else f"{kind.__name__}{{"
        texts = [f"{key!r}:{c.text}" for key, c in zip(keys, children, strict=True)]
        return _combine(children, opening, texts, "}", build_mapping)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        children = [_visit(child, leaves) for child in nest]
        texts = [f"{name}={c.text}" for name, c in zip(nest._fields, children, strict=True)]
        return _combine(children, f"{kind.__name__}(", texts, ")", lambda values: kind(*values))
    if isinstance(nest, (list, tuple)):
        children = [_visit(child, leaves) for child in nest]
        return _combine(children, f"{kind.__name__}(", [c.text for c in children], ")", kind)
    if _is_record(nest):
        names = [field.name for field in dataclasses.fields(nest) if field.init]
        children = [_visit(getattr(nest, name), leaves) for name in names]
        texts = [f"{name}={c.text}" for name, c in zip(names, children, strict=True)]

        def build_record(values: list[Any]) -> Any:
            return dataclasses.replace(nest, **dict(zip(names, values, strict=True)))

        return _combine(children, f"{kind.__name__}(", texts, ")", build_record)
    leaves.append(nest)
    return LEAF


def _combine(
    children: list[Structure], opening: str, texts: list[str], closing: str, build: Callable[[list[Any]], Any]
) -> Structure:
    def rebuild(leaves: Iterator[Any]) -> Any:
        return build([child.rebuild(leaves) for child in children])

    return Structure(opening + ",".join(texts) + closing, sum(child.num_leaves for child in children), rebuild)


def _like_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same kind with these items; a plain dict for one that cannot be written."""
    if not isinstance(like, MutableMapping):
        return items
    rebuilt = copy.copy(like)
    for key, value in items.items():  # not update(): a Counter's would add
        rebuilt[key] = value
    return rebuilt


def _walk(nest: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, Mapping):
        for key in sorted_keys(nest):
            yield from _walk(nest[key], f"{path}[{key!r}]")
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        for name in nest._fields:
            yield from _walk(getattr(nest, name), f"{path}.{name}")
    elif isinstance(nest, (list, tuple)):
        for index, child in enumerate(nest):
            yield from _walk(child, f"{path}[{index}]")
    elif _is_record(nest):
        for field in dataclasses.fields(nest):
            if field.init:
                yield from _walk(getattr(nest, field.name), f"{path}.{field.name}")
    else:
        yield path, nest
