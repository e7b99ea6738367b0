"""Plain values as JSON: ints of any size, all bits of floats, tuples as tuples.

A type that JSON does not have is an object with one key, which names the type; a dict is a list of pairs, so that its
keys cannot be mistaken for such a name.
"""

from __future__ import annotations

from typing import Any

#: Returned for a value that is not plain; None is plain.
NOT_PLAIN = object()
#: Stands for an object that is not there; None is a value.
ABSENT = object()
#: The deepest nest of plain values.
_DEEPEST = 100


def to_json(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return a nest of Python's own numbers, strings, None, lists, tuples and dicts as JSON; else `NOT_PLAIN`.

    Keys of dicts are strings or ints.  Subclasses (named tuples, enums) are not plain: they would lose their class.
    `inside` has the ids of the containers around the value.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if len(inside) > _DEEPEST or id(value) in inside:
        return NOT_PLAIN
    inside = (*inside, id(value))
    if type(value) in (list, tuple):
        items = [to_json(item, inside) for item in value]
        if any(item is NOT_PLAIN for item in items):
            return NOT_PLAIN
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        pairs = [[key, to_json(item, inside)] for key, item in value.items()]
        return NOT_PLAIN if any(item is NOT_PLAIN for _, item in pairs) else {"dict": pairs}
    return NOT_PLAIN


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
    if kind == "float":
        return float.fromhex(inner)
    if kind == "complex":
        real, imaginary = inner
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "tuple":
        return tuple(from_json(item) for item in inner)
    if kind == "dict":
        return {key: from_json(item) for key, item in inner}
    raise ValueError(f"a value of kind {kind!r}")


def below(path: str, key: Any) -> str:
    """Return the path of the element `key` of the object at `path`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
