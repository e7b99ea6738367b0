"""How losses are scaled so that the sum over the replicas is right, as in `tf.nn`.

The losses themselves are the program's own NumPy code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays.convert import any_array, like_given, reducible
from mpistrategy.arrays.dtypes import wire_dtype
from mpistrategy.errors import ShapeError
from mpistrategy.objects.settings import checked_count
from mpistrategy.training.checks import required_context, weights_of_rows

__all__ = [
    "compute_average_loss",
    "scale_regularization_loss",
]


def __dir__() -> list[str]:
    return list(__all__)


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """Return this replica's part of the mean over the global batch: the sum of its losses over `global_batch_size`.

    Add the parts of all replicas: ``context.all_reduce("SUM", loss)``, or gradients of it in an optimizer.  Local.

    Args:
        per_example_loss: this replica's losses, of shape ``(rows,)`` or more axes, in which the first is the rows.
        sample_weight: a number, a weight for each row, or an array of the losses' shape; None: 1.
        global_batch_size: the rows of all replicas together.  None: this replica's rows times the replicas, which is
            right only where all replicas have equally many; the last batch of a dataset often has fewer.

    Returns:
        A scalar of the losses' dtype; integers give float64.  0 for no rows with a `global_batch_size`.

    Raises:
        ContextError: in cross-replica context.
        ShapeError: for a scalar, and for weights that do not fit.
        OptionError, OptionTypeError: for a global_batch_size that is not an int from 1 on; for no rows without one.
        LeafError, DTypeError: for values that are no numbers.

    >>> float(compute_average_loss(np.array([1.0, 2.0]), global_batch_size=4))
    0.75
    """
    where = "compute_average_loss"
    replicas = required_context(where).strategy.num_replicas_in_sync
    losses = reducible(per_example_loss, where)
    if losses.ndim == 0:
        raise ShapeError.at(where, found="a scalar", expected="one loss for each row", fix="Do not add them up before.")
    weights = None
    if sample_weight is not None:
        weights = weights_of_rows(reducible(sample_weight, where), losses.shape, where, "sample_weight")
    if global_batch_size is None:
        global_batch_size = losses.shape[0] * replicas
    size = checked_count(where, "global_batch_size", global_batch_size)
    return _part(losses, size, per_example_loss, weights)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return a loss that is the same on every replica, divided by their number, so that the sum over them is right.

    Local; in a step function.

    Args:
        regularization_loss: a number or an array, such as the sum of the squared weights.

    Returns:
        The sum of all its elements over the number of replicas, a scalar; integers give float64.

    Raises:
        ContextError: in cross-replica context.
        LeafError, DTypeError: for values that are no numbers.

    >>> float(scale_regularization_loss(np.array([1.0, 2.0])))
    3.0
    """
    where = "scale_regularization_loss"
    replicas = required_context(where).strategy.num_replicas_in_sync
    return _part(reducible(regularization_loss, where), replicas, regularization_loss)


def _part(losses: Any, count: int, original: Any, weights: Any = None) -> Any:
    """Return the weighted sum over `count`, as the kind of array of `original`; 16-bit floats are rounded once."""
    dtype = np.dtype(np.float64) if losses.dtype.kind in "iu" else losses.dtype
    wide = wire_dtype(dtype)
    if weights is not None:
        losses = losses.astype(wide, copy=False) * weights.astype(wide, copy=False)
    total = any_array(losses.sum(dtype=wide) / wide.type(count))
    return like_given(total.astype(dtype, copy=False)[()], original)
