"""Checks of an optimizer's arguments.  A step makes them before the first update, so that errors change nothing."""

from __future__ import annotations

from typing import Any

from mpistrategy.arrays.convert import as_device_array, host_array, is_on_device
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import ContextError, DTypeError, OptionError, ShapeError
from mpistrategy.strategy.current import get_replica_context
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable


def required_context(where: str) -> ReplicaContext:
    """Return the context of the step function that this thread is in; raise ContextError elsewhere."""
    context: ReplicaContext | None = get_replica_context()
    if context is None:
        raise ContextError.at(
            where,
            found="a call in cross-replica context",
            expected="a call in a step function",
            fix="Use strategy.run.",
        )
    return context


def weights_of_rows(weights: Array, shape: tuple[int, ...], where: str, name: str) -> Array:
    """Return weights of values of `shape`, with axes of length 1 at the end, so that each row's values have its weight.

    Raises:
        ShapeError: for weights that are neither a number, nor one for each row (or for each index of the first axes),
            nor of this shape.  NumPy would spread some of them over the columns.
    """
    if weights.shape != shape[: weights.ndim]:
        raise ShapeError.at(
            where,
            found=f"{name} of shape {tuple(weights.shape)} for values of shape {tuple(shape)}",
            expected=f"a number, one weight for each row (shape {tuple(shape[:1])}), or shape {tuple(shape)}",
        )
    return weights.reshape((*weights.shape, *[1] * (len(shape) - weights.ndim)))


def check_variable(var: Any, strategy: Strategy, where: str) -> None:
    """Raise OptionError unless `var` is a variable of this strategy; ContextError outside every strategy."""
    if not isinstance(var, Variable):
        raise OptionError.at(
            where, found=repr(var), expected="a Variable", fix="Pass (gradient, variable) pairs, in this order."
        )
    if not strategy.extended.variable_created_in_scope(var):
        if strategy._is_default:
            raise ContextError.at(
                where,
                found=f"a call outside strategy.run, with {var.name!r} of a {type(var.strategy).__name__}",
                expected="a call in a step function of that strategy",
                fix="Call it in the function given to strategy.run.",
            )
        raise OptionError.at(
            where,
            found=f"{var.name!r} of another strategy",
            expected="a variable created in the scope of the strategy whose step function this is",
            fix="Create it in `with strategy.scope():`, and call this in a function given to strategy.run.",
        )


def check_gradient(gradient: Any, var: Variable, where: str) -> None:
    """Raise ShapeError or DTypeError unless a gradient fits its variable."""
    sparse = isinstance(gradient, IndexedSlices)
    values = gradient.values if sparse else gradient
    values = as_device_array(values, where) if is_on_device(values) else host_array(values)
    if values.dtype.kind == "c" and var.dtype.kind != "c":
        raise DTypeError.at(
            where,
            found=f"a gradient of dtype {dtype_name(values.dtype)} for {var.name!r}",
            expected=f"a real dtype, as the variable's {dtype_name(var.dtype)}",
        )
    shape: tuple[int, ...] = values.shape
    if sparse:
        indices = host_array(gradient.indices)
        if not (indices.ndim == 1 and indices.dtype.kind in "iu" and shape[:1] == indices.shape):
            raise ShapeError.at(
                where,
                found=f"indices {dtype_name(indices.dtype)}{list(indices.shape)} for values of shape {shape}",
                expected="one integer index for each row of the values",
            )
        rows = var.shape[0] if var.shape else 0
        outside = indices[(indices < 0) | (indices >= rows)]
        if outside.size:
            raise ShapeError.at(
                where, found=f"index {outside[0]} for {var.name!r}", expected=f"indices from 0 to {rows - 1}"
            )
        shape = (rows, *shape[1:])
    if shape != var.shape:
        raise ShapeError.at(
            where,
            found=f"a gradient of shape {values.shape} for {var.name!r}",
            expected=f"the variable's shape {var.shape}{', or rows of it' if sparse else ''}",
        )
