"""Are two encoded values the same?  Bit for bit, or to the rounding that the table below states.

dtype, shape, structure and the kind of container must agree always; the number -0.0 is not 0.0; not-a-number
equals itself.  A tensor, an ndarray, a NumPy scalar and a variable's copy are all "an array": NumPy returns
scalars where TensorFlow has 0-d tensors.  A Python number is not an array.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from .values import Json, array_of, is_array, leaves

#: Exceptions that tf.distribute documents: ours must be that type or a subclass.
DOCUMENTED = ("ValueError", "TypeError", "RuntimeError", "NotImplementedError", "IndexError")
#: Exceptions that only a user's function raises, and the end of an iteration: they must come back unchanged.
USERS_OWN = ("KeyError", "StopIteration")
#: What counts as a typed error of ours, where TensorFlow failed by an accident of its internals.
TYPED = ("MpiStrategyError", *DOCUMENTED)
#: What a worker notes of a write's result: a pending assignment of the graph, where ours is the variable.
PENDING = {"kind", "same object as the variable"}
#: Training loops in float64: a product of matrices adds up in another order.  That compat.v1 and Keras optimizers keep
#: hyper-parameters in float32 (1e-8, Adam 1e-6) is no rounding: ours are given the rounded ones.
STEPS = 1e-13


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place where an outcome is not what was recorded."""

    path: str
    expected: Json
    found: Json

    @property
    def name(self) -> str:
        """The observation that differs: the path without what is inside the value."""
        return self.path.partition("[")[0]


# ------------------------------------------------------------------------------------------------ rounding


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an outcome may be from a recording.

    Integers, booleans, strings and floating-point sums of at most two values are exact: every order is the same.  Sums
    of more values may differ by one unit in the last place a value, in MPI's order; and so may float16 and bfloat16,
    which are summed in float32 and rounded once, where TensorFlow rounds every step.

    Attributes:
        num_values: how many values one element of the result may be the sum of.
        magnitude: the largest finite magnitude among the inputs.
        numbers: the relative error of bare numbers, which are exact but in training loops and in shares of a total.
    """

    num_values: int = 1
    magnitude: float = 0.0
    numbers: float = 0.0

    @classmethod
    def of_case(cls, case: Json) -> Tolerance:
        """Derive it from the inputs: one value a replica, times the longest leaf when an axis is reduced too."""
        inputs = case.get("inputs") or {}
        arrays = [array_of(leaf) for leaf in leaves(inputs) if is_array(leaf) and leaf["dtype"] != "string"]
        along_axis = max((a.size for a in arrays), default=1) if inputs.get("axis") is not None else 1
        magnitude = max(map(_magnitude, arrays), default=0.0)
        return cls(case["num_replicas"] * along_axis, magnitude, _shares(inputs))

    @classmethod
    def of_training(cls, case: Json) -> Tolerance:
        """Derive it for a program whose observations are the bare numbers of a training loop."""
        floats = [abs(leaf) for leaf in leaves(case.get("inputs") or {}) if type(leaf) is float]
        return cls(magnitude=max(floats, default=0.0), numbers=STEPS)

    def numbers_agree(self, expected: Json, found: Json) -> bool:
        """Return whether two bare numbers, texts or None are the same, or floats within the tolerance."""
        if type(expected) is not type(found):
            return False
        if type(expected) is not float:
            return bool(expected == found)
        return abs(expected - found) <= self.numbers * max(self.magnitude, abs(expected))

    def allowed(self, expected: np.ndarray[Any, Any]) -> float:
        """Return the largest absolute difference that counts as rounding."""
        is_half = expected.dtype.name in ("float16", "bfloat16")
        if not is_half and (expected.dtype.kind not in "fc" or self.num_values <= 2):
            return 0.0
        epsilon = ml_dtypes.finfo(expected.dtype).eps  # type: ignore[no-untyped-call]
        return float(epsilon) * self.num_values * max(self.magnitude, _magnitude(expected))


def _shares(inputs: Json) -> float:
    """Return what the copies of a total may differ by: TensorFlow divides it, ours leaves the residue to rank 0."""
    initial, policy = inputs.get("initial"), [inputs.get(key) for key in ("synchronization", "aggregation", "op")]
    if policy != ["ON_READ", "SUM", "assign"] or not is_array(initial) or not initial["dtype"].startswith("float"):
        return 0.0
    return float(np.finfo(initial["dtype"]).eps)


def _magnitude(array: np.ndarray[Any, Any]) -> float:
    values = np.abs(array.astype(np.complex128))
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


# ------------------------------------------------------------------------------------------------ comparison


def differences(expected: Json, found: Json, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    """Yield every place where `found` is not `expected`; what lives on another rank is not looked at."""
    if isinstance(expected, dict) and isinstance(expected.get("error"), dict):
        if not (isinstance(found, dict) and kinds_agree(expected["error"], found.get("error"))):
            yield Difference(path, expected, found)
        return
    is_pending = isinstance(expected, dict) and set(expected) == PENDING
    if isinstance(found, dict) and ("elsewhere" in found if is_array(expected) else is_pending and "variable" in found):
        return
    pairs = _pairs(expected, found)
    if pairs is not None:
        for key, (want, got) in pairs.items():
            yield from differences(want, got, tolerance, f"{path}[{key}]")
    elif is_array(expected) and is_array(found):
        if not arrays_agree(expected, found, tolerance):
            yield Difference(path, expected, found)
    elif isinstance(expected, (dict, list)) or not tolerance.numbers_agree(expected, found):
        yield Difference(path, expected, found)


def _pairs(expected: Json, found: Json) -> dict[Any, Any] | None:
    """Return the children of two containers with the same keys, or of as many entries; else None."""
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return dict(enumerate(zip(expected, found, strict=True)))
    plain = isinstance(expected, dict) and isinstance(found, dict) and not is_array(expected)
    if not plain or set(expected) != set(found):
        return None
    pairs = {key: (want, found[key]) for key, want in expected.items()}
    if "dense_shape" in pairs:  # a tuple of ints, a list or an integer array of any width say the same
        pairs["dense_shape"] = (_shape(expected["dense_shape"]), _shape(found["dense_shape"]))
    return pairs


def _shape(node: Json) -> list[int] | None:
    return None if node is None else [int(array_of(n)) if is_array(n) else int(n) for n in _rows(node)]


def _rows(node: Json) -> list[Any]:
    if is_array(node):
        return list(array_of(node))
    return list(node["tuple"] if isinstance(node, dict) else node)


def arrays_agree(expected: Json, found: Json, tolerance: Tolerance) -> bool:
    """Return whether two encoded arrays agree in dtype, shape and values."""
    want, got = array_of(expected), array_of(found)
    if expected["dtype"] != found["dtype"] or want.shape != got.shape:
        return False
    allowed = tolerance.allowed(want)
    if not allowed:
        return _identical(want, got)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = want.astype(wide), got.astype(wide)
    finite = np.isfinite(a)
    close = bool(np.all(np.abs(a[finite] - b[finite]) <= allowed))
    return close and np.array_equal(a[~finite], b[~finite], equal_nan=True)


def _identical(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> bool:
    """Return whether two arrays have the same values and, where they are numbers, the same signs of zero."""
    if want.dtype.kind == "c":
        return _identical(want.real, got.real) and _identical(want.imag, got.imag)
    if want.dtype.kind != "f":
        return bool(np.array_equal(want, got))
    numbers = ~np.isnan(want)
    same_sign = np.signbit(want[numbers]) == np.signbit(got[numbers])
    return bool(np.array_equal(want, got, equal_nan=True) and same_sign.all())


def kinds_agree(want: Json, got: Json) -> bool:
    """Return whether an exception of ours is the kind that was recorded.

    A documented type must be that type or a subclass; a user's own exception must be the same; where
    TensorFlow failed by an accident of its internals, any typed error of ours counts, and so does the very
    same accident of plain Python (``None.merge_call`` is an AttributeError everywhere).
    """
    if want is None or got is None:
        return want is got
    if want["type"] in DOCUMENTED or want["type"] in USERS_OWN:
        return want["type"] in lineage(got)
    python_accident = want["type"] == got["type"] == "AttributeError" and want["message"] == got["message"]
    return python_accident or bool(lineage(got) & set(TYPED))


def lineage(error: Json) -> set[str]:
    """Return the names of an encoded exception's class and of its base classes."""
    return {error["type"], *error.get("bases", ())}


def is_typed_error(outcome: Json) -> bool:
    """Return whether an outcome is an exception that says what was wrong."""
    return outcome["status"] == "error" and bool(lineage(outcome["error"]) & set(TYPED))


def short(node: Json, limit: int = 200) -> str:
    """Return an encoded value in one line."""
    text = json.dumps(node)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
