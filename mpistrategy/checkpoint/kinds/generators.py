"""NumPy's random generators, what `strategy.rng` returns, and the positions of iterators of distributed datasets.

Their states are plain values.  NumPy checks little of a state that it is given, so it is checked here.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np

from mpistrategy.checkpoint.state import UNDECIDED, Fit, Kind, Restore, State
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, Item
from mpistrategy.checkpoint.storage.plain_values import to_json
from mpistrategy.checkpoint.storage.shards import shown
from mpistrategy.errors import MpiStrategyError
from mpistrategy.input.iterators import DistributedIterator
from mpistrategy.strategy.random_streams import Streams

_AnyGenerator = np.random.Generator | np.random.RandomState
_ARRAY = "ndarray"
#: The largest position of an iterator.
_FARTHEST = 2**53
#: The dtypes of arrays in states of bit generators.
_WORDS = tuple(f"{order}u{size}" for size in (4, 8) for order in "<>=")
#: The largest values of numbers in states.  NumPy does not check positions before it reads memory at them.
_LARGEST = {
    "pos": 624,  # of MT19937, among the words of its key
    "buffer_pos": 4,  # of Philox, among the numbers that it has ready
    "has_uint32": 1,
    "uinteger": 2**32 - 1,
    "has_gauss": 1,
    "inc": 2**128 - 1,
}


class Generator(Kind):
    """One of NumPy's random generators; a rank that was not there gets an independent stream."""

    name = "rng"
    types: ClassVar[tuple[type, ...]] = (np.random.Generator, np.random.RandomState)

    def add(self, entries: State, path: str, value: Any) -> None:
        entries.add_value(path, self.name, UNDECIDED, to_json(state_of(value)))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not fit.expect(self.owns(value), path, item, value):
            return lambda: None
        state, times = fit.nearest_value(path, item), fit.rank // fit.manifest.ranks
        if item.copies != ONE and times:
            state = jumped(state, times)
        check_state(value, state)

        def restore() -> Any:
            set_state(value, state)
            return value

        return restore


class RankStreams(Kind):
    """What `strategy.rng` returns."""

    name = "streams"
    types: ClassVar[tuple[type, ...]] = (Streams,)

    def add(self, entries: State, path: str, value: Streams) -> None:
        entries.add_value(path, self.name, OWN, to_json(state_of_streams(value)))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not fit.expect(self.owns(value), path, item, value):
            return lambda: None
        first = fit.first_value(path, item)
        if first["seed"] != value.seed:
            return fit.problem(path, f"seed {first['seed']} in the checkpoint, {value.seed} here")
        own = fit.nearest_value(path, item)["replica"] if fit.rank < fit.manifest.ranks else None
        set_streams(Streams(value.seed, fit.rank), first["shared"], own, fit.rank)  # raises for states that are none

        def restore() -> Any:
            set_streams(value, first["shared"], own, fit.rank)
            return value

        return restore


class Position(Kind):
    """An iterator of a distributed dataset: its position."""

    name = "iterator"

    def owns(self, value: Any) -> bool:
        return isinstance(value, DistributedIterator) and value._walk is not None

    def add(self, entries: State, path: str, value: DistributedIterator[Any]) -> None:
        walk = value._walk
        assert walk is not None
        more = {"of": walk.of, "any_ranks": walk.any_ranks}
        entries.add_value(path, self.name, UNDECIDED, walk.position, more)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not fit.expect(self.owns(value), path, item, value):
            return lambda: None
        walk = value._walk
        if walk.of != item.more["of"]:
            return fit.problem(path, f"a position in {item.more['of']}; here it is {walk.of}")
        if not walk.any_ranks and not fit.same_ranks:
            return fit.problem(
                path, f"{fit.of_its_own(item)}; a Dataset given to experimental_distribute_dataset can go on"
            )
        position = fit.own_value(path, item)
        if type(position) is not int or not 0 <= position < _FARTHEST:
            return fit.problem(path, f"the position {shown(position)} in the checkpoint")
        try:
            value._check_can_go()
        except MpiStrategyError as error:
            return fit.problem(path, str(error))

        def restore() -> Any:
            value._go_to(position)
            return value

        return restore


def state_of(generator: _AnyGenerator) -> Any:
    """Return the state of a generator as a nest of plain values."""
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def set_state(generator: _AnyGenerator, state: Any) -> None:
    """Set the state of a generator to one that `state_of` returned.

    Raises:
        ValueError, TypeError, KeyError: for an invalid state, or one of another bit generator.
    """
    if isinstance(generator, np.random.RandomState):
        generator.set_state(_checked(state))
    else:
        generator.bit_generator.state = _checked(state)


def check_state(generator: _AnyGenerator, state: Any) -> None:
    """Raise what `set_state` would raise; change nothing."""
    if isinstance(generator, np.random.RandomState):
        set_state(copy.deepcopy(generator), state)
    else:
        set_state(np.random.Generator(type(generator.bit_generator)(0)), state)


def jumped(state: Any, times: int) -> Any:
    """Return the state of an independent stream, for a rank that was not there when `state` was saved.

    Raises:
        ValueError: for a bit generator that cannot jump.
    """
    full = _checked(state)
    kind = getattr(np.random, str(full["bit_generator"]), None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator) and hasattr(kind, "jumped")):
        raise ValueError(f"{full['bit_generator']} has no further streams")
    generator: Any = kind(0)
    generator.state = {key: full[key] for key in generator.state}
    return {**state, **_plain(generator.jumped(times).state)}


def state_of_streams(streams: Streams) -> Any:
    """Return the seed and the states of this rank's streams."""
    return {"seed": streams.seed, "shared": state_of(streams.shared), "replica": state_of(streams.replica)}


def set_streams(streams: Streams, shared: Any, own: Any, rank: int) -> None:
    """Restore the states of streams.

    Args:
        streams: of the same seed.
        shared: the state of the stream that all ranks share.
        own: the state of this rank's stream; None for a rank that was not there: its stream begins anew.
        rank: this rank.
    """
    set_state(streams.shared, shared)
    set_state(streams.replica, state_of(Streams(streams.seed, rank).replica) if own is None else own)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return (_ARRAY, value.dtype.str, value.tolist())
    return value.item() if isinstance(value, np.generic) else value


def _checked(state: Any) -> Any:
    """Return a state in NumPy's form; ValueError for numbers out of range."""
    if not isinstance(state, dict):  # NumPy would take a tuple of the same numbers, unchecked
        raise ValueError(f"a state of type {type(state).__name__}")
    holders = [_arrays(state)]
    for holder in holders:
        for name, value in holder.items():
            if isinstance(value, dict):
                holders.append(value)
            elif name in _LARGEST and not (type(value) is int and 0 <= value <= _LARGEST[name]):
                raise ValueError(f"{name}={shown(value)} in the state of a generator, at most {_LARGEST[name]}")
    return holders[0]


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and len(value) == 3 and value[0] == _ARRAY:
        if value[1] not in _WORDS:  # some dtypes make a large array of a short list
            raise ValueError(f"an array of dtype {value[1]!r:.80}")
        return np.array(value[2], value[1])
    return value
