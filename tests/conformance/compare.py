"""Are two encoded values the same?  Bit for bit, or to the rounding that the table below states.

dtype, shape, structure and the kind of container must agree always; the number -0.0 is not 0.0; not-a-number
equals itself.  A tensor, an ndarray, a NumPy scalar and a variable's copy are all "an array": NumPy returns
scalars where TensorFlow has 0-d tensors.  A Python number is not an array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from .values import ARRAY_KEYS, Json, array_of, is_array, leaves


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
class Rounding:
    """One row of the table of roundings: when it holds, and how many units in the last place are allowed.

    The unit is the dtype's epsilon times the largest finite magnitude among the case's inputs and the
    recorded value, times the number of values that were summed: the bound for a sum in any order.  Programs that
    record the bare numbers of a training loop name their own row; there a number may differ by `relative` times the
    largest magnitude among the case's floating-point inputs and the number itself.
    """

    why: str
    units_per_value: float = 0
    relative: float = 0.0


EXACT = Rounding(
    "integers, booleans, strings, and floating-point sums of at most two values: every order is the same", 0
)
ANY_ORDER = Rounding("floating-point sums of more than two values: the order is MPI's", 1)
HALF = Rounding("float16 and bfloat16: summed in float32 and rounded once, where TensorFlow rounds every step", 1)
SHARES = Rounding(
    "copies that share a floating-point total: TensorFlow divides it, ours leaves the residue to rank 0, within one"
    " unit in the last place of the variable's dtype"
)
STEPS = Rounding(
    "training loops in float64: a product of matrices adds up in another order.  That compat.v1 and Keras optimizers"
    " keep hyper-parameters in float32 (1e-8, Adam 1e-6) is no rounding: ours are given the rounded ones",
    relative=1e-13,
)


def shares_of(case: Json) -> Rounding:
    """Return the row for the bare copies of a variable: the parts of an ON_READ total are exact to one unit only."""
    inputs = case.get("inputs") or {}
    policy = [inputs.get(key) for key in ("synchronization", "aggregation", "op")]
    shared = policy == ["ON_READ", "SUM", "assign"]
    initial = inputs.get("initial")
    if not shared or not is_array(initial) or not initial["dtype"].startswith("float"):
        return EXACT
    return dataclasses.replace(SHARES, relative=float(np.finfo(initial["dtype"]).eps))


def rounding_for(dtype: str, num_values: int) -> Rounding:
    """Return the row of the table for results of `dtype` made of `num_values` values each."""
    if dtype in ("float16", "bfloat16"):
        return HALF
    if dtype.startswith(("float", "complex")) and num_values > 2:
        return ANY_ORDER
    return EXACT


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What the table of roundings means for one case.

    Attributes:
        num_values: how many values one element of the result may be the sum of.
        magnitude: the largest finite magnitude among the inputs.
        numbers: the row of the table for the bare numbers of a training loop.
    """

    num_values: int = 1
    magnitude: float = 0.0
    numbers: Rounding = EXACT

    @classmethod
    def of_case(cls, case: Json) -> Tolerance:
        """Derive it from a case's inputs: one value a replica, times the longest leaf when an axis is reduced
        too."""
        inputs = case.get("inputs") or {}
        arrays = [array_of(leaf) for leaf in leaves(inputs) if is_array(leaf) and leaf["dtype"] != "string"]
        along_axis = max((a.size for a in arrays), default=1) if inputs.get("axis") is not None else 1
        magnitude = max((_magnitude(a) for a in arrays), default=0.0)
        return cls(case["num_replicas"] * along_axis, magnitude, shares_of(case))

    @classmethod
    def of_training(cls, case: Json, numbers: Rounding) -> Tolerance:
        """Derive it for a program whose observations are the bare numbers of a training loop."""
        floats = [abs(leaf) for leaf in leaves(case.get("inputs") or {}) if type(leaf) is float]
        return cls(magnitude=max(floats, default=0.0), numbers=numbers)

    def numbers_agree(self, expected: Json, found: Json) -> bool:
        """Return whether two bare floats differ by no more than the table allows."""
        if not type(expected) is type(found) is float:
            return False
        return abs(expected - found) <= self.numbers.relative * max(self.magnitude, abs(expected))

    def allowed(self, expected: np.ndarray[Any, Any], dtype: str) -> float:
        """Return the largest absolute difference that counts as rounding."""
        rounding = rounding_for(dtype, self.num_values)
        if not rounding.units_per_value:
            return 0.0
        scale = max(self.magnitude, _magnitude(expected))
        return rounding.units_per_value * self.num_values * _epsilon(expected.dtype) * scale


def _magnitude(array: np.ndarray[Any, Any]) -> float:
    if array.dtype.kind in "OSU":
        return 0.0
    values = np.abs(array.astype(np.complex128))
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _epsilon(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------ comparison


def differences(expected: Json, found: Json, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    """Yield every place where `found` is not `expected`."""
    if is_array(expected):
        if not (is_array(found) and arrays_agree(expected, found, tolerance)):
            yield Difference(path, expected, found)
    elif isinstance(expected, list):
        yield from _list_differences(expected, found, tolerance, path)
    elif isinstance(expected, dict) and "IndexedSlices" in expected:
        yield from _slices_differences(expected, found, tolerance, path)
    elif isinstance(expected, dict):
        yield from _dict_differences(expected, found, tolerance, path)
    elif (type(expected) is not type(found) or expected != found) and not tolerance.numbers_agree(expected, found):
        yield Difference(path, expected, found)


def _list_differences(expected: Json, found: Json, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    if not isinstance(found, list) or len(found) != len(expected):
        yield Difference(path, expected, found)
        return
    for index, (want, got) in enumerate(zip(expected, found, strict=True)):
        yield from differences(want, got, tolerance, f"{path}[{index}]")


def _dict_differences(expected: Json, found: Json, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    if not isinstance(found, dict) or set(found) != set(expected):
        yield Difference(path, expected, found)
        return
    for key, want in expected.items():
        yield from differences(want, found[key], tolerance, f"{path}[{key}]")


def _slices_differences(expected: Json, found: Json, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    if not isinstance(found, dict) or "IndexedSlices" not in found:
        yield Difference(path, expected, found)
        return
    want, got = expected["IndexedSlices"], found["IndexedSlices"]
    for part in ("values", "indices"):
        yield from differences(want[part], got[part], tolerance, f"{path}[{part}]")
    if _shape_numbers(want["dense_shape"]) != _shape_numbers(got["dense_shape"]):
        yield Difference(f"{path}[dense_shape]", want["dense_shape"], got["dense_shape"])


def _shape_numbers(node: Json) -> list[int] | None:
    """A dense_shape is a shape: a tuple of ints, a list or an integer array of any width say the same."""
    if node is None:
        return None
    if is_array(node):
        return [int(n) for n in array_of(node)]
    return [int(array_of(n)) if is_array(n) else int(n) for n in (node["tuple"] if isinstance(node, dict) else node)]


def arrays_agree(expected: Json, found: Json, tolerance: Tolerance) -> bool:
    """Return whether two encoded arrays agree in dtype, shape and values."""
    want, got = array_of(expected), array_of(found)
    if expected["dtype"] != found["dtype"] or want.shape != got.shape:
        return False
    if expected["dtype"] == "string":
        return bool(np.array_equal(want, got))
    allowed = tolerance.allowed(want, expected["dtype"])
    return _close(want, got, allowed) if allowed else _identical(want, got)


def _identical(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> bool:
    if want.dtype.kind not in "fc":
        return bool(np.array_equal(want, got))
    parts = ("real", "imag") if want.dtype.kind == "c" else ("real",)
    return all(_identical_reals(getattr(want, part), getattr(got, part)) for part in parts)


def _identical_reals(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> bool:
    numbers = ~np.isnan(want)
    same_sign = np.signbit(want[numbers]) == np.signbit(got[numbers])
    return bool(np.array_equal(want, got, equal_nan=True) and same_sign.all())


def _close(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any], allowed: float) -> bool:
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = want.astype(wide), got.astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    return bool(np.all(np.abs(a[finite] - b[finite]) <= allowed))


def short(node: Json, limit: int = 200) -> str:
    """Return an encoded value in one readable line."""
    text = _short(node)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _short(node: Json) -> str:
    if is_array(node):
        key = next(k for k in ARRAY_KEYS if k in node)
        return f"{node['dtype']}{node.get('shape', [])}{node[key]}"
    if isinstance(node, list):
        return f"[{', '.join(map(_short, node))}]"
    if not isinstance(node, dict):
        return repr(node)
    if isinstance(node.get("error"), dict):
        return f"{node['error']['type']}({node['error']['message'][:120]!r})"
    if "tuple" in node:
        return f"({', '.join(map(_short, node['tuple']))},)"
    return f"{{{', '.join(f'{key}: {_short(child)}' for key, child in node.items())}}}"
