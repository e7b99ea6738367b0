"""Collectives of nests of tensors, in any context; gradients flow through those whose derivative is a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mpistrategy.arrays import nest
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.errors import UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import Op, ReduceOp
from mpistrategy.strategy.current import ReplicaContext, strategy_for
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.torch import tensors as t
from mpistrategy.torch.group import exchange

#: A collective of tensors, and the one that gives their gradients from those of the results.
Collective = Callable[[list[Any]], list[Any]]


@contextlib.contextmanager
def replica_context(strategy: Strategy, device: Any = None) -> Iterator[ReplicaContext]:
    """Enter the replica context of a strategy; on a GPU, in the order of torch's current stream."""
    with contextlib.ExitStack() as entered:
        if device is not None and device.type == "cuda":
            cupy = cupy_for("mpistrategy.torch")
            entered.enter_context(cupy.cuda.Device(device.index))
            entered.enter_context(cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream))
        yield entered.enter_context(ReplicaContext(strategy, strategy.rank))


class _Through(torch.autograd.Function):  # type: ignore[misc]
    """A collective through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, backward: Collective, *tensors: Any) -> Any:
        ctx.backward_collective = backward
        return tuple(collective([each.detach() for each in tensors]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.backward_collective([each.contiguous() for each in gradients])


def _wants_gradients(leaves: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in leaves)


def _carried(value: Any, collective: Callable[[Any], Any], backward: Collective | None, where: str) -> Any:
    """Return `collective` of a nest, through which gradients flow if some tensor wants them.

    Args:
        value: the nest.
        collective: takes and returns nests of one structure.
        backward: gives the gradients of the leaves; None where there is no such collective.
        where: the public name.
    """
    leaves, structure = nest.flatten(value)
    if not _wants_gradients(leaves):
        return collective(value)
    if backward is None:
        raise UnsupportedError.at(
            where,
            found="a tensor that wants gradients",
            expected="SUM or MEAN, and no out=, for gradients to flow through",
            fix="Give tensor.detach(), or call it in `with torch.no_grad():`.",
        )
    if not all(isinstance(each, torch.Tensor) for each in leaves):
        raise UnsupportedError.at(
            where,
            found="tensors that want gradients beside other values",
            expected="tensors alone",
            fix="Make two calls.",
        )

    def of_leaves(tensors: list[Any]) -> list[Any]:
        return nest.flatten(collective(structure.pack(tensors)))[0]

    return structure.pack(list(_Through.apply(of_leaves, backward, *leaves)))


def all_reduce(
    value: Any, op: Op = "MEAN", *, strategy: Strategy | None = None, out: Any = None, name: str | None = None
) -> Any:
    """Reduce a tensor, or a nest of tensors, over the ranks.  Collective; in any context.

    Gradients flow through SUM and MEAN: that of an element is the SUM or MEAN of the ranks' gradients of its result,
    as in Horovod.  Then backward is collective, too.

    Args:
        value: tensors, arrays and numbers in any nest, alike on all ranks.
        op: "MEAN", "SUM", "MIN", "MAX" or "PROD".
        strategy: whose ranks; None for the strategy of this scope or step.
        out: tensors to write the results into; may be `value`.
        name: is compared between the ranks instead of the call site.

    Raises:
        UnsupportedError: for tensors that want gradients with another operation or `out`, unless in `torch.no_grad()`.
        As `ReplicaContext.all_reduce`.
    """
    where = "mpistrategy.torch.all_reduce"
    of = strategy_for(strategy, where)

    def reduce(values: Any, name: str | None = name) -> Any:
        with replica_context(of) as context:
            return context.all_reduce(op, values, name=name, out=out)

    carries = out is None and ReduceOp._parse(op, where) in (ReduceOp.SUM, ReduceOp.MEAN)
    backward = (lambda gradients: reduce(gradients, f"backward of {name or where}")) if carries else None
    return _carried(value, reduce, backward, where)


def all_gather(value: Any, axis: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Concatenate the ranks' tensors along `axis`, in rank order.  Collective; in any context.

    Gradients flow through it: that of a rank's tensor is the sum over the ranks of the gradients of its part.  Then
    backward is collective, too.

    Args:
        value: a tensor, or a nest of tensors; the lengths along `axis` may differ.
        axis: an int.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        As `ReplicaContext.all_gather`.
    """
    where = "mpistrategy.torch.all_gather"
    of = strategy_for(strategy, where)

    def gather(values: Any) -> Any:
        with replica_context(of) as context:
            return context.all_gather(values, axis, name=name)

    leaves = nest.flatten(value)[0]

    def backward(gradients: list[Any]) -> list[Any]:
        lengths = np.array([each.shape[axis] for each in leaves], np.int64)[None]
        with replica_context(of) as context:
            called = f"backward of {name or where}"
            begins = context.all_gather(lengths, 0, name=called)[: of.rank].sum(0)
            totals = context.all_reduce("SUM", gradients, name=called)
        return [
            total.narrow(axis, int(begin), int(length))
            for total, begin, length in zip(totals, begins, lengths[0], strict=True)
        ]

    return _carried(value, gather, backward, where)


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
        As `ReplicaContext.reduce_scatter`; UnsupportedError as `all_reduce`.
    """
    where = "mpistrategy.torch.reduce_scatter"
    of = strategy_for(strategy, where)
    kind = ReduceOp._parse(op, where)

    def scatter(values: Any) -> Any:
        with replica_context(of) as context:
            return context.reduce_scatter(op, values, axis, name=name)

    def backward(gradients: list[Any]) -> list[Any]:
        with replica_context(of) as context:
            whole = context.all_gather(gradients, axis, name=f"backward of {name or where}")
        return [each / of.num_replicas_in_sync for each in whole] if kind is ReduceOp.MEAN else whole

    return _carried(value, scatter, backward if kind in (ReduceOp.SUM, ReduceOp.MEAN) else None, where)


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
        What the ranks have sent to this one, in rank order, and how many rows each has sent.

    Raises:
        ShapeError, OptionError: on every rank, for a tensor without axes, or splits that do not fit.
        CollectiveMismatchError: on every rank, when dtypes or the other axes differ.
    """
    of = strategy_for(strategy, "mpistrategy.torch.all_to_all")
    found: list[int] = []

    def exchange(tensors: list[Any]) -> list[Any]:
        result, received = _exchanged(of, tensors[0], splits, name)
        found[:] = received
        return [result]

    def backward(gradients: list[Any]) -> list[Any]:
        return [_exchanged(of, gradients[0], found, f"backward of {name or 'all_to_all'}")[0]]

    if _wants_gradients([tensor]):
        (result,) = _Through.apply(exchange, backward, tensor)
    else:
        (result,) = exchange([tensor])
    return result, list(found)


def _exchanged(
    strategy: Strategy, tensor: Any, splits: Sequence[int] | None, name: str | None
) -> tuple[Any, list[int]]:
    communicator = strategy.extended.communicator
    with Call(communicator.guard, "mpistrategy.torch.all_to_all", called=name) as call:
        given = tensor.detach()
        rows = t.lengths(given, splits or (), communicator.size, call.where)
        call.structure = f"rows of shape {list(given.shape[1:])}"
        width = given.shape[1:].numel() * given.element_size()
        received, taken = exchange(communicator, call, t.flat(given), rows, width)
        return received.view(sum(taken), *given.shape[1:]).to(given.device), taken
