"""Flatten and rebuild nested structures: dict, list, tuple, namedtuple, dataclass.

Everything else is a leaf, None and strings included.  A dictionary's leaves are in the order of its sorted keys, so
ranks that filled equal dictionaries in different orders agree.

`flatten` looks at every container.  `leaves_of` prepares the same for many nests of one structure of plain dict, list
and tuple, and does not look at them again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from mpistrategy.errors import StructureError

_PLAIN: frozenset[type] = frozenset({dict, list, tuple})


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nest without its leaves.

    Attributes:
        text: a string for ranks to compare: the same for the same structure.
        num_leaves: the number of leaves.
        num_none: how many leaves of the nest are None, and left out of the others; see `flatten_without_none`.
    """

    text: str
    num_leaves: int
    rebuild: Callable[[Iterator[Any]], Any] = dataclasses.field(compare=False, repr=False)
    num_none: int = 0

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


def flatten_without_none(nest: Any) -> tuple[list[Any], Structure]:
    """Do `flatten`, but leave out the leaves that are None: they belong to the structure.

    >>> leaves, structure = flatten_without_none([1, None])
    >>> leaves, structure.text, structure.pack([10])
    ([1], '[*,*] with None as leaf 1', [10, None])
    """
    leaves, structure = flatten(nest)
    absent = [number for number, leaf in enumerate(leaves) if leaf is None]
    if not absent:
        return leaves, structure
    is_there = [leaf is not None for leaf in leaves]

    def rebuild(others: Iterator[Any]) -> Any:
        return structure.rebuild(next(others) if there else None for there in is_there)

    text = f"{structure.text} with None as leaf {', '.join(map(str, absent))}"
    left = [leaf for leaf in leaves if leaf is not None]
    return left, Structure(text, len(left), rebuild, len(absent))


def map_structure(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return `nest` with `function` applied to every leaf."""
    leaves, structure = flatten(nest)
    return structure.pack([function(leaf) for leaf in leaves])


def leaf_paths(nest: Any) -> list[str]:
    """Return how to reach each leaf, in the order of `flatten`, e.g. ``["['a']", "['b'][0]"]``."""
    return [path for path, _ in _walk(nest, "")]


def paths_without_none(nest: Any) -> list[str]:
    """Return how to reach each leaf of `flatten_without_none`."""
    return [path for path, leaf in _walk(nest, "") if leaf is not None]


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
        keys, original = sorted_keys(nest), list(nest)
        children = [_visit(nest[key], leaves) for key in keys]
        inner, is_sorted = [*zip(keys, [c.rebuild for c in children], strict=True)], keys == original
        # A structure that is kept must not keep the leaves alive: of a plain dict nothing but the keys is needed.
        like = None if kind is dict else nest

        def rebuild(leaves: Iterator[Any]) -> Any:
            items = {key: each(leaves) for key, each in inner}
            if not is_sorted:
                items = {key: items[key] for key in original}
            return items if like is None else _like_mapping(like, items)

        opening = "{" if kind is dict else f"{kind.__name__}{{"
        texts = [f"{key!r}:{c.text}" for key, c in zip(keys, children, strict=True)]
        return Structure(opening + ",".join(texts) + "}", sum(c.num_leaves for c in children), rebuild)
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
    rebuilds = [child.rebuild for child in children]

    def rebuild(leaves: Iterator[Any]) -> Any:
        return build([each(leaves) for each in rebuilds])

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


# ----------------------------------------------------------------------------------- nests of a structure that is known


@dataclass(frozen=True, slots=True)
class Leaves:
    """How to reach the leaves of nests of one structure, in the order of `flatten`.

    Attributes:
        take: returns the leaves of a nest.
        build: returns the nest with these leaves.
        single: whether the nest is its own leaf.
        text: the structure, as `Structure.text`.
    """

    take: Callable[[Any], Sequence[Any]]
    build: Callable[[Iterable[Any]], Any]
    single: bool
    text: str


def leaves_of(nest: Any) -> Leaves | None:
    """Return how to reach the leaves of nests like `nest`; None without any, and for containers that are not plain."""
    if not _is_plain(nest):
        return None
    structure, kind = flatten(nest)[1], type(nest)
    if structure.num_leaves == 0:
        return None
    if kind not in _PLAIN:
        return Leaves(lambda leaf: (leaf,), lambda results: next(iter(results)), True, structure.text)
    if any(type(child) in _PLAIN for child in (nest.values() if kind is dict else nest)):
        return Leaves(_taker(nest), lambda results: structure.rebuild(iter(results)), False, structure.text)
    if kind is not dict:
        return Leaves(lambda flat: flat, kind, False, structure.text)
    names = sorted_keys(nest)
    take: Callable[[Any], Sequence[Any]] = itemgetter(*names) if len(names) > 1 else lambda flat: (flat[names[0]],)
    if names != list(nest):
        return Leaves(take, lambda results: structure.rebuild(iter(results)), False, structure.text)
    # Without `strict`, which takes a third of the time of a few numbers.
    return Leaves(take, lambda results: dict(zip(names, results)), False, structure.text)  # noqa: B905


def alike(nest: Any, other: Any) -> bool:
    """Return whether `other` has the structure of `nest`, which is of plain dict, list and tuple, or may have it."""
    kind = type(nest)
    if kind not in _PLAIN:
        return type(other) not in _PLAIN
    if type(other) is not kind or len(nest) != len(other):
        return False
    if kind is dict:
        if nest.keys() != other.keys():
            return False
        nest, other = nest.values(), [other[key] for key in nest]
    # Leaves alone without a call each: an arena may have hundreds.
    if _PLAIN.isdisjoint(map(type, nest)):
        return _PLAIN.isdisjoint(map(type, other))
    return all(map(alike, nest, other))


def _is_plain(nest: Any) -> bool:
    """Return whether the containers in a nest are plain: no subclasses, no others."""
    kind = type(nest)
    if kind in _PLAIN:
        return all(map(_is_plain, nest.values() if kind is dict else nest))
    return not is_container(nest)


def _taker(nest: Any) -> Callable[[Any], list[Any]]:
    """Return what lists the leaves of nests like `nest`, of dict, list and tuple."""
    keys = sorted_keys(nest) if type(nest) is dict else range(len(nest))
    inner = [(key, _taker(nest[key]) if type(nest[key]) in _PLAIN else None) for key in keys]

    def take(like: Any) -> list[Any]:
        leaves = []
        for key, below in inner:
            if below is None:
                leaves.append(like[key])
            else:
                leaves += below(like[key])
        return leaves

    return take


def only_text_keys(value: Any) -> bool:
    """Return whether no dictionary in a nest has keys that are equal but not the same in words, as 1 and True."""
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(only_text_keys, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(only_text_keys, value))
