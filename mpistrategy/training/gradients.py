"""Helpers for gradients before they are applied: accumulate them, and clip their norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array, like_given, on_device_of_any, placed_as, reducible
from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import OptionError, OptionTypeError, ShapeError
from mpistrategy.objects.copies import Created
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Fixed, Settable, checked_count
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
        arrays: of any numeric dtypes and shapes.

    Raises:
        LeafError, DTypeError: for values that are no numeric arrays.
    """
    dense = [reducible(array, "global_norm") for array in arrays]
    if (on_gpu := norm_of(dense)) is not None:
        return on_gpu.read()[0]
    with on_device_of_any(dense):
        squares = [np.square(np.abs(array), dtype=np.float64).sum() for array in dense]
    return float(np.sqrt(sum(float(square) for square in squares)))


def clip_by_global_norm(arrays: Sequence[Any], clip_norm: float) -> tuple[list[Array], float]:
    """Scale arrays so that their `global_norm` is at most `clip_norm`; local.

    Clip gradients after the reduction, or pass ``global_clipnorm`` to the optimizer, which does so: the norm of a sum
    is not the sum of the norms.

    Args:
        arrays: floating arrays.
        clip_norm: a positive number.

    Returns:
        The scaled arrays, in their dtypes and of the kind that was given, and the norm before scaling.  If it is not
        finite, all numbers become NaN.

    Raises:
        OptionTypeError, OptionError: for a clip_norm that is not a positive number.
        LeafError, DTypeError: for values that are no numeric arrays.
    """
    if not isinstance(clip_norm, (int, float, np.integer, np.floating)):
        raise OptionTypeError.at("clip_by_global_norm", found=f"clip_norm={clip_norm!r}", expected="a number")
    if not clip_norm > 0:
        raise OptionError.at("clip_by_global_norm", found=f"clip_norm={clip_norm!r}", expected="a positive number")
    scaled = [reducible(array, "clip_by_global_norm") for array in arrays]
    norm = global_norm(scaled)
    scale = np.nan if not np.isfinite(norm) else min(1.0, clip_norm / norm) if norm else 1.0
    return [like_given(array, given) for array, given in zip(scaled_by(scaled, scale), arrays, strict=True)], norm


def scaled_by(arrays: Sequence[Array], scale: float) -> list[Array]:
    """Return arrays times a number, in their dtypes."""
    with on_device_of_any(arrays):
        return [(array * scale).astype(array.dtype, copy=False) for array in arrays]


class GradientAccumulator(Created, Settable):
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
        self._sums: list[Array] = []
        self._dtypes: list[np.dtype[Any]] = []

    def __repr__(self) -> str:
        return f"<GradientAccumulator with {self._count} of {self.steps} steps>"

    def add(self, gradients: Sequence[Any]) -> list[Array] | None:
        """Add one step's gradients; local.  After an error nothing has been added.

        Returns:
            At every `steps`-th call the sums, for an optimizer, of the kind that was given; the next call starts at 0.
            Else None.

        Raises:
            ShapeError: when the number or the shapes of gradients differ from the step before.
            LeafError, DTypeError: for values that are no numeric arrays.
            ContextError: in a function that JAX traces.
        """
        refuse_in_jax_trace("GradientAccumulator.add")
        given = [reducible(gradient, "GradientAccumulator.add") for gradient in gradients]
        # 16-bit floats are added in 32 bits, as in a reduction.
        with on_device_of_any(given):
            arrays = [array.astype(wire_dtype(array.dtype), copy=False) for array in given]
        if self._count and [array.shape for array in arrays] != [total.shape for total in self._sums]:
            raise ShapeError.at(
                "GradientAccumulator.add",
                found=f"gradients of shapes {[array.shape for array in arrays]}",
                expected=f"shapes {[total.shape for total in self._sums]}, as in the step before",
            )
        self._dtypes = [array.dtype for array in given]
        with on_device_of_any(arrays):
            if self._count:
                # Sums that were restored are on the host.
                self._sums = [placed_as(total, array) + array for total, array in zip(self._sums, arrays, strict=True)]
            else:
                self._sums = [array.copy() for array in arrays]
        self._count += 1
        if self._count < self.steps or (sums := self.take()) is None:
            return None
        return [like_given(total, gradient) for total, gradient in zip(sums, gradients, strict=True)]

    @property
    def _partial_sums(self) -> list[Array]:
        """The sums so far, 16-bit floats in 32 bits; none before the first step of a group."""
        return list(self._sums) if self._count else []

    @property
    def _position(self) -> tuple[int, list[np.dtype[Any]]]:
        """The number of steps in the sums, and the dtypes of the gradients."""
        return (self._count, list(self._dtypes)) if self._count else (0, [])

    def _go_on_with(self, count: int, sums: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> None:
        """Continue with the `position` and the `_partial_sums` of another accumulator."""
        self._count, self._sums, self._dtypes = count, list(sums), list(dtypes)

    def take(self) -> list[Array] | None:
        """Return the sums so far, and start at 0; None without any.  For a last group of fewer steps."""
        refuse_in_jax_trace("GradientAccumulator.take")
        if not self._count:
            return None
        self._count = 0
        with np.errstate(over="ignore"):
            return [total.astype(dtype, copy=False) for total, dtype in zip(self._sums, self._dtypes, strict=True)]


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
