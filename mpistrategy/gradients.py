"""Helpers for gradients before they are applied: accumulate them, and clip their norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array, is_on_device, like_given, on_device_of_any, placed_as, reducible
from mpistrategy.arrays.dtypes import Array, dtype_name, wire_dtype
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import DTypeError, ShapeError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.kept import Kept, Leaf, ObjectAt, PathOf
from mpistrategy.objects.settings import Fixed, Settable, checked_count, checked_number, positive
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.inputs import checked_slices

__all__ = [
    "GradientAccumulator",
    "clip_by_global_norm",
    "global_norm",
]


def __dir__() -> list[str]:
    return list(__all__)


#: How many elements are squared at once.
_PART = 2**24


def global_norm(arrays: Sequence[Any]) -> float:
    """Return the Euclidean norm of all elements of all arrays, summed in float64; local.

    Args:
        arrays: of any numeric dtypes and shapes; None is left out.  Rows of IndexedSlices with the same index are added
            first, as in the dense array.

    Raises:
        LeafError, DTypeError, ShapeError: for values that are no numeric arrays.
    """
    dense = [_rows_added(array, "global_norm") for array in arrays if array is not None]
    with on_device_of_any(dense):
        return float(np.sqrt(float(sum(map(_sum_of_squares, dense)))))


def _sum_of_squares(array: Any) -> Any:
    """Return a float64 number on the array's device; part by part, which takes less room."""
    flat = array.ravel()
    parts = (flat[start : start + _PART] for start in range(0, flat.size, _PART))
    return sum(np.square(np.abs(part), dtype=np.float64).sum() for part in parts)


def clip_by_global_norm(arrays: Sequence[Any], clip_norm: float) -> tuple[list[Any], float]:
    """Scale arrays so that their `global_norm` is at most `clip_norm`; local.

    Clip gradients after the reduction, or pass ``global_clipnorm`` to the optimizer, which does so: the norm of a sum
    is not the sum of the norms.

    Args:
        arrays: floating or complex arrays, and IndexedSlices of them; None stays None.
        clip_norm: a positive number.

    Returns:
        The scaled arrays, in their dtypes and kinds of array, and the norm before scaling.  If the norm is not
        finite, all numbers become NaN.

    Raises:
        OptionTypeError, OptionError: for a clip_norm that is not a positive number.
        LeafError, DTypeError, ShapeError: for values that are no arrays of such numbers.
    """
    where = "clip_by_global_norm"
    if clip_norm != np.inf:  # infinity only asks for the norm
        checked_number(where, "clip_norm", clip_norm, "a positive number", positive)
    originals = [array for array in arrays if array is not None]
    parts = [_checked(array, where) for array in originals]
    values = [_values(part) for part in parts]
    for array in values:
        if array.dtype.kind in "iu":
            raise DTypeError.at(where, found=f"dtype {dtype_name(array.dtype)}", expected="a floating dtype")
    norm = global_norm(parts)
    scaled = scaled_by(values, scale_for(norm, clip_norm))
    results = iter([_like(*triple) for triple in zip(parts, scaled, originals, strict=True)])
    return [None if array is None else next(results) for array in arrays], norm


def scale_for(norm: float, most: float) -> float:
    """Return the factor that makes a norm at most `most`; NaN for a norm that is not finite."""
    if not np.isfinite(norm):
        return np.nan
    return min(1.0, most / norm) if norm else 1.0


def _checked(gradient: Any, where: str) -> Any:
    """Return a gradient as an array that can be reduced, or as IndexedSlices of one."""
    if isinstance(gradient, IndexedSlices):
        return checked_slices(gradient, ReduceOp.SUM, where)
    return reducible(gradient, where)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient


def _with_values(gradient: Any, values: Any) -> Any:
    """Return other values for a gradient: as an array, or as IndexedSlices of the gradient's rows."""
    is_sparse = isinstance(gradient, IndexedSlices)
    return IndexedSlices(values, gradient.indices, gradient.dense_shape) if is_sparse else values


def _like(gradient: Any, values: Any, original: Any) -> Any:
    """Return `_with_values`, as the kind of array of `original`; None where an argument is None."""
    return (
        gradient
        if original is None or gradient is None
        else _with_values(gradient, like_given(values, _values(original)))
    )


def _rows_added(gradient: Any, where: str) -> Any:
    """Return a gradient as an array; of IndexedSlices the rows, added where they have the same index."""
    gradient = _checked(gradient, where)
    if not isinstance(gradient, IndexedSlices):
        return gradient
    values = host_array(gradient.values)
    rows, places = np.unique(host_array(gradient.indices), return_inverse=True)
    added = np.zeros((len(rows), *values.shape[1:]), wire_dtype(values.dtype))
    np.add.at(added, places.reshape(-1), values)
    return placed_as(added, gradient.values)


def scaled_by(arrays: Sequence[Array], scale: float) -> list[Array]:
    """Return arrays times a number, in their dtypes."""
    with on_device_of_any(arrays):
        return [(_widened(array) * scale).astype(array.dtype, copy=False) for array in arrays]


_WHERE = "GradientAccumulator.add"


class GradientAccumulator(Kept, Settable):
    """Adds up gradients over several steps without communication, so that one reduction is enough for all of them.

    A checkpoint in the middle of a group keeps sums of IndexedSlices as dense arrays: the update after a restore takes
    their other rows for rows with a gradient of 0, which momentum, for example, moves.

    Args:
        steps: the number of steps for each update; 1 or more.

    Raises:
        OptionTypeError, OptionError: for steps that are no int, or below 1.

    >>> accumulator = GradientAccumulator(steps=2)
    >>> accumulator.add([np.ones(2)])
    >>> accumulator.add([np.ones(2)])
    [array([2., 2.])]
    """

    _kept_as = "accumulator"
    steps: Fixed[int] = Fixed()

    def __init__(self, steps: int) -> None:
        self.steps = checked_count("GradientAccumulator", "steps", steps)
        self._count = 0
        self._sums: list[Any] = []
        self._dtypes: list[np.dtype[Any] | None] = []

    def __repr__(self) -> str:
        return f"<GradientAccumulator with {self._count} of {self.steps} steps>"

    def add(self, gradients: Sequence[Any]) -> list[Any] | None:
        """Add one step's gradients; local.  After an error nothing has been added.

        Args:
            gradients: arrays, IndexedSlices, or None for a variable without a gradient in this step.

        Returns:
            At every `steps`-th call the sums, for an optimizer, in the gradients' kind of array; the next call starts
            at 0.  Else None.  A sum of None alone is None; a sum of IndexedSlices has the rows of all of them.

        Raises:
            ShapeError: when the number or the shapes of gradients differ from the step before.
            LeafError, DTypeError: for values that are no numeric arrays.
            ContextError: in a function that JAX traces.
        """
        refuse_in_jax_trace("GradientAccumulator.add")
        gradients = list(gradients)
        checked = [None if gradient is None else _checked(gradient, _WHERE) for gradient in gradients]
        terms = [
            None if gradient is None else _with_values(gradient, _widened(_values(gradient))) for gradient in checked
        ]
        before = self._sums if self._count else [None] * len(terms)
        if len(before) != len(terms) or not all(map(_fit, before, terms)):
            raise ShapeError.at(
                _WHERE,
                found=f"gradients of shapes {[*map(_shape, terms)]}",
                expected=f"shapes {[*map(_shape, before)]}, as in the step before",
            )
        old_dtypes = self._dtypes if self._count else [None] * len(terms)
        dtypes = [
            dtype
            if gradient is None
            else _values(gradient).dtype
            if dtype is None
            else np.promote_types(dtype, _values(gradient).dtype)
            for gradient, dtype in zip(checked, old_dtypes, strict=True)
        ]
        self._sums, self._dtypes = [*map(_sum, before, terms)], dtypes
        self._count += 1
        totals = self.take() if self._count >= self.steps else None
        return totals and [
            _like(total, _values(total), gradient) for total, gradient in zip(totals, gradients, strict=True)
        ]

    def _state(self, path_of: PathOf) -> dict[Any, Any]:
        sums = {
            number: Leaf(total.to_dense() if isinstance(total, IndexedSlices) else total, "SUM")
            for number, total in enumerate(self._sums if self._count else [])
            if total is not None
        }
        dtypes = [None if dtype is None else np.empty(0, dtype) for dtype in self._dtypes] if self._count else []
        return {"steps": self.steps, "count": self._count, "dtypes": dtypes, **sums}

    def _check(self, saved: Mapping[Any, Any], at: ObjectAt) -> str:
        steps, count, dtypes = saved["steps"], saved["count"], saved["dtypes"]
        if steps != self.steps:
            return f"steps={steps!r} in the checkpoint, steps={self.steps} here"
        sums = [saved.get(number) for number in range(len(dtypes))]
        is_sound = type(count) is int and 0 <= count < steps and bool(count) == bool(dtypes)
        return "" if is_sound and all(map(_is_sum, sums, dtypes)) else f"no sums of {count!r:.20} of {steps} steps"

    def _load(self, saved: Mapping[Any, Any]) -> None:
        self._dtypes = [None if like is None else like.dtype for like in saved["dtypes"]]
        self._count, self._sums = saved["count"], [saved.get(number) for number in range(len(self._dtypes))]

    def take(self) -> list[Any] | None:
        """Return the sums so far, and start at 0; None without any.  For a last group of fewer steps."""
        refuse_in_jax_trace("GradientAccumulator.take")
        if not self._count:
            return None
        self._count = 0
        with np.errstate(over="ignore"):
            return [
                _with_values(total, _values(total).astype(dtype, copy=False)) if dtype is not None else total
                for total, dtype in zip(self._sums, self._dtypes, strict=True)
            ]


def _is_sum(total: Any, like: Any) -> bool:
    """Return whether an array has sums of gradients of the dtype of another array; of no gradients, both are None."""
    if total is None or like is None:
        return total is like
    return bool(total.dtype == wire_dtype(like.dtype) and total.dtype.kind not in "mMSU")


def _widened(array: Any) -> Any:
    """Return an array as it is added: 16-bit floats in 32 bits, as in a reduction."""
    with on_device_of_any([array]):
        return array.astype(wire_dtype(array.dtype), copy=False)


def _shape(gradient: Any) -> tuple[int, ...] | None:
    """Return the shape of a gradient as a dense array; of IndexedSlices without `dense_shape`, the shape of a row."""
    if isinstance(gradient, IndexedSlices):
        dense_shape = gradient.dense_shape
        return gradient.values.shape[1:] if dense_shape is None else tuple(int(n) for n in host_array(dense_shape))
    return None if gradient is None else tuple(gradient.shape)


def _fit(total: Any, gradient: Any) -> bool:
    """Return whether a gradient may be added to a sum."""
    return total is None or gradient is None or _shape(total) == _shape(gradient)


def _sum(total: Any, gradient: Any) -> Any:
    """Return the sum of two gradients that fit, in new memory."""
    if gradient is None:
        return total
    if isinstance(gradient, IndexedSlices):
        parts = [gradient] if total is None else [total, gradient]
        if not isinstance(total, np.ndarray) and not is_on_device(total):
            values, indices = [part.values for part in parts], [host_array(part.indices) for part in parts]
            with on_device_of_any(values):
                joined = np.concatenate([placed_as(array, values[-1]) for array in values])
            return IndexedSlices(joined, np.concatenate(indices), gradient.dense_shape)
        gradient = gradient.to_dense()
    if isinstance(total, IndexedSlices):
        total = total.to_dense()
    with on_device_of_any([gradient]):
        # Sums that were restored are on the host.
        return gradient.copy() if total is None else placed_as(total, gradient) + gradient


def as_dense(gradient: Any, like: Any) -> Array:
    """Return a gradient as an array of the dtype of `like`; IndexedSlices become an array of its shape."""
    if isinstance(gradient, IndexedSlices):
        values = host_array(gradient.values).astype(like.dtype, copy=False)
        gradient = IndexedSlices(values, gradient.indices, like.shape).to_dense()
    return placed_as(gradient, like.local_view).astype(like.dtype, copy=False)
