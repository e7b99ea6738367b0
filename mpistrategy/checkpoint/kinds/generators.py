"""The states of NumPy's random generators as plain values, and what becomes of them on another number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from mpistrategy.checkpoint.storage.shards import shown
from mpistrategy.strategy.random_streams import Streams

Generator = np.random.Generator | np.random.RandomState
_ARRAY = "ndarray"
#: The dtypes in states of bit generators.
_WORDS = tuple(f"{order}u{size}" for size in (4, 8) for order in "<>=")
#: The largest values of the numbers in states.  NumPy does not check positions, and reads memory at them.
_LARGEST = {
    "pos": 624,  # of MT19937, among the words of its key
    "buffer_pos": 4,  # of Philox, among the numbers that it has ready
    "has_uint32": 1,
    "uinteger": 2**32 - 1,
    "has_gauss": 1,
    "inc": 2**128 - 1,
}


def state_of(generator: Generator) -> Any:
    """Return the state of a generator as a nest of plain values."""
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def set_state(generator: Generator, state: Any) -> None:
    """Give a generator a state that `state_of` returned.

    Raises:
        ValueError, TypeError, KeyError: for another kind of bit generator, and for what is no state.
    """
    if isinstance(generator, np.random.RandomState):
        generator.set_state(_checked(state))
    else:
        generator.bit_generator.state = _checked(state)


def check_state(generator: Generator, state: Any) -> None:
    """Raise what `set_state` would, and change nothing."""
    if isinstance(generator, np.random.RandomState):
        set_state(copy.deepcopy(generator), state)
    else:
        set_state(np.random.Generator(type(generator.bit_generator)(0)), state)


def jumped(state: Any, times: int) -> Any:
    """Return the state of a stream that is independent of this one: for a rank that was not there when it was saved.

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
    """Return the seed and the states of the streams that `Strategy.rng` made, those of this rank."""
    return {"seed": streams.seed, "shared": state_of(streams.shared), "replica": state_of(streams.replica)}


def set_streams(streams: Streams, states: list[Any], rank: int) -> None:
    """Give streams their states again.

    Args:
        streams: of the same seed.
        states: what `state_of_streams` returned on each rank that saved.
        rank: this rank's number; one that was not there then begins its own stream.
    """
    set_state(streams.shared, states[0]["shared"])
    own = states[rank]["replica"] if rank < len(states) else state_of(Streams(streams.seed, rank).replica)
    set_state(streams.replica, own)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return (_ARRAY, value.dtype.str, value.tolist())
    return value.item() if isinstance(value, np.generic) else value


def _checked(state: Any) -> Any:
    """Return a state as NumPy takes it; ValueError for numbers that its generator cannot have."""
    if not isinstance(state, dict):  # NumPy takes tuples, too: another way to give it the same numbers
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
        if value[1] not in _WORDS:  # some dtypes make much of a short list
            raise ValueError(f"an array of dtype {value[1]!r:.80}")
        return np.array(value[2], value[1])
    return value
