"""Taking a nest of a known structure apart and putting it together again, without a walk where it is flat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from mpistrategy import nest
from mpistrategy.arrays import Array, span

_CONTAINERS = (dict, list, tuple)


@dataclass(frozen=True, slots=True)
class Leaves:
    """How to reach the leaves of nests of one structure, in the order of `nest.flatten`.

    Attributes:
        take: returns the leaves of a nest.
        build: returns the nest with these leaves.
        single: whether the nest is its own leaf.
        text: the structure, as `nest.Structure.text`.
        names: the keys of a flat dictionary that has them in the order of its leaves; None for other nests.
    """

    take: Callable[[Any], Sequence[Any]]
    build: Callable[[list[Any]], Any]
    single: bool
    text: str
    names: list[Any] | None = None


def leaves_of(value: Any) -> Leaves | None:
    """Return how to reach the leaves of nests like `value`; None unless it is made of dict, list and tuple alone."""
    if not _plain(value):
        return None
    structure = nest.flatten(value)[1]
    kind = type(value)
    if kind not in _CONTAINERS:
        return Leaves(_alone, _first, True, structure.text)
    children: Iterable[Any] = value.values() if kind is dict else value
    if any(type(child) in _CONTAINERS for child in children):
        return Leaves(lambda like: nest.flatten(like)[0], structure.pack, False, structure.text)
    if kind is not dict:
        return Leaves(tuple if kind is list else _itself, kind, False, structure.text)
    names = list(value)
    in_order = nest.sorted_keys(value)
    take: Callable[[Any], Sequence[Any]] = itemgetter(*in_order) if len(names) > 1 else lambda like: (like[names[0]],)
    if names == in_order:
        return Leaves(take, lambda results: dict(zip(names, results, strict=True)), False, structure.text, names)
    places = itemgetter(*(in_order.index(name) for name in names))
    return Leaves(take, lambda results: dict(zip(names, places(results), strict=True)), False, structure.text)


def direct_targets(
    out: Any, value: Any, where: Leaves, arrays: Sequence[Array], dtypes: Sequence[Any], useful: bool
) -> list[Array | None] | None:
    """Return for each leaf of `out` the array itself where a result may be written to it while others are read.

    None in the place of a leaf means that its result must be copied there at the end (everywhere, unless `useful`);
    None altogether, that `out` needs the checks of the general way.
    """
    alike = out is value or (where.single and type(out) is np.ndarray)
    if not alike and (not _plain(out) or nest.flatten(out)[1].text != where.text):
        return None
    targets = where.take(out)
    for target, array, dtype in zip(targets, arrays, dtypes, strict=True):
        fits = type(target) is np.ndarray and target.dtype == dtype and target.shape == array.shape
        if not fits or not target.flags.writeable or not target.dtype.isnative:
            return None
    if len({id(target) for target in targets}) < len(targets):
        return None
    if not useful:
        return [None] * len(targets)
    sources = [array for target, array in zip(targets, arrays, strict=True) if target is not array]
    # Arrays that own their memory share none with each other; a single one in place has nobody to share it with.
    alone = not sources and (len(targets) == 1 or all(target.base is None for target in targets))
    if alone or _apart([*targets, *sources]):
        return [target if target.flags.c_contiguous else None for target in targets]
    return [None] * len(targets)


def _apart(arrays: Sequence[Array]) -> bool:
    """Return whether no two arrays reach into the same span of memory."""
    spans = sorted(span(array) for array in arrays if array.size)
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _plain(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray:
        return True
    if kind is dict:
        return all(map(_plain, value.values()))
    if kind is list or kind is tuple:
        return all(map(_plain, value))
    return not nest.is_container(value)


def _alone(value: Any) -> tuple[Any]:
    return (value,)


def _first(results: list[Any]) -> Any:
    return results[0]


def _itself(value: Any) -> Any:
    return value
