"""What an optimizer is given, checked before the first update: a refused step must not leave half of it done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays import dtype_name
from mpistrategy.errors import DTypeError, OptionError, OptionTypeError, ShapeError
from mpistrategy.strategy import Strategy
from mpistrategy.values import IndexedSlices, local_component
from mpistrategy.variables import Variable


def checked_number(where: str, name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """Return `value` as a float; raise OptionTypeError for what is no number, OptionError where it does not fit."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected=expected)
    number = float(value)
    if not (np.isfinite(number) and fits(number)):
        raise OptionError.at(where, found=f"{name}={value!r}", expected=expected)
    return number


def positive(number: float) -> bool:
    """Return whether a number is above 0."""
    return number > 0


def not_negative(number: float) -> bool:
    """Return whether a number is 0 or above."""
    return number >= 0


def checked_pairs(grads_and_vars: Any, strategy: Strategy, where: str) -> list[tuple[Any, Variable]]:
    """Return the pairs as a list; raise a typed error unless every gradient fits its variable."""
    expected = "an iterable of (gradient, variable) pairs"
    try:
        pairs = list(grads_and_vars)
    except TypeError as error:
        raise OptionTypeError.at(where, found=f"{grads_and_vars!r}", expected=expected) from error
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise OptionTypeError.at(where, found=f"the element {pair!r}", expected=expected)
        gradient, var = pair
        check_variable(var, strategy, where)
        if var.dtype.kind in "biu":
            raise OptionError.at(where, found=repr(var), expected="a Variable of a floating or complex dtype")
        if gradient is not None:
            _check_gradient(local_component(gradient), var, where)
    return [(gradient, var) for gradient, var in pairs]


def check_variable(var: Any, strategy: Strategy, where: str) -> None:
    """Raise OptionError unless `var` is a variable of this strategy."""
    if not isinstance(var, Variable):
        raise OptionError.at(
            where, found=repr(var), expected="a Variable", fix="Pass (gradient, variable) pairs, in this order."
        )
    if not strategy.extended.variable_created_in_scope(var):
        raise OptionError.at(
            where,
            found=f"{var.name!r} of another strategy",
            expected="a variable created in the scope of the strategy whose step function this is",
            fix="Create it in `with strategy.scope():`, and call this in a function given to strategy.run.",
        )


def _check_gradient(gradient: Any, var: Variable, where: str) -> None:
    sparse = isinstance(gradient, IndexedSlices)
    values = np.asarray(gradient.values if sparse else gradient)
    if values.dtype.kind == "c" and var.dtype.kind != "c":
        raise DTypeError.at(
            where,
            found=f"a gradient of dtype {dtype_name(values.dtype)} for {var.name!r}",
            expected=f"a real dtype, as the variable's {dtype_name(var.dtype)}",
        )
    shape: tuple[int, ...] = values.shape
    if sparse:
        indices = np.asarray(gradient.indices)
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
