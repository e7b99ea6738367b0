"""Nested structures: taken apart and put together again, and described alike on every rank."""

from __future__ import annotations

import collections
import pickle
import shelve
import types
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest

pytestmark = pytest.mark.one_rank


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclass
class Model:
    weights: Any
    bias: Any
    steps: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    loss: Any


class Pair(tuple[Any, ...]):
    """A tuple subclass without fields."""


class Both(Point):
    """A namedtuple with a constructor of its own."""

    def __new__(cls, both: Any) -> Both:
        return cls._make(both)


class AttrDict(dict[str, Any]):
    """A dict whose attributes are its items."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


leaves = st.one_of(st.integers(), st.floats(allow_nan=False), st.none(), st.text(max_size=3), st.booleans())
keys = st.one_of(st.text(max_size=3), st.integers(0, 9), st.none(), st.tuples(st.integers(0, 2)))
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(Pair),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.tuples(inner, inner).map(Both),
        st.builds(Model, inner, inner),
        st.builds(Frozen, loss=inner),
    ),
    max_leaves=12,
)


@given(nests)
def test_flatten_and_pack_are_inverse(value: Any) -> None:
    flat, structure = nest.flatten(value)
    again = structure.pack(flat)
    numbered = structure.pack(list(range(len(flat))))
    assert nest.flatten(numbered)[0] == list(range(len(flat)))
    assert nest.flatten(numbered)[1].text == structure.text
    assert again == value
    assert type(again) is type(value)
    assert structure.num_leaves == len(flat) == len(nest.leaf_paths(value, with_none=True))


@given(st.dictionaries(keys, leaves, min_size=1), st.randoms())
def test_dictionaries_filled_in_another_order_agree(mapping: dict[Any, Any], random: Any) -> None:
    items = list(mapping.items())
    random.shuffle(items)
    shuffled = dict(items)
    (one, first), (two, second) = nest.flatten(mapping), nest.flatten(shuffled)
    assert first.text == second.text
    assert [repr(leaf) for leaf in one] == [repr(leaf) for leaf in two]
    # ... and each gets its leaves back under the same keys, in its own order
    assert list(second.pack(two).items()) == items


def test_the_documented_order_of_leaves() -> None:
    flat, structure = nest.flatten({"b": [1, (2, 3)], "a": Point(4, {"z": 5}), 7: None})
    assert flat == [None, 4, 5, 1, 2, 3]
    assert nest.leaf_paths({"b": [1, (2, 3)], "a": Point(4, {"z": 5})}) == [
        "['a'].x",
        "['a'].y['z']",
        "['b'][0]",
        "['b'][1][0]",
        "['b'][1][1]",
    ]
    assert structure.num_leaves == 6


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([1, 2], (1, 2)),
        ([1, 2], [1, [2]]),
        ([], ()),
        ({"a": 1}, {"b": 1}),
        ({"1": 1}, {1: 1}),
        ({"a": 1}, [1]),
        (Point(1, 2), (1, 2)),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Frozen(loss=1), [1]),
        (1, [1]),
        ({"a,b": 1}, {"a": 1, "b": 1}),
        (["*"], [["*"]]),
        ({"a": {}}, {"a": []}),
    ],
)
def test_different_structures_have_different_texts(one: Any, two: Any) -> None:
    assert nest.flatten(one)[1].text != nest.flatten(two)[1].text


@pytest.mark.parametrize("leaf", [None, "text", b"bytes", np.ones(3), 1.5, {1, 2}, range(3), object(), Model])
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    flat, structure = nest.flatten(leaf)
    assert flat[0] is leaf
    assert structure.text == "*"
    assert structure.pack(["another"]) == "another"


@pytest.mark.parametrize(
    "mapping",
    [
        defaultdict(list, {"b": 1, "a": 2}),
        OrderedDict(b=1, a=2),
        collections.Counter({"b": 2, "a": 1}),
        collections.UserDict({"b": 1, "a": 2}),
        types.MappingProxyType({"b": 1, "a": 2}),
        collections.ChainMap({"b": 1}, {"a": 2}),
        AttrDict({"b": 1, "a": 2}),
        shelve.Shelf({b"b": pickle.dumps(1), b"a": pickle.dumps(2)}),  # a copy has the same memory
    ],
    ids=lambda mapping: type(mapping).__name__,
)
def test_other_mappings_keep_their_items(mapping: Any) -> None:
    flat, structure = nest.flatten(mapping)
    again = structure.pack([leaf * 10 for leaf in flat])
    assert not isinstance(mapping, dict) or type(again) is type(mapping)
    assert getattr(again, "default_factory", None) is getattr(mapping, "default_factory", None)
    assert dict(again) == {key: value * 10 for key, value in mapping.items()}
    assert getattr(again, "a", again["a"]) == again["a"]


def test_a_dataclass_is_replaced_not_changed() -> None:
    model = Model(1, {"b": 2})
    model.steps = 5
    mapped = nest.map_structure(lambda leaf: leaf * 10, model)
    assert (mapped.weights, mapped.bias) == (10, {"b": 20})
    assert (model.weights, model.bias, model.steps) == (1, {"b": 2}, 5)
    assert nest.leaf_paths(model) == [".weights", ".bias['b']"]


def test_a_namedtuple_of_numbers_is_not_one_array(strategy: ms.Strategy) -> None:
    reduced = strategy.extended.reduce_to("SUM", Point(1.5, 2.5), strategy.extended.worker_devices)
    assert type(reduced) is Point
    assert (float(reduced.x), float(reduced.y)) == (1.5, 2.5)


def test_a_structure_that_contains_itself_keys_of_one_text_and_too_few_leaves_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for bad in (endless, {complex("nan"): 1, complex("nan"): 2}):
        with pytest.raises(errors.StructureError):
            nest.flatten(bad)
    with pytest.raises((StopIteration, RuntimeError, ValueError)):
        nest.flatten([1, 2])[1].pack([1])
