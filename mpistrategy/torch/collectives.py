"""Collectives of nests of tensors, in any context; gradients flow through a collective whose derivative is one, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpistrategy.arrays import nest
from mpistrategy.errors import UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.over_mpi.messages import exchange
from mpistrategy.options import Op, ReduceOp
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy, strategy_for
from mpistrategy.torch import tensors as t

#: A collective in a context: of a nest, or of the list of its leaves.
Collective = Callable[[ReplicaContext, Any], Any]


class _Through(torch.autograd.Function):  # type: ignore[misc]
    """A collective of leaves, through which gradients flow.

    It is linear: its derivative is the transposed collective, whose derivative is the collective again.
    """

    @staticmethod
    def forward(ctx: Any, strategy: Strategy, collective: Collective, transposed: Collective, *leaves: Any) -> Any:
        ctx.strategy, ctx.collective, ctx.transposed = strategy, collective, transposed
        return tuple(_made(strategy, collective, [leaf.detach() for leaf in leaves], leaves))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # of truth values they are zeros, which nobody uses, and which have no sum
        numbers = [(each.byte() if each.dtype is torch.bool else each).contiguous() for each in gradients]
        return None, None, None, *_Through.apply(ctx.strategy, ctx.transposed, ctx.collective, *numbers)


def _made(strategy: Strategy, collective: Collective, value: Any, tensors: Sequence[Any]) -> Any:
    """Return the result of a collective; `tensors` are those in the value."""
    with t.on_stream(t.gpu_of(tensors)), ReplicaContext(strategy, strategy.rank) as context:
        return collective(context, value)


def _carried(
    where: str,
    strategy: Strategy,
    value: Any,
    collective: Collective,
    transposed: Collective,
    *,
    carries: bool = True,
) -> Any:
    """Return the result of a collective; gradients flow through it if a tensor requires gradients.

    Args:
        where: the public name.
        strategy: whose ranks.
        value: the nest.
        collective: takes and returns nests of one structure.
        transposed: makes the gradients of the leaves from the gradients of the results: lists.
        carries: whether gradients can flow through it.
    """
    leaves, structure = nest.flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return _made(strategy, collective, value, tensors)
    if not carries or len(tensors) < len(leaves):
        raise UnsupportedError.at(
            where,
            found="a tensor that wants gradients",
            expected="SUM or MEAN of nothing but tensors, and no out=, for gradients to flow through",
            fix="Give tensor.detach(), or call it in `with torch.no_grad():`.",
        )

    def of_leaves(context: ReplicaContext, given: list[Any]) -> list[Any]:
        return nest.flatten(collective(context, structure.pack(given)))[0]

    return structure.pack(_Through.apply(strategy, of_leaves, transposed, *leaves))


def _name_of_backward(where: str, name: str | None) -> str:
    return f"backward of {name or where}"


def all_reduce(
    value: Any, op: Op = "MEAN", *, strategy: Strategy | None = None, out: Any = None, name: str | None = None
) -> Any:
    """Reduce a tensor, or a nest of tensors, over the ranks.  Collective; in any context.

    Gradients flow through SUM and MEAN: the gradient of an element is the SUM or MEAN of the ranks' gradients of its
    result, as in Horovod.  Then backward is collective, too.

    Args:
        value: tensors, arrays and numbers in any nest, alike on all ranks.
        op: "MEAN", "SUM", "MIN", "MAX" or "PROD".
        strategy: whose ranks; None for the strategy of this scope or step.
        out: tensors to write the results into; may be `value`.
        name: is compared between the ranks instead of the call site.

    Raises:
        UnsupportedError: for tensors that want gradients with another operation or `out`, unless in `torch.no_grad()`.
        MpiStrategyError: as `ReplicaContext.all_reduce`.
    """
    where = "mpistrategy.torch.all_reduce"
    backward_name = _name_of_backward(where, name)

    def reduced(context: ReplicaContext, values: Any) -> Any:
        return context.all_reduce(op, values, name=name, out=out)

    def gradients_reduced(context: ReplicaContext, gradients: list[Any]) -> Any:
        return context.all_reduce(op, gradients, name=backward_name)

    is_linear = ReduceOp._parse(op, where) in (ReduceOp.SUM, ReduceOp.MEAN)
    of = strategy_for(strategy, where)
    return _carried(where, of, value, reduced, gradients_reduced, carries=is_linear and out is None)


def all_gather(value: Any, axis: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Concatenate the ranks' tensors along `axis`, in rank order.  Collective; in any context.

    Gradients flow through it: the gradient of a rank's tensor is the sum over the ranks of the gradients of its part.
    Then backward is collective, too.

    Args:
        value: a tensor, or a nest of tensors; the lengths along `axis` may differ.
        axis: an int.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        MpiStrategyError: as `ReplicaContext.all_gather`.
    """
    where = "mpistrategy.torch.all_gather"
    of = strategy_for(strategy, where)
    backward_name = _name_of_backward(where, name)
    shapes = [np.shape(leaf) for leaf in nest.flatten(value)[0]]

    def gathered(context: ReplicaContext, values: Any) -> Any:
        return context.all_gather(values, axis, name=name)

    def part_of_sum(context: ReplicaContext, gradients: list[Any]) -> list[Any]:
        lengths = np.array([shape[axis] for shape in shapes], np.int64)
        lengths_of_ranks = context.all_gather(lengths[None], 0, name=backward_name)
        begins = lengths_of_ranks[: of.rank].sum(0)
        totals = context.all_reduce("SUM", gradients, name=backward_name)
        places = zip(totals, begins.tolist(), lengths.tolist(), strict=True)
        return [total.narrow(axis, begin, length) for total, begin, length in places]

    return _carried(where, of, value, gathered, part_of_sum)


def reduce_scatter(
    value: Any, op: Op = "MEAN", axis: int = 0, *, strategy: Strategy | None = None, name: str | None = None
) -> Any:
    """Reduce tensors over the ranks, and return this rank's part along `axis`.  Collective; in any context.

    The parts are contiguous, in rank order: of `length` elements each rank has ceil(length / ranks), the last ranks
    fewer or none.  Gradients flow through SUM and MEAN; then backward is collective, too.

    Args:
        value: a tensor, or a nest of tensors, alike on all ranks.
        op: "MEAN", "SUM", "MIN", "MAX" or "PROD".
        axis: an int.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        MpiStrategyError: as `ReplicaContext.reduce_scatter`.
        UnsupportedError: as `all_reduce`.
    """
    where = "mpistrategy.torch.reduce_scatter"
    backward_name = _name_of_backward(where, name)
    kind = ReduceOp._parse(op, where)

    def own_part(context: ReplicaContext, values: Any) -> Any:
        return context.reduce_scatter(op, values, axis, name=name)

    def whole(context: ReplicaContext, gradients: list[Any]) -> list[Any]:
        gathered: list[Any] = context.all_gather(gradients, axis, name=backward_name)
        if kind is ReduceOp.MEAN:
            return [gradient / context.num_replicas_in_sync for gradient in gathered]
        return gathered

    is_linear = kind in (ReduceOp.SUM, ReduceOp.MEAN)
    return _carried(where, strategy_for(strategy, where), value, own_part, whole, carries=is_linear)


def all_to_all(
    tensor: Any, splits: Sequence[int] | None = None, *, strategy: Strategy | None = None, name: str | None = None
) -> tuple[Any, list[int]]:
    """Send the r-th part of a tensor's first axis to rank r, for all ranks.  Collective; in any context.

    Gradients flow through it; then backward is collective, too.

    Args:
        tensor: with one axis or more; all other axes are alike on all ranks.
        splits: how many rows go to each rank; None for equally many.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Returns:
        The rows that this rank has received, in rank order, and how many rows each rank has sent.

    Raises:
        ShapeError, OptionError: on every rank, for a tensor without axes, or splits that do not fit.
        CollectiveMismatchError: on every rank, when dtypes or the other axes differ.
    """
    where = "mpistrategy.torch.all_to_all"
    backward_name = _name_of_backward(where, name)
    received: list[int] = []

    def sent(context: ReplicaContext, tensors: list[Any]) -> list[Any]:
        result, received[:] = _exchanged(context, tensors[0], splits, name)
        return [result]

    def sent_back(context: ReplicaContext, gradients: list[Any]) -> list[Any]:
        result, _ = _exchanged(context, gradients[0], received, backward_name)
        return [result]

    [result] = _carried(where, strategy_for(strategy, where), [tensor], sent, sent_back)
    return result, list(received)


def _exchanged(
    context: ReplicaContext, tensor: Any, splits: Sequence[int] | None, name: str | None
) -> tuple[Any, list[int]]:
    communicator = context.strategy.extended.communicator
    with Call(communicator.guard, "mpistrategy.torch.all_to_all", called=name) as call:
        source = tensor.detach()
        rows = t.lengths(source, () if splits is None else splits, communicator.size, call.where)
        call.structure = f"rows of {source.dtype}{list(source.shape[1:])}"
        width = source.shape[1:].numel() * source.element_size()
        received, counts = exchange(communicator, call, t.in_bytes(source), rows, width)
        result = t.from_bytes(received, source).view(sum(counts), *source.shape[1:])
        return result.to(source.device), counts
