"""Collectives of nests of tensors, in any context, and equal starts: one rank's model, optimizer state or nest.

Gradients flow through a collective whose derivative is one, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mpistrategy.arrays import nest
from mpistrategy.checkpoint.format import from_json, to_json
from mpistrategy.errors import OptionTypeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.objects.kept import is_stateful
from mpistrategy.options import Op, ReduceOp
from mpistrategy.reduction.collectives import checked_root
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy, strategy_for
from mpistrategy.torch import tensors as t

_BROADCAST = "mpistrategy.torch.broadcast"
#: A collective in a context: of a nest, or of the list of its leaves; with a name that is compared, or None.
Collective = Callable[[ReplicaContext, Any, Any], Any]


class _Through(torch.autograd.Function):  # type: ignore[misc]
    """A collective of leaves, through which gradients flow.

    It is linear: its derivative is the transposed collective, whose derivative is the collective again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        strategy: Strategy,
        collective: Collective,
        transposed: Collective,
        name: str | None,
        backward_name: str,
        *leaves: Any,
    ) -> Any:
        ctx.strategy, ctx.collective, ctx.transposed, ctx.name = strategy, collective, transposed, backward_name
        return tuple(_made(strategy, collective, [leaf.detach() for leaf in leaves], leaves, name))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # of truth values they are zeros, which nobody uses, and which have no sum
        numbers = [(each.byte() if each.dtype is torch.bool else each).contiguous() for each in gradients]
        made = _Through.apply(ctx.strategy, ctx.transposed, ctx.collective, ctx.name, ctx.name, *numbers)
        return (None,) * 5 + made


def _made(strategy: Strategy, collective: Collective, value: Any, tensors: Sequence[Any], name: str | None) -> Any:
    """Return the result of a collective; `tensors` are those in the value."""
    with t.on_stream(t.gpu_of(tensors)), ReplicaContext(strategy, strategy.rank) as context:
        return collective(context, value, name)


def _carried(
    where: str,
    strategy: Strategy | None,
    value: Any,
    name: str | None,
    collective: Collective,
    transposed: Collective,
    *,
    carries: bool = True,
) -> Any:
    """Return the result of a collective; gradients flow through it if a tensor requires gradients.

    Args:
        where: the public name.
        strategy, value, name: of the program.
        collective: takes and returns nests of one structure.
        transposed: makes the gradients of the leaves from the gradients of the results: lists.
        carries: whether gradients can flow through it.
    """
    of = strategy_for(strategy, where)
    leaves, structure = nest.flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return _made(of, collective, value, tensors, name)
    if not carries or len(tensors) < len(leaves):
        raise UnsupportedError.at(
            where,
            found="a tensor that wants gradients",
            expected="SUM or MEAN of nothing but tensors, and no out=, for gradients to flow through",
            fix="Give tensor.detach(), or call it in `with torch.no_grad():`.",
        )

    def of_leaves(context: ReplicaContext, given: list[Any], name: str | None) -> list[Any]:
        return nest.flatten(collective(context, structure.pack(given), name))[0]

    return structure.pack(_Through.apply(of, of_leaves, transposed, name, f"backward of {name or where}", *leaves))


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

    def reduced(context: ReplicaContext, values: Any, name: str | None) -> Any:
        return context.all_reduce(op, values, name=name, out=out)

    is_linear = ReduceOp._parse(op, where) in (ReduceOp.SUM, ReduceOp.MEAN)
    return _carried(where, strategy, value, name, reduced, reduced, carries=is_linear and out is None)


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
    shapes = [np.shape(leaf) for leaf in nest.flatten(value)[0]]

    def part_of_sum(context: ReplicaContext, gradients: list[Any], name: str | None) -> list[Any]:
        lengths = [shape[axis] for shape in shapes]
        begins = context.scan("SUM", lengths, exclusive=True, name=name)
        totals = context.all_reduce("SUM", gradients, name=name)
        places = zip(totals, begins, lengths, strict=True)
        return [total.narrow(axis, int(begin), length) for total, begin, length in places]

    return _carried(
        "mpistrategy.torch.all_gather",
        strategy,
        value,
        name,
        lambda context, values, name: context.all_gather(values, axis, name=name),
        part_of_sum,
    )


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
    kind = ReduceOp._parse(op, where)

    def whole(context: ReplicaContext, gradients: list[Any], name: str | None) -> list[Any]:
        divisor = context.num_replicas_in_sync if kind is ReduceOp.MEAN else 1
        return [gradient / divisor for gradient in context.all_gather(gradients, axis, name=name)]

    return _carried(
        where,
        strategy,
        value,
        name,
        lambda context, values, name: context.reduce_scatter(op, values, axis, name=name),
        whole,
        carries=kind in (ReduceOp.SUM, ReduceOp.MEAN),
    )


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
    received: list[int] = []

    def sent(context: ReplicaContext, tensors: list[Any], name: str | None) -> list[Any]:
        result, received[:] = _exchanged(context, tensors[0], splits, name)
        return [result]

    def sent_back(context: ReplicaContext, gradients: list[Any], name: str | None) -> list[Any]:
        return [_exchanged(context, gradients[0], received, name)[0]]

    [result] = _carried("mpistrategy.torch.all_to_all", strategy, [tensor], name, sent, sent_back)
    return result, list(received)


def _exchanged(
    context: ReplicaContext, tensor: Any, splits: Sequence[int] | None, name: str | None
) -> tuple[Any, list[int]]:
    communicator = context.strategy.extended.communicator
    with Call(communicator.guard, "mpistrategy.torch.all_to_all", called=name) as call:
        [source] = t.checked([torch.as_tensor(tensor)], call.where)
        rows = t.lengths(source, () if splits is None else splits, communicator.size, call.where)
        call.structure = f"rows of {source.dtype}{list(source.shape[1:])}"
        width = source.shape[1:].numel() * source.element_size()
        received, counts = communicator.exchange(call, t.in_bytes(source), rows, width)
        result = t.from_bytes(received, source).view(sum(counts), *source.shape[1:])
        return result.to(source.device), counts


# ------------------------------------------------------------------------------------------------- equal starts


def broadcast(thing: Any, root: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Give every rank the tensors and values of rank `root`, in place.  Collective; in any context.

    Args:
        thing: a module; an optimizer, a scheduler, or another object with `state_dict` and `load_state_dict`, whose
            state may be there on `root` alone; or a nest of dicts, lists and tuples with tensors and plain values,
            which may be None on other ranks than `root`.  Numbers of NumPy and Counters keep their types.
        root: whose.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Returns:
        `thing`, changed in place; of a nest, `root`'s nest, with this rank's own tensors.

    Raises:
        CollectiveMismatchError: on every rank, when a rank's module or nest has other tensors than `root`'s.
        ShapeError: on every rank, for a tensor whose elements share memory.
        OptionTypeError: for a nest with other objects.
        UnsupportedError: for computed tensors that want gradients, unless in `torch.no_grad()`; for a module with
            SyncBatchNorm while torch.distributed is not initialized: its statistics would be each rank's own.

    >>> import torch, mpistrategy as ms, mpistrategy.torch as mst
    >>> strategy = ms.OneDeviceStrategy("CPU:0")
    >>> mst.broadcast({"seed": 7, "scale": torch.ones(2)}, strategy=strategy)
    {'seed': 7, 'scale': tensor([1., 1.])}
    """
    of = strategy_for(strategy, _BROADCAST)
    if isinstance(thing, torch.nn.Module):
        for path, inner in thing.named_modules():
            if isinstance(inner, torch.nn.SyncBatchNorm) and not torch.distributed.is_initialized():
                raise UnsupportedError.at(
                    _BROADCAST,
                    found=f"a SyncBatchNorm as {path or 'the module'!r}, which speaks through torch.distributed",
                    expected="layers that need no process group",
                    fix="Use GroupNorm or LayerNorm, or BatchNorm, whose statistics are each rank's own: average them "
                    "with mst.all_reduce before you evaluate or save.",
                )
        _received({**dict(thing.named_parameters()), **dict(thing.named_buffers())}, root, of, name)
    elif is_stateful(thing):
        state = _received(thing.state_dict() if of.rank == root else None, root, of, name)
        if of.rank != root:
            thing.load_state_dict(state)
    else:
        return _received(thing, root, of, name)
    return thing


def _received(value: Any, root: int, strategy: Strategy, name: str | None) -> Any:
    """Return `root`'s nest: its structure and plain values come as text, then its tensors.

    The arguments are those of `broadcast`.  A rank that gives a nest must have the root's tensors, and gets their
    values in place; a rank that gives None gets new tensors.
    """
    communicator = strategy.extended.communicator
    with Call(communicator.guard, _BROADCAST, called=name) as call:
        is_source = strategy.rank == checked_root(root, strategy.size, call.where)
        leaves, structure = pytree.tree_flatten_with_path(() if value is None and not is_source else value)
        own_leaves = {pytree.keystr(path): leaf for path, leaf in leaves}
        descriptions = {path: _description(leaf, path or "the top") for path, leaf in own_leaves.items()}
        text = json.dumps([_in_text(structure), descriptions]) if is_source else ""
        call.agree("broadcast a nest", op=f"from rank {root}")
        structure, descriptions = json.loads(communicator.allgather_text(text)[root])
        call.expect_more()
        new_leaves = {path: _leaf_of(text, own_leaves.get(path)) for path, text in descriptions.items()}
        every_leaf = (own_leaves or new_leaves).items()
        tensors = {path: leaf.detach() for path, leaf in every_leaf if isinstance(leaf, torch.Tensor)}
        # on the host: other ranks may make the root's state on another device
        received = strategy.broadcast({path: tensor.cpu() for path, tensor in tensors.items()}, root)
        for path, tensor in tensors.items():
            tensor.copy_(received[path])
    return value if is_source else pytree.tree_unflatten(new_leaves.values(), pytree.treespec_loads(structure))


def _in_text(structure: Any) -> str:
    """Return the containers of a nest as text, from which other ranks make them."""
    with suppress(NotImplementedError, TypeError):
        text: str = pytree.treespec_dumps(structure)
        if pytree.treespec_loads(text) == structure:
            return text
    raise OptionTypeError.at(
        _BROADCAST,
        found=f"the containers {structure!s:.200}",
        expected="dicts with keys that are text or numbers, lists, tuples",
    )


def _description(leaf: Any, path: str) -> Any:
    """Return a leaf as JSON, a tensor without its numbers."""
    if isinstance(leaf, torch.Tensor):
        if torch.is_grad_enabled() and leaf.requires_grad and not leaf.is_leaf:
            raise UnsupportedError.at(
                _BROADCAST,
                found=f"a computed tensor that wants gradients, at {path}",
                expected="a tensor to write into: no gradients flow through a broadcast",
                fix="Give tensor.detach(), or call it in `with torch.no_grad():`.",
            )
        t.checked([leaf], f"{_BROADCAST}, {path}", is_written=True)
        return {"tensor": [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]}
    if isinstance(leaf, np.generic):
        return {"number": [leaf.dtype.str, leaf.tobytes().hex()]}
    try:
        return {"Counter": to_json(dict(leaf))} if isinstance(leaf, Counter) else to_json(leaf)
    except TypeError as error:
        raise OptionTypeError.at(
            _BROADCAST, found=f"a {type(leaf).__name__} at {path}", expected="tensors and plain values"
        ) from error


def _leaf_of(description: Any, own_leaf: Any) -> Any:
    """Return the leaf of a description: the tensor of this rank's nest if there is one, else a new leaf."""
    match description:
        case {"tensor": [dtype, shape]}:
            return torch.empty(shape, dtype=getattr(torch, dtype)) if own_leaf is None else own_leaf
        case {"number": [dtype, data]}:
            return np.frombuffer(bytes.fromhex(data), dtype)[0]
        case {"Counter": pairs}:
            return Counter(from_json(pairs))
    return from_json(description)
