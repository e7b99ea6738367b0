"""Pytrees in collectives, outside of jit; in any context.

Every class that is registered with ``jax.tree_util`` is entered.  With their calls the ranks compare the classes and
the keys of the trees.  Static data, such as functions, are not compared: each rank keeps its own.  Gradients of JAX on
the host are read where they are, and results are JAX arrays of the memory that they were written to.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from mpistrategy.arrays.convert import host_array, without_data
from mpistrategy.errors import LeafError, OptionError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import Op
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy, strategy_for

if not hasattr(sys.modules["jax._src.core"], "trace_state_clean"):  # see `mpistrategy.objects.jax_traces`
    raise UnsupportedError.at(
        "import mpistrategy.jax",
        found=f"JAX {jax.__version__}, which does not say whether it traces a function",
        expected="JAX from 0.4.30 to 0.10",
        fix="Install one of these, or a later mpistrategy.",
    )

#: The address in the text of an object without a `repr` of its own; it differs between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_REMEMBERED = 64


def all_reduce(tree: Any, op: Op = "MEAN", *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Reduce a pytree over the ranks.  Collective; outside of traces.

    Args:
        tree: JAX arrays, arrays and numbers, alike on all ranks.
        op: "MEAN", "SUM", "MIN", "MAX" or "PROD".
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        ContextError: in a function that JAX traces.
        LeafError: for functions, random keys and donated arrays among the leaves.
        MpiStrategyError: as `ReplicaContext.all_reduce`.
    """
    return _together(
        "mpistrategy.jax.all_reduce", tree, strategy, name, lambda to, nest: to.all_reduce(op, nest, name=name)
    )


def average_gradients(
    gradients: Any, *, strategy: Strategy | None = None, weight: Any = None, name: str | None = None
) -> Any:
    """Return the mean of the ranks' gradients, a pytree.  Collective; outside of traces.

    Args:
        gradients: the result of a function made by ``jax.grad``.
        strategy: whose ranks; None for the strategy of this scope or step.
        weight: of this rank's gradients, such as its number of rows.
        name: is compared between the ranks instead of the call site.

    Raises:
        MpiStrategyError: as `all_reduce`.
    """
    return _together(
        "mpistrategy.jax.average_gradients",
        gradients,
        strategy,
        name,
        lambda to, nest: to.all_reduce("MEAN", nest, name=name, weight=weight),
    )


def all_gather(tree: Any, axis: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Concatenate the ranks' arrays of a pytree along `axis`, in rank order.  Collective; outside of traces.

    Args:
        tree: arrays with axes; their lengths along `axis` may differ.
        axis: an int.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        ContextError: in a function that JAX traces.
        LeafError: for functions, random keys and donated arrays among the leaves.
        MpiStrategyError: as `ReplicaContext.all_gather`.
    """
    return _together(
        "mpistrategy.jax.all_gather", tree, strategy, name, lambda to, nest: to.all_gather(nest, axis, name=name)
    )


def broadcast(tree: Any, root: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Return rank `root`'s pytree on every rank.  Collective; outside of traces.

    Args:
        tree: arrays and numbers, alike on all ranks in structure, dtypes and shapes.
        root: whose.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        MpiStrategyError: as `Strategy.broadcast`.
    """
    return _together(
        "mpistrategy.jax.broadcast", tree, strategy, name, lambda to, nest: to.strategy.broadcast(nest, root, name=name)
    )


def _together(
    where: str,
    tree: Any,
    strategy: Strategy | None,
    name: str | None,
    collective: Callable[[ReplicaContext, Any], Any],
) -> Any:
    """Return a pytree after a collective: a function of a context, and of a nest with the leaves."""
    flat, of = _flat(tree), strategy_for(strategy, where)
    with ReplicaContext(of, of.rank) as context:
        _check(flat, tree, of, where, name)
        # None for a tree without leaves: the ranks compare the call, and nothing is sent.
        result = collective(context, {flat.text: flat.leaves or None})[flat.text]
    return jax.tree.unflatten(flat.structure, result or [])


class _Flat(NamedTuple):
    """A pytree, taken apart.

    Attributes:
        leaves: its leaves.
        structure: from which JAX builds the tree again.
        text: the classes of its nodes and the keys of its leaves, alike in every process.
    """

    leaves: list[Any]
    structure: Any
    text: str


def _flat(tree: Any) -> _Flat:
    leaves, structure = jax.tree.flatten(tree)
    try:
        text = _texts.get(structure, "")
    except Exception:  # static data that have no hash, or cannot be compared
        return _Flat(leaves, structure, _in_words(tree, structure))
    if not text:
        if len(_texts) >= _REMEMBERED:
            _texts.clear()
        text = _texts[structure] = _in_words(tree, structure)
    return _Flat(leaves, structure, text)


#: The texts of structures: to make one takes ten times as long as to take a tree apart.
_texts: dict[Any, str] = {}


def _in_words(tree: Any, structure: Any) -> str:
    return _words(structure, iter(_paths(tree)))


def _words(node: Any, paths: Iterator[str]) -> str:
    data = node.node_data()
    if data is None:
        return next(paths) or "*"
    kind = data[0]
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}({', '.join(_words(child, paths) for child in node.children())})"


def _paths(tree: Any) -> list[str]:
    """Return the path of each leaf."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [_ADDRESS.sub("", path) for path in paths]


def _check(flat: _Flat, tree: Any, of: Strategy, where: str, name: str | None) -> None:
    """Raise, on every rank, for leaves that are functions, and for values of JAX's without data."""
    for number, leaf in enumerate(flat.leaves):
        if callable(leaf) or without_data(leaf, where):
            path = _paths(tree)[number]
            with Call(of.extended.communicator.guard, where, name, structure=flat.text):
                if callable(leaf):
                    raise LeafError.at(
                        where,
                        found=f"a function at leaf {path or '*'}",
                        expected="arrays and numbers",
                        fix="Make it static data of its class, or pass the arrays alone: "
                        "equinox.filter(tree, equinox.is_array).",
                    )
                host_array(leaf, where, path)  # raises


class Tree:
    """A pytree of any registered classes, for `Checkpoint`: ``Checkpoint(model=Tree(model))``.

    Nests of dict, list, tuple and named tuple need none: a checkpoint takes them as they are, and
    ``checkpoint.objects`` has the restored nests.

    Attributes:
        value: the pytree; after a restore, with the restored leaves.

    >>> Tree({"w": 1.0}).state_dict()
    {'structure': "dict(['w'])", 'leaves': [1.0]}
    """

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def state_dict(self) -> dict[str, Any]:
        """Return the classes and keys as text, and the leaves."""
        flat = _flat(self.value)
        return {"structure": flat.text, "leaves": flat.leaves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the leaves.

        Raises:
            OptionError: for leaves of another structure.
        """
        flat = _flat(self.value)
        if state["structure"] != flat.text:
            raise OptionError.at(
                "Tree.load_state_dict", found=f"leaves of {state['structure']:.200}", expected=f"of {flat.text:.200}"
            )
        self.value = jax.tree.unflatten(flat.structure, state["leaves"])

    def __repr__(self) -> str:
        return f"Tree({self.value!r})"
