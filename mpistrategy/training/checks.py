"""What an optimizer is given, checked before the first update: a refused step must not leave half of it done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import as_device_array, host_array, is_on_device, may_share_memory
from mpistrategy.arrays.dtypes import Array, dtype_name, span
from mpistrategy.arrays.values import IndexedSlices, local_component
from mpistrategy.errors import ContextError, DTypeError, EmptyBatchError, OptionError, OptionTypeError, ShapeError
from mpistrategy.strategy.current import get_replica_context
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

#: How many variables of a step are named when ranks compare their calls.
_IN_WORDS = 12
_PAIRS = "an iterable of (gradient, variable) pairs"


def checked_number(where: str, name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """Return `value` as a float; raise OptionTypeError for what is no number, OptionError where it does not fit."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected=expected)
    number = float(value)
    if not (np.isfinite(number) and fits(number)):
        raise OptionError.at(where, found=f"{name}={value!r}", expected=expected)
    return number


def checked_count(where: str, name: str, value: Any, least: int = 1) -> int:
    """Return `value`, an int from `least` on; raise OptionTypeError for another type, OptionError for a smaller one."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected="an int")
    if value < least:
        raise OptionError.at(where, found=f"{name}={value}", expected=f"{least} or more")
    return int(value)


def positive(number: float) -> bool:
    """Return whether a number is above 0."""
    return number > 0


def not_negative(number: float) -> bool:
    """Return whether a number is 0 or above."""
    return number >= 0


def required_context(where: str) -> ReplicaContext:
    """Return the context of the step function that this thread is in; ContextError elsewhere."""
    context: ReplicaContext | None = get_replica_context()
    if context is None:
        raise ContextError.at(
            where,
            found="a call in cross-replica context",
            expected="a call in a step function",
            fix="Use strategy.run.",
        )
    return context


@dataclass(eq=False)
class Target:
    """The variables of one call that have gradients: found fit once, and known from then on.

    Attributes:
        variables: them, in the order of the pairs.
        strategy: the strategy that keeps them.
        text: what stands for them when ranks compare their calls.
        has_slots: whether the optimizer has made their slots.
        layouts: their shapes and dtypes.
    """

    variables: tuple[Variable, ...]
    strategy: Strategy
    text: str
    has_slots: bool = False
    layouts: list[tuple[tuple[int, ...], np.dtype[Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.layouts = [(var.shape, var.dtype) for var in self.variables]


class Targets:
    """The targets of the latest calls, so that a step with the same variables checks the gradients only."""

    _MOST = 32

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Target] = {}

    def checked(self, grads_and_vars: Any, strategy: Strategy, where: str) -> tuple[list[Any], Target, bool]:
        """Return the gradients that are not None, and their variables; a typed error unless they fit each other.

        Last whether all gradients are ordinary arrays of their variables' dtypes.
        """
        pairs = _listed(grads_and_vars, where)
        try:
            # A Target keeps its variables alive, so that their ids are nobody else's.
            key = tuple([id(var) if gradient is not None else -id(var) for gradient, var in pairs])
        except (TypeError, ValueError):
            key = ()
        target = self._known.get(key)
        if target is None or target.strategy is not strategy:
            target = _new_target(pairs, strategy, where)
            while len(self._known) >= self._MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = target
        gradients, ordinary = [gradient for gradient, _ in pairs if gradient is not None], True
        for number, (gradient, (shape, dtype)) in enumerate(zip(gradients, target.layouts, strict=True)):
            if not (type(gradient) is np.ndarray and gradient.dtype is dtype and gradient.shape == shape):
                ordinary = False
                _check_gradient(local_component(gradient), target.variables[number], where)
        return gradients, target, ordinary


def _listed(grads_and_vars: Any, where: str) -> list[Any]:
    try:
        return list(grads_and_vars)
    except TypeError as error:
        raise OptionTypeError.at(where, found=f"{grads_and_vars!r}", expected=_PAIRS) from error


def _new_target(pairs: list[Any], strategy: Strategy, where: str) -> Target:
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise OptionTypeError.at(where, found=f"the element {pair!r}", expected=_PAIRS)
        gradient, var = pair
        check_variable(var, strategy, where)
        if var.dtype.kind in "biu":
            raise OptionError.at(where, found=repr(var), expected="a Variable of a floating or complex dtype")
        if gradient is not None:
            _check_gradient(local_component(gradient), var, where)
    # Gradients of one shape for two variables must not meet each other.
    numbered = [(number, var) for number, (gradient, var) in enumerate(pairs) if gradient is not None]
    if not numbered:
        raise EmptyBatchError.at(where, found="no gradients", expected="at least one (gradient, variable) pair")
    text = _shortened([f"{number}: {var.key}" for number, var in numbered])
    return Target(tuple(var for _, var in numbered), strategy, text)


def _shortened(names: list[str]) -> str:
    """Return a text that tells these names from all others; of many, only some in words: it is compared every step."""
    if len(names) <= _IN_WORDS:
        return ", ".join(names)
    import hashlib  # here, since it loads OpenSSL: `import mpistrategy` stays quick

    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    half = _IN_WORDS // 2
    return f"{', '.join(names[:half])}, ..., {', '.join(names[-half:])} ({len(names)} variables, {digest})"


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
    values = gradient.values if sparse else gradient
    values = as_device_array(values, where) if is_on_device(values) else np.asarray(values)
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


def apart_from(changed: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """Return `arrays`, with copies of those that may lie in the memory of `changed`."""
    if any(map(is_on_device, (*arrays, *changed))):
        return [array.copy() if any(may_share_memory(array, one) for one in changed) else array for array in arrays]
    views = [array for array in arrays if array.base is not None]  # what owns its memory lies in no other
    if not views:
        return list(arrays)
    bounds = [span(array) for array in changed]
    low, high = min(begin for begin, _ in bounds), max(end for _, end in bounds)

    def is_inside(array: Array) -> bool:
        begin, end = span(array)
        return begin < high and low < end

    return [array.copy() if array.base is not None and is_inside(array) else array for array in arrays]
