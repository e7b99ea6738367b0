"""Collectives of nests of tensors, in any context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.options import Op
from mpistrategy.strategy.current import ReplicaContext, strategy_for
from mpistrategy.strategy.strategy import Strategy


@contextlib.contextmanager
def replica_context(strategy: Strategy, device: Any = None) -> Iterator[ReplicaContext]:
    """Enter the replica context of a strategy; on a GPU, in the order of torch's current stream."""
    with contextlib.ExitStack() as entered:
        if device is not None and device.type == "cuda":
            cupy = cupy_for("mpistrategy.torch")
            entered.enter_context(cupy.cuda.Device(device.index))
            entered.enter_context(cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream))
        yield entered.enter_context(ReplicaContext(strategy, strategy.rank))


def all_reduce(
    value: Any, op: Op = "MEAN", *, strategy: Strategy | None = None, out: Any = None, name: str | None = None
) -> Any:
    """Reduce a tensor, or a nest of tensors, over the ranks.  Collective; in any context.

    No gradients flow through it: the results have none.

    Args:
        value: tensors, arrays and numbers in any nest, alike on all ranks.
        op: "MEAN", "SUM", "MIN", "MAX" or "PROD".
        strategy: whose ranks; None for the strategy of this scope or step.
        out: tensors to write the results into; may be `value`.
        name: is compared between the ranks instead of the call site.

    Raises:
        As `ReplicaContext.all_reduce`.
    """
    with replica_context(strategy_for(strategy, "mpistrategy.torch.all_reduce")) as context:
        return context.all_reduce(op, value, name=name, out=out)


def all_gather(value: Any, axis: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Concatenate the ranks' tensors along `axis`, in rank order.  Collective; in any context.

    No gradients flow through it.

    Args:
        value: a tensor, or a nest of tensors; the lengths along `axis` may differ.
        axis: an int.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        As `ReplicaContext.all_gather`.
    """
    with replica_context(strategy_for(strategy, "mpistrategy.torch.all_gather")) as context:
        return context.all_gather(value, axis, name=name)
