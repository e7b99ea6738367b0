"""Helpers for gradients before they are applied: accumulate them, and clip their norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array, is_on_device, like_given, on_device_of_any, placed_as, reducible
from mpistrategy.arrays.dtypes import Array, dtype_name, wire_dtype
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import DTypeError, OptionError, OptionTypeError, ShapeError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Fixed, Settable, checked_count
from mpistrategy.options import ReduceOp
from mpistrategy.reduction import sparse
from mpistrategy.training.gpu.norm import norm_of

__all__ = [
    "GradientAccumulator",
    "clip_by_global_norm",
    "global_norm",
]


def __dir__() -> list[str]:
    return list(__all__)


def global_norm(arrays: Sequence[Any]) -> float:
    """Return the Euclidean norm of all elements of all arrays, summed in float64; local.

    Args:
        arrays: of any numeric dtypes and shapes; None is left out.  Of IndexedSlices rows with one index are added
            first, as in the array that they stand for.

    Raises:
        LeafError, DTypeError, ShapeError: for values that are no numeric arrays.
    """
    dense = [_rows_added(array, "global_norm") for array in arrays if array is not None]
    if (on_gpu := norm_of(dense)) is not None:
        return on_gpu.read()[0]
    with on_device_of_any(dense):
        squares = [np.square(np.abs(array), dtype=np.float64).sum() for array in dense]
    return float(np.sqrt(sum(float(square) for square in squares)))


def clip_by_global_norm(arrays: Sequence[Any], clip_norm: float) -> tuple[list[Any], float]:
    """Scale arrays so that their `global_norm` is at most `clip_norm`; local.

    Clip gradients after the reduction, or pass ``global_clipnorm`` to the optimizer, which does so: the norm of a sum
    is not the sum of the norms.

    Args:
        arrays: floating or complex arrays, and IndexedSlices of them; None stays None.
        clip_norm: a positive number.

    Returns:
        The scaled arrays, in their dtypes and of the kind that was given, and the norm before scaling.  If it is not
        finite, all numbers become NaN.

    Raises:
        OptionTypeError, OptionError: for a clip_norm that is not a positive number.
        LeafError, DTypeError, ShapeError: for values that are no arrays of such numbers.
    """
    where = "clip_by_global_norm"
    if not isinstance(clip_norm, (int, float, np.integer, np.floating)):
        raise OptionTypeError.at("clip_by_global_norm", found=f"clip_norm={clip_norm!r}", expected="a number")
    if not clip_norm > 0:
        raise OptionError.at("clip_by_global_norm", found=f"clip_norm={clip_norm!r}", expected="a positive number")
    given = [array for array in arrays if array is not None]
    slices = [sparse.checked(array, ReduceOp.SUM, where) for array in given if isinstance(array, IndexedSlices)]
    kept = iter(slices)
    parts = [next(kept) if isinstance(array, IndexedSlices) else reducible(array, where) for array in given]
    values = [part.values if isinstance(part, IndexedSlices) else part for part in parts]
    for array in values:
        if array.dtype.kind in "iu":
            raise DTypeError.at(where, found=f"dtype {dtype_name(array.dtype)}", expected="a floating dtype")
    norm = global_norm(parts)
    scale = np.nan if not np.isfinite(norm) else min(1.0, clip_norm / norm) if norm else 1.0
    results = iter([_like(*each) for each in zip(scaled_by(values, scale), given, strict=True)])
    return [None if array is None else next(results) for array in arrays], norm


def _like(values: Array, given: Any) -> Any:
    """Return numbers as the kind of gradient that was given: with the indices of IndexedSlices."""
    if isinstance(given, IndexedSlices):
        return IndexedSlices(like_given(values, given.values), given.indices, given.dense_shape)
    return like_given(values, given)


def _rows_added(gradient: Any, where: str) -> Any:
    """Return an array that has the numbers of a gradient; of IndexedSlices the rows, those of one index added."""
    if not isinstance(gradient, IndexedSlices):
        return reducible(gradient, where)
    slices = sparse.checked(gradient, ReduceOp.SUM, where)
    values = host_array(slices.values)
    rows, places = np.unique(host_array(slices.indices), return_inverse=True)
    added = np.zeros((len(rows), *values.shape[1:]), wire_dtype(values.dtype))
    np.add.at(added, places.reshape(-1), values)
    return placed_as(added, slices.values)


def scaled_by(arrays: Sequence[Array], scale: float) -> list[Array]:
    """Return arrays times a number, in their dtypes."""
    with on_device_of_any(arrays):
        return [(array * scale).astype(array.dtype, copy=False) for array in arrays]


_WHERE = "GradientAccumulator.add"


class GradientAccumulator(Settable):
    """Adds up gradients over several steps without communication, so that one reduction is enough for all of them.

    Args:
        steps: the number of steps for each update; 1 or more.

    Raises:
        OptionTypeError, OptionError: for steps that are no int, or below 1.

    >>> accumulator = GradientAccumulator(steps=2)
    >>> accumulator.add([np.ones(2)])
    >>> accumulator.add([np.ones(2)])
    [array([2., 2.])]
    """

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
            At every `steps`-th call the sums, for an optimizer, of the kind that was given; the next call starts at 0.
            Else None.  A sum is None where all gradients were; the sum of IndexedSlices has the rows of all of them.

        Raises:
            ShapeError: when the number or the shapes of gradients differ from the step before.
            LeafError, DTypeError: for values that are no numeric arrays.
            ContextError: in a function that JAX traces.
        """
        refuse_in_jax_trace("GradientAccumulator.add")
        added = [_widened(gradient) for gradient in gradients]
        before = self._sums if self._count else [None] * len(added)
        if len(before) != len(added) or not all(map(_fit, before, added)):
            raise ShapeError.at(
                _WHERE,
                found=f"gradients of shapes {[*map(_shape, added)]}",
                expected=f"shapes {[*map(_shape, before)]}, as in the step before",
            )
        sums = [*map(_sum, before, added)]
        known = self._dtypes if self._count else [None] * len(added)
        dtypes = [_dtype(gradient) or dtype for gradient, dtype in zip(gradients, known, strict=True)]
        self._sums, self._dtypes = sums, dtypes
        self._count += 1
        if self._count < self.steps or (taken := self.take()) is None:
            return None
        return [_like_sum(*each) for each in zip(taken, gradients, strict=True)]

    @property
    def _partial_sums(self) -> list[Array | None]:
        """The sums so far, 16-bit floats in 32 bits, those of IndexedSlices dense; none before the first step."""
        sums = self._sums if self._count else []
        return [total.to_dense() if isinstance(total, IndexedSlices) else total for total in sums]

    @property
    def _position(self) -> tuple[int, list[np.dtype[Any] | None]]:
        """The number of steps in the sums, and the dtypes of the gradients."""
        return (self._count, list(self._dtypes)) if self._count else (0, [])

    def _go_on_with(self, count: int, sums: Sequence[Array | None], dtypes: Sequence[np.dtype[Any] | None]) -> None:
        """Continue with the `position` and the `_partial_sums` of another accumulator."""
        self._count, self._sums, self._dtypes = count, list(sums), list(dtypes)

    def take(self) -> list[Any] | None:
        """Return the sums so far, and start at 0; None without any.  For a last group of fewer steps."""
        refuse_in_jax_trace("GradientAccumulator.take")
        if not self._count:
            return None
        self._count = 0
        with np.errstate(over="ignore"):
            return [_as(total, dtype) for total, dtype in zip(self._sums, self._dtypes, strict=True)]


def _widened(gradient: Any) -> Any:
    """Return a gradient as it is added: 16-bit floats in 32 bits, as in a reduction."""
    if gradient is None:
        return None
    if isinstance(gradient, IndexedSlices):
        slices = sparse.checked(gradient, ReduceOp.SUM, _WHERE)
        return IndexedSlices(_widened(slices.values), slices.indices, slices.dense_shape)
    array = reducible(gradient, _WHERE)
    with on_device_of_any([array]):
        return array.astype(wire_dtype(array.dtype), copy=False)


def _dtype(gradient: Any) -> np.dtype[Any] | None:
    if gradient is None:
        return None
    return reducible(gradient.values if isinstance(gradient, IndexedSlices) else gradient, _WHERE).dtype  # type: ignore[no-any-return]


def _shape(gradient: Any) -> tuple[int, ...] | None:
    """Return the shape of the array that a gradient stands for; of IndexedSlices without one, that of a row."""
    if isinstance(gradient, IndexedSlices):
        known = gradient.dense_shape
        return gradient.values.shape[1:] if known is None else tuple(int(n) for n in host_array(known))
    return None if gradient is None else tuple(gradient.shape)


def _fit(total: Any, gradient: Any) -> bool:
    """Return whether a gradient may be added to a sum."""
    if total is None or gradient is None:
        return True
    one, other = _shape(total), _shape(gradient)
    rows = [each.dense_shape is None for each in (total, gradient) if isinstance(each, IndexedSlices)]
    if len(rows) == 2 and any(rows):  # what is known of both
        return bool(total.values.shape[1:] == gradient.values.shape[1:])
    return not any(rows) and one == other


def _sum(total: Any, gradient: Any) -> Any:
    """Return the sum of two gradients that fit, in new memory."""
    if gradient is None:
        return total
    if isinstance(gradient, IndexedSlices):
        parts = [gradient] if total is None else [total, gradient]
        if not isinstance(total, np.ndarray) and not is_on_device(total):
            values, indices = [part.values for part in parts], [host_array(part.indices) for part in parts]
            with on_device_of_any(values):
                joined = np.concatenate([placed_as(each, values[-1]) for each in values])
            shape = next((part.dense_shape for part in parts if part.dense_shape is not None), None)
            return IndexedSlices(joined, np.concatenate(indices), shape)
        gradient = gradient.to_dense()
    if isinstance(total, IndexedSlices):
        total = total.to_dense()
    with on_device_of_any([gradient]):
        # Sums that were restored are on the host.
        return gradient.copy() if total is None else placed_as(total, gradient) + gradient


def _as(total: Any, dtype: np.dtype[Any] | None) -> Any:
    if isinstance(total, IndexedSlices):
        return IndexedSlices(_as(total.values, dtype), total.indices, total.dense_shape)
    return total if total is None or dtype is None else total.astype(dtype, copy=False)


def _like_sum(total: Any, given: Any) -> Any:
    """Return a sum as the kind of array that was given last."""
    if given is None:
        return total
    if isinstance(total, IndexedSlices):
        return IndexedSlices(like_given(total.values, given.values), total.indices, total.dense_shape)
    return like_given(total, given.values if isinstance(given, IndexedSlices) else given)


def as_dense(gradient: Any, like: Any) -> Array:
    """Return a gradient as an array of the dtype of `like`; IndexedSlices become an array of its shape."""
    if isinstance(gradient, IndexedSlices):
        dense = np.zeros(like.shape, like.dtype)
        np.add.at(dense, host_array(gradient.indices), host_array(gradient.values).astype(like.dtype, copy=False))
        return _on_device_of(dense, like)
    return _on_device_of(gradient, like).astype(like.dtype, copy=False)


def _on_device_of(gradient: Any, like: Any) -> Array:
    """Return a gradient on the device of its variable."""
    return placed_as(gradient, like.local_view if hasattr(like, "local_view") else like)
