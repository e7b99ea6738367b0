"""Metrics over all replicas: each replica adds to its own ON_READ variables, and `result` combines them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy import context
from mpistrategy.arrays.convert import to_array
from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import LeafError, OptionTypeError, ShapeError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.other_names import NamesOurs, refuses
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.training.checks import weights_of_rows
from mpistrategy.variables.variable import Variable, Write

__all__ = [
    "Accuracy",
    "Mean",
    "Sum",
]


def __dir__() -> list[str]:
    return list(__all__)


_DTYPE = "Leave it out: metrics add in float64."


class _Metric(NamesOurs):
    """What each replica added, in some totals.

    Args:
        name: a name for messages, equal on all ranks.
        totals: the names of the totals.
    """

    _words_of = "Metric"

    def __init__(self, name: str, *totals: str) -> None:
        context.refuse_outside(type(self).__name__, "a metric")
        self._variables = tuple(_per_replica_sum(name, total) for total in totals)

    def __repr__(self) -> str:
        # This rank's part: to ask for the result is collective.
        parts = ", ".join(f"{var.name} {float(var._storage):g}" for var in self._variables)
        return f"<{type(self).__name__}, on this rank {parts}>"

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that hold its state; for checkpoints."""
        return self._variables

    def reset_state(self, *, name: str | None = None) -> None:
        """Forget everything that was added.  Collective in cross-replica context.

        Args:
            name: is compared between the ranks instead of the call site.
        """
        for total in self._variables:
            total.assign(0.0, name=name)


class Sum(_Metric):
    """The sum of everything that all replicas added.  Create it in `strategy.scope()`.

    Args:
        name: a name for messages, equal on all ranks.
    """

    @refuses(dtype=_DTYPE)
    def __init__(self, name: str = "sum") -> None:
        super().__init__(name, "total")

    @refuses(values="Write value.", sample_weight="Use Mean, which takes weight.")
    def update_state(self, value: Any) -> None:
        """Add all elements of this rank's `value`; local, in any context.

        Raises:
            LeafError: for a value that is not an array of real numbers.
        """
        _add(self._variables[0], float(_real(value, "Sum.update_state").sum()))

    def result(self, *, name: str | None = None) -> float:
        """Return the sum over all replicas.  Collective in cross-replica context.

        Args:
            name: is compared between the ranks instead of the call site.
        """
        return float(self._variables[0].numpy(name=name))


class Mean(_Metric):
    """The mean of everything that all replicas added; replicas may add different numbers of elements.

    Args:
        name: a name for messages, equal on all ranks.
    """

    @refuses(dtype=_DTYPE)
    def __init__(self, name: str = "mean") -> None:
        super().__init__(name, "total", "count")

    @refuses(values="Write value.", sample_weight="Write weight.")
    def update_state(self, value: Any, weight: Any = 1.0) -> None:
        """Add the elements of this rank's `value`, each with its weight; local, in any context.

        Args:
            value: real numbers; the first axis is the rows.
            weight: a number; or one weight for each row, of shape ``(rows,)``, which all elements of the row have; or
                an array of the shape of `value`.

        Raises:
            LeafError: for a value that is not an array of real numbers.
            ShapeError: for a weight of another shape; nothing has been added then.
        """
        where = f"{type(self).__name__}.update_state"
        value, weights = _real(value, where), _real(weight, where)
        weights = weights_of_rows(weights, value.shape, where, "weight")
        _add(self._variables[0], float((value * weights).sum()))
        _add(self._variables[1], float(weights.sum()) * (value.size // max(weights.size, 1)))  # elements a weight

    def result(self, *, name: str | None = None) -> float:
        """Return the weighted mean over all replicas; NaN when nothing was added.  Collective.

        Args:
            name: is compared between the ranks instead of the call site.
        """
        total, count = map(float, self._variables[0]._policy("reading a variable").read(self._variables, name))
        return total / count if count else float("nan")


class Accuracy(Mean):
    """The share of rows whose predicted class is right, over all replicas.

    Args:
        name: a name for messages, equal on all ranks.
    """

    @refuses(dtype=_DTYPE)
    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    @refuses(y_true="Write labels.", y_pred="Write predictions.", sample_weight="Write weight.")
    def update_state(self, labels: Any, predictions: Any, weight: Any = 1.0) -> None:  # type: ignore[override]
        """Count this rank's rows; local, in any context.

        Args:
            labels: class numbers of shape ``(rows,)``.
            predictions: class numbers of shape ``(rows,)``, or scores of shape ``(rows, classes)``.
            weight: a number, or one for each row.

        Raises:
            ShapeError: when there is not one prediction for each label.
        """
        where = "Accuracy.update_state"
        labels, predictions = to_array(labels, where), to_array(predictions, where)
        if predictions.ndim == labels.ndim + 1 and predictions.shape[-1] > 1:
            predictions = predictions.argmax(axis=-1)
        elif predictions.dtype.kind == "f" and not np.array_equal(predictions, np.rint(predictions)):
            raise ShapeError.at(
                where,
                found=f"fractional predictions of shape {predictions.shape}",
                expected="class numbers, or scores of shape (rows, classes)",
                fix="For probabilities of one class, pass p > 0.5.",
            )
        if labels.ndim != 1 or predictions.shape != labels.shape:
            raise ShapeError.at(
                where,
                found=f"labels of shape {labels.shape} and predictions of shape {predictions.shape}",
                expected="labels (rows,), and predictions (rows,) or (rows, classes)",
            )
        super().update_state(predictions == labels, weight)


def _real(value: Any, where: str) -> Array:
    refuse_in_jax_trace(where)
    try:
        array = to_array(value, where)
        if array.dtype.kind in "SUcmM" or array.dtype.names:
            raise TypeError(f"dtype {array.dtype}")
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise LeafError.at(where, found=f"{value!r}", expected="real numbers") from error


def _add(total: Variable, amount: float) -> None:
    """Add a number to this rank's part of a total, in any context."""
    Write(total, "assign_add", "update_state", amount).apply(np.asarray(amount))


def _per_replica_sum(metric: str, part: str) -> Variable:
    if not isinstance(metric, str):
        raise OptionTypeError.at("metric", found=f"name={metric!r}", expected="a string")
    return Variable(
        np.float64(0),
        name=f"{metric}/{part}",
        synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation.SUM,
    )
