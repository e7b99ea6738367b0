"""Checks of an optimizer's arguments.  A step makes them before the first update, so that errors change nothing."""

from __future__ import annotations

from typing import Any

from mpistrategy.arrays.convert import host_array, reducible
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.values import IndexedSlices, contribution
from mpistrategy.context import warn_if_alone
from mpistrategy.errors import ContextError, DTypeError, OptionError, ShapeError
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.inputs import checked_slices
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy, get_replica_context
from mpistrategy.variables.variable import Variable

_CURE = "Call it in the function given to strategy.run."


def required_context(where: str) -> ReplicaContext:
    """Return the context of the step function that this thread is in; raise ContextError in cross-replica context.

    Outside every step it is the context of the default strategy, which leaves out the other ranks: it warns of them.
    """
    context: ReplicaContext | None = get_replica_context()
    if context is None:
        raise ContextError.at(
            where,
            found="a call in cross-replica context",
            expected="a call in a step function",
            fix=_CURE,
        )
    cure = f"{_CURE} Make variables inside strategy.scope()."
    warn_if_alone(context.strategy, where, "was called outside every step", cure)
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
                found=f"a call outside the scope and the steps of the strategy of {var.name!r}",
                expected="a call in a step function of that strategy, or in its scope()",
                fix="Call it in the function given to strategy.run, or inside `with strategy.scope():`.",
            )
        raise OptionError.at(
            where,
            found=f"{var.name!r} of another strategy",
            expected="a variable created in the scope of the strategy whose step function this is",
            fix="Create it in `with strategy.scope():`, and call this in a function given to strategy.run.",
        )


def checked_gradient(gradient: Any, var: Variable, where: str) -> Any:
    """Return this rank's part of a gradient, which fits its variable: an array, or IndexedSlices.

    Raises:
        ShapeError, DTypeError, LeafError: for a gradient that does not fit.
    """
    part = contribution(gradient)
    is_sparse = isinstance(part, IndexedSlices)
    if is_sparse:
        part = checked_slices(part, ReduceOp.SUM, where)
        values, rows = part.values, var.shape[0] if var.shape else 0
        shape = (rows, *values.shape[1:])
        indices = host_array(part.indices)
        outside = indices[(indices < 0) | (indices >= rows)]
        if outside.size:
            raise ShapeError.at(
                where, found=f"index {outside[0]} for {var.name!r}", expected=f"indices from 0 to {rows - 1}"
            )
    else:
        part = values = reducible(part, where)
        shape = values.shape
    # Sums of integers wrap in their own dtype.
    if (values.dtype.kind == "c" and var.dtype.kind != "c") or (
        values.dtype.kind in "biu" and values.dtype.itemsize < 8
    ):
        raise DTypeError.at(
            where,
            found=f"a gradient of dtype {dtype_name(values.dtype)} for {var.name!r}",
            expected=f"a dtype that can hold its sum, such as the variable's {dtype_name(var.dtype)}",
        )
    if shape != var.shape:
        raise ShapeError.at(
            where,
            found=f"a gradient of shape {values.shape} for {var.name!r}",
            expected=f"the variable's shape {var.shape}{', or rows of it' if is_sparse else ''}",
        )
    return part
