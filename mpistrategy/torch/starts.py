"""Equal starts: one rank's model, optimizer state or nest of tensors on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpistrategy.checkpoint.storage.plain_values import NOT_PLAIN, from_json, to_json
from mpistrategy.errors import OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.reduction.broadcast import checked_root
from mpistrategy.strategy.current import strategy_for
from mpistrategy.strategy.strategy import Strategy

_WHERE = "mpistrategy.torch.broadcast"

#: The keys and numbers that lead to a leaf; keys with their types, since 1, True and "1" are different keys.
Path = tuple[Any, ...]


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
    with Call(strategy.extended.communicator.guard, _WHERE, called=name) as call:
        is_source = strategy.rank == checked_root(root, strategy.size, call.where)
        here: dict[Path, Any] = {}
        described: Any = None
        try:
            described = _taken_apart(nest, (), here)
        except OptionTypeError:
            if is_source or must_fit:
                raise
        text = np.frombuffer(json.dumps(described).encode() if is_source else b"", np.uint8)
        call.agree("broadcast a nest", op=f"from rank {root}")
        call.expect_more()
        length = int(strategy.broadcast(text.size, root))
        described = json.loads(strategy.broadcast(text if is_source else np.empty(length, np.uint8), root).tobytes())
        tensors: dict[Path, Any] = {}
        found = _put_together(described, (), here, tensors)
        call.expect_more()
        if must_fit and nest is not None:
            _refuse_misfit(here, tensors)
        call.agree("broadcast a nest", op="that fits")
        call.expect_more()
        if tensors:
            received = strategy.broadcast(list(tensors.values()), root)
            with torch.no_grad():
                for tensor, result in zip(tensors.values(), [] if is_source else received, strict=False):
                    tensor.copy_(result)
    return nest if is_source else found


def _refuse_misfit(here: Mapping[Path, Any], tensors: Mapping[Path, Any]) -> None:
    """Raise unless each tensor of the root has its place in the nest of this rank, and there is no other."""
    for path in [*tensors, *here]:
        mine, theirs = here.get(path), tensors.get(path)
        if mine is not theirs:
            raise ShapeError.at(
                _WHERE,
                found=f"{_in_words(mine)} at {_shown(path)}, where the root has {_in_words(theirs)}",
                expected="a nest with the same tensors on all ranks, or None where a rank has nothing yet",
            )


def _in_words(tensor: Any) -> str:
    if tensor is None:
        return "no tensor"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(path: Path) -> str:
    return "".join(f"[{part[1] if isinstance(part, tuple) else part}]" for part in path) or "the top"


def _key(key: Any) -> tuple[str, str]:
    return type(key).__name__, repr(key)


def _taken_apart(value: Any, path: Path, tensors: dict[Path, Any]) -> Any:
    """Return a nest as JSON without the numbers in its tensors, which are put into `tensors` by their paths."""
    if isinstance(value, torch.Tensor):
        if torch.is_grad_enabled() and value.requires_grad and not value.is_leaf:
            raise UnsupportedError.at(
                _WHERE,
                found=f"a computed tensor that wants gradients, at {_shown(path)}",
                expected="a tensor to write into: no gradients flow through a broadcast",
                fix="Give tensor.detach(), or call it in `with torch.no_grad():`.",
            )
        tensors[path] = value.detach()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {
            "dict": [[to_json(key), _taken_apart(inner, (*path, _key(key)), tensors)] for key, inner in value.items()]
        }
    if isinstance(value, (list, tuple)):
        items = [_taken_apart(inner, (*path, number), tensors) for number, inner in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    plain = to_json(value)
    if plain is NOT_PLAIN:
        raise OptionTypeError.at(
            _WHERE, found=f"a {type(value).__name__} at {_shown(path)}", expected="tensors and plain values"
        )
    return {"plain": plain}


def _put_together(described: Any, path: Path, here: Mapping[Path, Any], tensors: dict[Path, Any]) -> Any:
    """Return the nest that was taken apart, with tensors of `here` or new ones, which are added to `tensors`."""
    ((kind, inner),) = described.items()
    if kind == "tensor":
        dtype, shape = getattr(torch, inner[0]), tuple(inner[1])
        known = here.get(path)
        if known is None or known.dtype is not dtype or tuple(known.shape) != shape:
            known = torch.empty(shape, dtype=dtype)
        tensors[path] = known
        return known
    if kind == "dict":
        return {
            from_json(key): _put_together(value, (*path, _key(from_json(key))), here, tensors) for key, value in inner
        }
    if kind == "plain":
        return from_json(inner)
    items = [_put_together(value, (*path, number), here, tensors) for number, value in enumerate(inner)]
    return items if kind == "list" else tuple(items)
