"""The states of NumPy's random generators, as plain values.

NumPy checks little of a state, so the state is checked here.
"""

from __future__ import annotations

import copy
import reprlib
from typing import Any, TypeAlias

import numpy as np

AnyGenerator: TypeAlias = np.random.Generator | np.random.RandomState
GENERATORS = (np.random.Generator, np.random.RandomState)
#: The largest values of numbers in states.  NumPy does not check positions before it reads memory at them.
_LARGEST = {
    "pos": 624,  # of MT19937, among the words of its key
    "buffer_pos": 4,  # of Philox, among the numbers that it has ready
    "has_uint32": 1,
    "uinteger": 2**32 - 1,
    "has_gauss": 1,
    "inc": 2**128 - 1,
}


def state_of(generator: AnyGenerator) -> Any:
    """Return the state of a generator as a nest of plain values."""
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def set_state(generator: AnyGenerator, state: Any) -> None:
    """Set the state of a generator to a state that `state_of` returned.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: for an invalid state, or a state of another bit generator.
    """
    _check(state)
    if isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def checked_state(generator: AnyGenerator, state: Any, times: int) -> Any:
    """Return a state for `set_state`; with `times`, of a stream independent of it and of the streams of fewer times.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: as `set_state`.
        AttributeError: for a bit generator that has no other streams.
    """
    set_state(copy.deepcopy(generator), state)
    if not times:
        return state
    bits = getattr(np.random, state["bit_generator"])(0)
    bits.state = {key: state[key] for key in bits.state}
    return {**state, **_plain(bits.jumped(times).state)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _check(state: Any) -> None:
    """Raise ValueError for numbers that NumPy does not check."""
    if not isinstance(state, dict):  # NumPy would take a tuple of the same numbers
        raise ValueError(f"a state of type {type(state).__name__}")
    for name, value in state.items():
        if name in _LARGEST and not (type(value) is int and 0 <= value <= _LARGEST[name]):
            raise ValueError(f"{name}={reprlib.repr(value)} in the state of a generator, at most {_LARGEST[name]}")
        if isinstance(value, dict):
            _check(value)
