"""Equal starts: one rank's model, optimizer state or nest of tensors on every rank."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from mpistrategy.checkpoint.format import NOT_PLAIN, from_json, to_json
from mpistrategy.errors import OptionTypeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.reduction.collectives import checked_root
from mpistrategy.strategy.strategy import Strategy, strategy_for
from mpistrategy.torch import tensors as t

_WHERE = "mpistrategy.torch.broadcast"
pytree: Any = torch.utils._pytree


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
    of = strategy_for(strategy, _WHERE)
    if isinstance(thing, torch.nn.Module):
        _refuse_lonely_statistics(thing)
        _received({**dict(thing.named_parameters()), **dict(thing.named_buffers())}, root, of, name, must_fit=True)
    elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        state = _received(thing.state_dict(), root, of, name, must_fit=False)
        if of.rank != root:
            thing.load_state_dict(state)
    else:
        return _received(thing, root, of, name, must_fit=True)
    return thing


def _refuse_lonely_statistics(module: Any) -> None:
    for path, inner in module.named_modules():
        if isinstance(inner, torch.nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise UnsupportedError.at(
                _WHERE,
                found=f"a SyncBatchNorm as {path or 'the module'!r}, which speaks through torch.distributed",
                expected="layers that need no process group",
                fix="Use GroupNorm or LayerNorm, or BatchNorm, whose statistics are each rank's own: average them "
                "with mst.all_reduce before you evaluate or save.",
            )


def _received(nest: Any, root: int, strategy: Strategy, name: str | None, *, must_fit: bool) -> Any:
    """Return `root`'s nest: its structure and plain values come as text, then its tensors.

    Args:
        nest, root, strategy, name: as of `broadcast`.
        must_fit: whether a rank's nest must have the root's tensors, and gets their values in place; else the rank gets
            new tensors.
    """
    communicator = strategy.extended.communicator
    with Call(communicator.guard, _WHERE, called=name) as call:
        is_source = strategy.rank == checked_root(root, strategy.size, call.where)
        is_there = nest is not None and (is_source or must_fit)
        leaves, structure = pytree.tree_flatten_with_path(nest if is_there else ())
        own_leaves = {pytree.keystr(path): leaf for path, leaf in leaves}
        descriptions = {path: _description(leaf, path or "the top") for path, leaf in own_leaves.items()}
        text = json.dumps([_in_text(structure), descriptions]) if is_source else ""
        call.agree("broadcast a nest", op=f"from rank {root}")
        structure, root_descriptions = json.loads(communicator.allgather_text(text)[root])
        call.expect_more()
        new_leaves = {
            path: _leaf_of(description, own_leaves.get(path)) for path, description in root_descriptions.items()
        }
        tensors = {path: leaf for path, leaf in (own_leaves or new_leaves).items() if isinstance(leaf, torch.Tensor)}
        # on the host: other ranks may make the root's state on another device
        received = strategy.broadcast({path: tensor.detach().cpu() for path, tensor in tensors.items()}, root)
        with torch.no_grad():
            for path, tensor in tensors.items():
                tensor.copy_(received[path])
    return nest if is_source else pytree.tree_unflatten(new_leaves.values(), pytree.treespec_loads(structure))


def _in_text(structure: Any) -> str:
    """Return the containers of a nest as text, from which other ranks make them."""
    with suppress(NotImplementedError, TypeError):
        text: str = pytree.treespec_dumps(structure)
        if pytree.treespec_loads(text) == structure:
            return text
    raise OptionTypeError.at(
        _WHERE,
        found=f"the containers {structure!s:.200}",
        expected="dicts with keys that are text or numbers, lists, tuples",
    )


def _description(leaf: Any, path: str) -> Any:
    """Return a leaf as JSON, a tensor without its numbers."""
    if isinstance(leaf, torch.Tensor):
        if torch.is_grad_enabled() and leaf.requires_grad and not leaf.is_leaf:
            raise UnsupportedError.at(
                _WHERE,
                found=f"a computed tensor that wants gradients, at {path}",
                expected="a tensor to write into: no gradients flow through a broadcast",
                fix="Give tensor.detach(), or call it in `with torch.no_grad():`.",
            )
        t.checked([leaf], f"{_WHERE}, {path}", is_written=True)
        return {"tensor": [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]}
    if isinstance(leaf, np.generic):
        return {"number": [leaf.dtype.str, leaf.tobytes().hex()]}
    plain = {"Counter": to_json(dict(leaf))} if isinstance(leaf, Counter) else to_json(leaf)
    if plain is NOT_PLAIN:
        raise OptionTypeError.at(
            _WHERE, found=f"a {type(leaf).__name__} at {path}", expected="tensors and plain values"
        )
    return plain


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
