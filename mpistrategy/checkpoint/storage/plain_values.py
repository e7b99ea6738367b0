"""Plain values as JSON: ints of any size, all bits of floats, tuples as tuples.

A type that JSON does not have is an object with one key, which names the type; a dict is a list of pairs, so that its
keys cannot be mistaken for such a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
