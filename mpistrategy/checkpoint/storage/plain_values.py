"""Plain values as JSON: ints of any size, all bits of floats, tuples as tuples.

A type that JSON does not have is an object with one key, which names the type; a dict is a list of pairs, so that its
keys cannot be mistaken for such a name.

The states of NumPy's random generators are such values.  NumPy checks little of a state, so it is checked here.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

#: Returned for a value that is not plain; None is plain.
NOT_PLAIN = object()
#: Stands for an object that is not there; None is a value.
ABSENT = object()
#: The deepest nest of plain values.
_DEEPEST = 100


def to_json(value: Any) -> Any:
    """Return a nest of Python's own numbers, strings, None, lists, tuples and dicts as JSON; else `NOT_PLAIN`.

    Keys of dicts are strings or ints.  Subclasses (named tuples, enums) are not plain: they would lose their class.
    Nor is what holds itself.
    """
    try:
        return _packed(value, 0)
    except TypeError:
        return NOT_PLAIN


def _packed(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if depth <= _DEEPEST and kind in (list, tuple):
        items = [_packed(item, depth + 1) for item in value]
        return items if kind is list else {"tuple": items}
    if depth <= _DEEPEST and kind is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _packed(item, depth + 1)] for key, item in value.items()]}
    raise TypeError("not plain")


#: What returns the value, by the type that is named.
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(from_json, items)),
    "dict": lambda pairs: {key: from_json(item) for key, item in pairs},
}


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: for JSON that it does not return.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, list):
        return [from_json(item) for item in value]
    ((kind, inner),) = value.items()
    return _READERS[kind](inner)


def below(path: str, key: Any) -> str:
    """Return the path of the element `key` of the object at `path`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


# ------------------------------------------------------------------------------------------------ random generators

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
