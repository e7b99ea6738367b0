"""Gradient accumulators in checkpoints: each rank's sums, and on another number of ranks parts of their total.

What an optimizer adds up at the end of a group of steps is the total of all ranks' sums.  So the sums are kept like an
ON_READ variable whose aggregation is SUM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrategy.checkpoint.storage.manifest import COMBINED, ONE, Item
from mpistrategy.checkpoint.storage.plain_values import below, dtype_of, dtype_text, is_numeric
from mpistrategy.training.gradients import GradientAccumulator

if TYPE_CHECKING:
    from mpistrategy.checkpoint.fitting import Fit

#: How the sums of several ranks are kept.
SUMS = COMBINED[0]


def item_of(accumulator: GradientAccumulator, where: str) -> Item:
    """Return what is to be said of an accumulator beside its sums: equal on all ranks, or they cannot save together."""
    count, dtypes = accumulator.position
    more = {"steps": accumulator.steps, "count": count, "dtypes": [dtype_text(dtype, where) for dtype in dtypes]}
    return Item("accumulator", more=more)


def fit_accumulator(fit: Fit, path: str, item: Item, accumulator: GradientAccumulator) -> Callable[[], Any]:
    """Note which arrays an accumulator needs; return what gives them to it."""
    steps, count, dtypes = item.more["steps"], item.more["count"], [dtype_of(text) for text in item.more["dtypes"]]
    if steps != accumulator.steps:
        return fit.problem(path, f"steps={steps!r} in the checkpoint, steps={accumulator.steps} here")
    paths = [below(path, number) for number in range(len(dtypes))]
    items = [fit.manifest.items[each] for each in paths]
    if type(count) is not int or not 0 <= count < steps or bool(count) != bool(items):
        raise ValueError(f"{count!r} steps of {steps}, and {len(items)} sums")
    if not all(each.is_array and each.copies in (ONE, SUMS) and is_numeric(dtype_of(each.dtype)) for each in items):
        raise ValueError("sums that are none")
    fit.fetched |= dict.fromkeys(paths)
    fit.shared.update(paths)

    def restore() -> Any:
        accumulator.go_on_with(count, [fit.staged.pop(each) for each in paths], dtypes)
        return accumulator

    return restore
