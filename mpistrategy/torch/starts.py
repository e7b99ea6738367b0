"""Equal starts: one rank's model, optimizer state or nest of tensors on every rank."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch

from mpistrategy.checkpoint.storage.plain_values import NOT_PLAIN, from_json, to_json
from mpistrategy.errors import OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.reduction.broadcast import checked_root
from mpistrategy.strategy.current import strategy_for
from mpistrategy.strategy.strategy import Strategy

_WHERE = "mpistrategy.torch.broadcast"


def broadcast(thing: Any, root: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Give every rank what rank `root` has, in place.  Collective; in any context.

    Args:
        thing: a module; an optimizer, a scheduler, or another object with `state_dict` and `load_state_dict`, whose
            state may be there on `root` alone; or a nest of dicts, lists and tuples with tensors and plain values,
            which may be None on other ranks than `root`.
        root: whose.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Returns:
        `thing`, changed in place; of a nest, `root`'s nest, with this rank's own tensors.

    Raises:
        UnsupportedError: for a module with SyncBatchNorm, which needs torch.distributed.
        OptionTypeError: for a nest with other objects.
        ShapeError: on every rank, when a rank's nest has other tensors than `root`'s.
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
    found = _nest(thing.state_dict() if stateful else thing, root, of, name, must_fit=not stateful)
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


def _nest(nest: Any, root: int, strategy: Strategy, name: str | None, *, must_fit: bool) -> Any:
    """Return `root`'s nest: its plain values as JSON, then its tensors, in this rank's own.

    Args:
        nest, root, strategy, name: as of `broadcast`.
        must_fit: whether a rank that has a nest needs the root's tensors in it; else it gets new ones.
    """
    communicator = strategy.extended.communicator
    with Call(communicator.guard, _WHERE, called=name) as call:
        is_source = strategy.rank == checked_root(root, strategy.size, call.where)
        fits = nest is not None and (is_source or must_fit)
        mine: dict[str, str] = {}
        text = json.dumps(_described(nest, "", mine)) if fits else "null"
        call.agree("broadcast a nest", op=f"from rank {root}")
        described = json.loads(communicator.allgather_text(text if is_source else "")[root])
        call.expect_more()
        tensors: dict[str, Any] = {}
        found = _like(described, nest, "", tensors)
        if fits:
            _refuse_misfit(mine, {path: _in_words(tensor) for path, tensor in tensors.items()})
        call.agree("broadcast a nest", op="that fits")
        call.expect_more()
        received = strategy.broadcast(list(tensors.values()), root) if tensors else []
        with torch.no_grad():
            for tensor, result in zip(tensors.values(), received, strict=True):
                if not is_source:
                    tensor.copy_(result)
    return nest if is_source else found


def _refuse_misfit(mine: dict[str, str], theirs: dict[str, str]) -> None:
    """Raise unless each tensor of the root has its place in the nest of this rank, and there is no other."""
    for path in theirs | mine:
        here, there = mine.get(path, "no tensor"), theirs.get(path, "no tensor")
        if here != there:
            raise ShapeError.at(
                _WHERE,
                found=f"{here} at {path or 'the top'}, where the root has {there}",
                expected="a nest with the same tensors on all ranks, or None where a rank has nothing yet",
            )


def _in_words(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _described(value: Any, path: str, tensors: dict[str, str]) -> Any:
    """Return a nest as JSON without the numbers in its tensors, which are put into `tensors` by their paths."""
    if isinstance(value, torch.Tensor):
        if torch.is_grad_enabled() and value.requires_grad and not value.is_leaf:
            raise UnsupportedError.at(
                _WHERE,
                found=f"a computed tensor that wants gradients, at {path or 'the top'}",
                expected="a tensor to write into: no gradients flow through a broadcast",
                fix="Give tensor.detach(), or call it in `with torch.no_grad():`.",
            )
        tensors[path] = _in_words(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {
            "dict": [
                [_plain(key, path), _described(inner, f"{path}[{key!r}]", tensors)] for key, inner in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        items = [_described(inner, f"{path}[{number}]", tensors) for number, inner in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    return _plain(value, path)


def _plain(value: Any, path: str) -> Any:
    plain = to_json(value)
    if plain is NOT_PLAIN:
        raise OptionTypeError.at(
            _WHERE, found=f"a {type(value).__name__} at {path or 'the top'}", expected="tensors and plain values"
        )
    return plain


def _like(described: Any, mine: Any, path: str, tensors: dict[str, Any]) -> Any:
    """Return the nest that was described, with tensors of this rank's nest or new ones, added to `tensors`."""
    kind, inner = next(iter(described.items())) if isinstance(described, dict) else ("", described)
    if kind == "tensor":
        dtype, shape = getattr(torch, inner[0]), torch.Size(inner[1])
        is_same = isinstance(mine, torch.Tensor) and (mine.dtype, mine.shape) == (dtype, shape)
        tensors[path] = mine.detach() if is_same else torch.empty(shape, dtype=dtype)
        return mine if is_same else tensors[path]
    if kind == "dict":
        known = mine if isinstance(mine, dict) else {}
        found = copy.copy(known)  # of its class, such as the Counter of MultiStepLR
        found.clear()
        for key, value in ((from_json(key), value) for key, value in inner):
            found[key] = _like(value, known.get(key), f"{path}[{key!r}]", tensors)
        return found
    if kind == "tuple" or isinstance(inner, list):
        old = mine if isinstance(mine, (list, tuple)) and len(mine) == len(inner) else [None] * len(inner)
        items = [_like(each, old[at], f"{path}[{at}]", tensors) for at, each in enumerate(inner)]
        return tuple(items) if kind else items
    return from_json(described)
