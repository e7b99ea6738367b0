"""Equal starts: one rank's model, optimizer state or nest of tensors on every rank."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from mpistrategy.checkpoint.storage.plain_values import NOT_PLAIN, from_json, to_json
from mpistrategy.errors import OptionTypeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.reduction.broadcast import checked_root
from mpistrategy.strategy.current import strategy_for
from mpistrategy.strategy.strategy import Strategy

_WHERE = "mpistrategy.torch.broadcast"


def broadcast(thing: Any, root: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Give every rank what rank `root` has, in place.  Collective; in any context.

    Args:
        thing: a module; an optimizer, a scheduler, or another object with `state_dict` and `load_state_dict`, whose
            state may be there on `root` alone; or a nest of dicts, lists and tuples with tensors and plain values.
        root: whose.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Returns:
        `thing`, changed in place; of a nest, `root`'s nest, with this rank's own tensors where they fit.

    Raises:
        UnsupportedError: for a module with SyncBatchNorm, which needs torch.distributed.
        OptionTypeError: for a nest with other objects.
        CollectiveMismatchError: on every rank, when the modules differ in names, dtypes or shapes.

    >>> import torch, mpistrategy as ms, mpistrategy.torch as mst
    >>> strategy = ms.OneDeviceStrategy("CPU:0")
    >>> mst.broadcast({"seed": 7, "scale": torch.ones(2)}, strategy=strategy)
    {'seed': 7, 'scale': tensor([1., 1.])}
    """
    of = strategy_for(strategy, _WHERE)
    if isinstance(thing, torch.nn.Module):
        _module(thing, root, of, name)
        return thing
    stateful = callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    found = _nest(thing.state_dict() if stateful else thing, root, of, name)
    if not stateful:
        return found
    if of.rank != root:
        thing.load_state_dict(found)
    return thing


def _module(module: Any, root: int, strategy: Strategy, name: str | None) -> None:
    """Write `root`'s parameters and buffers into everybody's."""
    with Call(strategy.extended.communicator.guard, _WHERE, called=name) as call:
        for path, inner in module.named_modules():
            if isinstance(inner, torch.nn.SyncBatchNorm):
                raise UnsupportedError.at(
                    call.where,
                    found=f"a SyncBatchNorm as {path or 'the module'!r}, which speaks through torch.distributed",
                    expected="layers that need no process group",
                    fix="Use GroupNorm or LayerNorm, or BatchNorm, whose statistics are each rank's own: average them "
                    "with mst.all_reduce before you evaluate or save.",
                )
        tensors = {key: tensor.detach() for key, tensor in [*module.named_parameters(), *module.named_buffers()]}
        call.structure = ", ".join(tensors)
        received = strategy.broadcast(tensors, root)
    with torch.no_grad():
        for key, tensor in tensors.items() if strategy.rank != root else ():
            tensor.copy_(received[key])


def _nest(nest: Any, root: int, strategy: Strategy, name: str | None) -> Any:
    """Return `root`'s nest: its plain values as JSON, then its tensors, in this rank's own where they fit."""
    with Call(strategy.extended.communicator.guard, _WHERE, called=name) as call:
        is_source = strategy.rank == checked_root(root, strategy.size, call.where)
        here: dict[str, Any] = {}
        try:
            described = _taken_apart(nest, "", here)
        except OptionTypeError:
            if is_source:
                raise  # what another rank has does not matter
        text = np.frombuffer(json.dumps(described).encode() if is_source else b"", np.uint8)
        call.agree("broadcast a nest", op=f"from rank {root}")
        call.expect_more()
        length = int(strategy.broadcast(text.size, root))
        described = json.loads(strategy.broadcast(text if is_source else np.empty(length, np.uint8), root).tobytes())
        tensors: list[Any] = []
        found = _put_together(described, "", here, tensors)
        if tensors:
            received = strategy.broadcast(tensors, root)
            for tensor, result in zip(tensors, [] if is_source else received, strict=False):
                tensor.copy_(result)
    return nest if is_source else found


def _taken_apart(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """Return a nest as JSON without the numbers in its tensors, which are put into `tensors` by their paths."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), _taken_apart(inner, f"{path}/{key}", tensors)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_taken_apart(inner, f"{path}/{number}", tensors) for number, inner in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    plain = to_json(value)
    if plain is NOT_PLAIN:
        raise OptionTypeError.at(
            _WHERE, found=f"a {type(value).__name__} at {path or 'the top'}", expected="tensors and plain values"
        )
    return {"plain": plain}


def _put_together(described: Any, path: str, here: dict[str, Any], tensors: list[Any]) -> Any:
    """Return the nest that was taken apart, with tensors of `here` or new ones, which are added to `tensors`."""
    ((kind, inner),) = described.items()
    if kind == "tensor":
        dtype, shape = getattr(torch, inner[0]), tuple(inner[1])
        known = here.get(path)
        if known is None or known.dtype is not dtype or tuple(known.shape) != shape:
            known = torch.empty(shape, dtype=dtype)
        tensors.append(known)
        return known
    if kind == "dict":
        return {from_json(key): _put_together(value, f"{path}/{from_json(key)}", here, tensors) for key, value in inner}
    if kind == "plain":
        return from_json(inner)
    items = [_put_together(value, f"{path}/{number}", here, tensors) for number, value in enumerate(inner)]
    return items if kind == "list" else tuple(items)
