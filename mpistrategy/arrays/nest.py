"""Flatten and rebuild nested structures: dict, list, tuple, namedtuple, dataclass.

Everything else is a leaf, None and strings included.  A dictionary's leaves are in the order of its sorted keys, so
ranks that filled equal dictionaries in different orders agree.

`flatten` looks at every container.  `Structure.take` reaches the leaves of many nests of one structure of plain dict,
list and tuple, and does not look at them again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, NamedTuple

from mpistrategy.errors import StructureError

_PLAIN: frozenset[type] = frozenset({dict, list, tuple})
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")")}


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nest without its leaves.

    Attributes:
        text: a string for ranks to compare: the same for the same structure.
        num_leaves: the number of leaves.
        rebuild: returns the nest with the next leaves of an iterator in place of its own.
        take: lists the leaves of nests of this structure without a look at it.  None for other containers than dict,
            list and tuple, and for keys that are no texts (1 and True are equal).
        num_none: how many leaves of the nest are None, and not among the leaves; see `flatten_without_none`.
    """

    text: str
    num_leaves: int
    rebuild: Callable[[Iterator[Any]], Any] = dataclasses.field(compare=False, repr=False)
    take: Any = dataclasses.field(compare=False, repr=False)
    num_none: int = 0

    def pack(self, leaves: Iterable[Any]) -> Any:
        """Return the nest with these leaves in place of its own."""
        return self.rebuild(iter(leaves))


def _alone(leaf: Any) -> tuple[Any]:
    return (leaf,)


LEAF = Structure("*", 1, next, _alone)  # of functions that can be pickled, as a Dataset of one array is
#: A None that belongs to the structure; see `flatten_without_none`.
_NONE = Structure("None", 0, lambda leaves: None, None, 1)


class _Container(NamedTuple):
    """One container of a nest, whatever its kind.

    Attributes:
        brackets: the texts before and after its children in `Structure.text`.
        names: the names of its children: keys, fields or numbers.
        label: returns the text before a child in `Structure.text`, from its name; None for numbers, which have no text.
        step: returns the text of a child in a path, from its name.
        children: the children.
        build: returns such a container with other children; does not keep the present children alive.
    """

    brackets: tuple[str, str]
    names: Sequence[Any]
    label: Callable[[Any], str] | None
    step: Callable[[Any], str]
    children: Sequence[Any]
    build: Callable[[list[Any]], Any]


def _container_of(nest: Any) -> _Container | None:
    """Return a container's parts; None for a leaf."""
    kind = type(nest)
    if isinstance(nest, Mapping):
        keys = sorted_keys(nest)
        brackets = ("{" if kind is dict else f"{kind.__name__}{{", "}")
        children = [nest[key] for key in keys]
        return _Container(brackets, keys, "{!r}:".format, "[{!r}]".format, children, _mapping_like(nest, keys))
    if isinstance(nest, (list, tuple)) and not hasattr(nest, "_fields"):
        brackets = _BRACKETS.get(kind) or (f"{kind.__name__}(", ")")
        return _Container(brackets, range(len(nest)), None, "[{}]".format, nest, kind)
    if not isinstance(nest, tuple) and not _is_record(nest):
        return None
    is_tuple = isinstance(nest, tuple)
    names: Any = nest._fields if is_tuple else [field.name for field in dataclasses.fields(nest) if field.init]

    def build(values: list[Any]) -> Any:
        if is_tuple:
            return kind._make(values)
        return dataclasses.replace(nest, **dict(zip(names, values, strict=True)))

    children = [getattr(nest, name) for name in names]
    return _Container((f"{kind.__name__}(", ")"), names, "{}=".format, ".{}".format, children, build)


def _mapping_like(mapping: Mapping[Any, Any], keys: list[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that makes a mapping like this from values of these keys: a dict if it cannot be written."""
    # A structure must not keep the leaves alive: for a plain dict the keys are enough.
    if type(mapping) is dict and all(map(is_, keys, mapping)):
        return lambda values: dict(zip(keys, values))  # noqa: B905  # `strict` takes a third of the time
    # The copy of another mapping may share its memory, or a file: the program's own values would be overwritten.
    is_copied = isinstance(mapping, (dict, UserDict)) and type(mapping) is not dict
    like = mapping if is_copied else dict.fromkeys(mapping)

    def build(values: list[Any]) -> Any:
        rebuilt: Any = copy.copy(like)
        if getattr(like, "__dict__", None) is like:  # its attributes are its items; the copy's are the old values
            rebuilt.__dict__ = rebuilt
        for key, value in zip(keys, values, strict=True):  # not update(): a Counter's would add
            rebuilt[key] = value
        return rebuilt

    return build


def flatten(nest: Any, none: Structure = LEAF) -> tuple[list[Any], Structure]:
    """Return the leaves of `nest` in order, and its structure.  None is a leaf, or what `none` says.

    >>> leaves, structure = flatten({"b": [1, 2], "a": 3})
    >>> leaves, structure.text
    ([3, 1, 2], "{'a':*,'b':[*,*]}")
    >>> structure.pack([30, 10, 20])
    {'b': [10, 20], 'a': 30}
    """
    leaves: list[Any] = []
    try:
        return leaves, _visit(nest, leaves, none)
    except RecursionError:
        raise StructureError.at(
            "nested structure", found="a structure that contains itself", expected="a finite nest"
        ) from None


def _visit(nest: Any, leaves: list[Any], none: Structure) -> Structure:
    if nest is None and none is not LEAF:
        return none
    if (container := _container_of(nest)) is None:
        leaves.append(nest)
        return LEAF
    (opening, closing), names, label, _, children, build = container
    before = len(leaves)
    inner = [_visit(child, leaves, none) for child in children]
    rebuilds = [structure.rebuild for structure in inner]
    is_flat = all(structure is LEAF for structure in inner)

    def rebuild(leaves: Iterator[Any]) -> Any:
        if is_flat:  # in less time than by a call for each leaf
            return build([next(leaves) for _ in rebuilds])
        return build([rebuild_child(leaves) for rebuild_child in rebuilds])

    texts = [structure.text for structure in inner]
    if label is not None:
        texts = [label(name) + text for name, text in zip(names, texts, strict=True)]
    num_none = sum(structure.num_none for structure in inner)
    take = _taker(type(nest), names, [structure.take for structure in inner], is_flat)
    return Structure(f"{opening}{','.join(texts)}{closing}", len(leaves) - before, rebuild, take, num_none)


def _taker(kind: type, names: Sequence[Any], takes: list[Any], is_flat: bool) -> Any:
    """Return a function that lists the leaves of such containers; see `Structure.take`."""
    if kind not in _PLAIN or None in takes or (kind is dict and {*map(type, names)} - {str}):
        return None
    if is_flat and len(names) > 1:
        return itemgetter(*names) if kind is dict else lambda flat: flat

    def take(like: Any) -> list[Any]:
        leaves: list[Any] = []
        for name, below in zip(names, takes, strict=True):
            leaves += below(like[name])
        return leaves

    return take


def flatten_without_none(nest: Any) -> tuple[list[Any], Structure]:
    """Do `flatten`, but leave out the leaves that are None: they belong to the structure.

    >>> leaves, structure = flatten_without_none([1, None])
    >>> leaves, structure.text, structure.pack([10])
    ([1], '[*,None]', [10, None])
    """
    return flatten(nest, _NONE)


def map_structure(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return `nest` with `function` applied to every leaf."""
    leaves, structure = flatten(nest)
    return structure.pack([function(leaf) for leaf in leaves])


def leaf_paths(nest: Any, with_none: bool = False) -> list[str]:
    """Return how to reach each leaf, in the order of `flatten_without_none`, e.g. ``["['a']", "['b'][0]"]``."""
    return [path for path, leaf in _walk(nest, "") if with_none or leaf is not None]


def _walk(nest: Any, path: str) -> Iterator[tuple[str, Any]]:
    container = _container_of(nest)
    if container is None:
        yield path, nest
        return
    for name, child in zip(container.names, container.children, strict=True):
        yield from _walk(child, path + container.step(name))


def _is_record(nest: Any) -> bool:
    if not dataclasses.is_dataclass(nest) or isinstance(nest, type):
        return False
    return not getattr(nest, "is_leaf", False) and not hasattr(nest, "__array__")  # zarr's arrays are dataclasses


def sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Return the keys in the order of their leaves."""
    try:
        return sorted(mapping)
    except (TypeError, ValueError, RuntimeError):  # NumPy's and torch's: of arrays and tensors as keys
        keys = sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))
    if len({*map(repr, keys)}) < len(keys):
        raise StructureError.at(
            "a dict", found=f"keys without an order, of one text: {keys!r:.200}", expected="keys such as texts"
        )
    return keys


# ----------------------------------------------------------------------------------- nests of a structure that is known


def leaves_of(nest: Any) -> Structure | None:
    """Return the structure of nests that is known with it: one that has `Structure.take`, and leaves; else None."""
    structure = flatten(nest)[1]
    return structure if structure.take is not None and structure.num_leaves else None
