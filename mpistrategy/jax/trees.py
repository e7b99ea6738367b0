"""Pytrees in collectives, outside of jit; in any context.

Every class that is registered with ``jax.tree_util`` is entered.  The ranks compare the structure of the trees with
their calls.  Gradients of JAX on the host are read where they are, and results are JAX arrays of the memory that they
were written to.
"""

from __future__ import annotations

from typing import Any

import jax

from mpistrategy.errors import OptionError
from mpistrategy.options import Op
from mpistrategy.strategy.current import ReplicaContext, strategy_for
from mpistrategy.strategy.strategy import Strategy

_PACKAGE = "mpistrategy.jax"


def all_reduce(tree: Any, op: Op = "MEAN", *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Reduce a pytree over the ranks.  Collective; outside of jit.

    Args:
        tree: JAX arrays, arrays and numbers, alike on all ranks.
        op: "MEAN", "SUM", "MIN", "MAX" or "PROD".
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        LeafError: inside jit, grad or vmap.
        As `ReplicaContext.all_reduce`.
    """
    return _reduced(tree, op, strategy, "all_reduce", None, name)


def average_gradients(
    gradients: Any, *, strategy: Strategy | None = None, weight: Any = None, name: str | None = None
) -> Any:
    """Return the mean of the ranks' gradients, a pytree.  Collective; outside of jit.

    Args:
        gradients: what a function made by ``jax.grad`` returned.
        strategy: whose ranks; None for the strategy of this scope or step.
        weight: of this rank's gradients, such as its number of rows.
        name: is compared between the ranks instead of the call site.

    Raises:
        As `all_reduce`.
    """
    return _reduced(gradients, "MEAN", strategy, "average_gradients", weight, name)


def _reduced(tree: Any, op: Op, strategy: Strategy | None, method: str, weight: Any, name: str | None) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    of = strategy_for(strategy, f"{_PACKAGE}.{method}")
    text = str(structure)
    with ReplicaContext(of, of.rank) as context:
        found: Any = context.all_reduce(op, {text: leaves}, name=name, weight=weight)
    return jax.tree.unflatten(structure, found[text])


def all_gather(tree: Any, axis: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Concatenate the ranks' arrays of a pytree along `axis`, in rank order.  Collective; outside of jit.

    Args:
        tree: arrays with axes; their lengths along `axis` may differ.
        axis: an int.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        LeafError: inside jit, grad or vmap.
        As `ReplicaContext.all_gather`.
    """
    leaves, structure = jax.tree.flatten(tree)
    of = strategy_for(strategy, f"{_PACKAGE}.all_gather")
    with ReplicaContext(of, of.rank) as context:
        found: Any = context.all_gather({str(structure): leaves}, axis, name=name)
    return jax.tree.unflatten(structure, found[str(structure)])


def broadcast(tree: Any, root: int = 0, *, strategy: Strategy | None = None, name: str | None = None) -> Any:
    """Return rank `root`'s pytree on every rank.  Collective; outside of jit.

    Args:
        tree: arrays and numbers, alike on all ranks in structure, dtypes and shapes.
        root: whose.
        strategy: whose ranks; None for the strategy of this scope or step.
        name: is compared between the ranks instead of the call site.

    Raises:
        As `Strategy.broadcast`.
    """
    leaves, structure = jax.tree.flatten(tree)
    of = strategy_for(strategy, f"{_PACKAGE}.broadcast")
    found: Any = of.broadcast({str(structure): leaves}, root, name=name)
    return jax.tree.unflatten(structure, found[str(structure)])


class Tree:
    """A pytree of any registered classes, for `Checkpoint`: ``Checkpoint(model=Tree(model))``.

    Nests of dict, list, tuple and named tuple need none: a checkpoint takes them as they are, and
    ``checkpoint.objects`` has the restored ones.

    Attributes:
        value: the pytree; after a restore the one with the restored leaves.

    >>> Tree({"w": 1.0}).state_dict()
    {'structure': "PyTreeDef({'w': *})", 'leaves': [1.0]}
    """

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def state_dict(self) -> dict[str, Any]:
        """Return the structure as text, and the leaves."""
        leaves, structure = jax.tree.flatten(self.value)
        return {"structure": str(structure), "leaves": leaves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the leaves.

        Raises:
            OptionError: for those of another structure.
        """
        structure = jax.tree.structure(self.value)
        if state["structure"] != str(structure):
            raise OptionError.at(
                "Tree.load_state_dict", found=f"leaves of {state['structure']:.200}", expected=f"of {structure!s:.200}"
            )
        self.value = jax.tree.unflatten(structure, state["leaves"])

    def __repr__(self) -> str:
        return f"Tree({self.value!r})"
