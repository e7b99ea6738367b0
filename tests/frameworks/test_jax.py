"""Pytrees of JAX in collectives and checkpoints, between compiled functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE

import mpistrategy as ms
from mpistrategy import errors

jax: Any = pytest.importorskip("jax")
msj: Any = pytest.importorskip("mpistrategy.jax")
jnp: Any = jax.numpy
TOTAL = SIZE * (SIZE + 1) / 2


class Point(NamedTuple):
    x: Any
    y: Any


class Box:
    """A class that only JAX knows."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


jax.tree_util.register_pytree_node(Box, lambda box: ((box.inner,), None), lambda _, inner: Box(*inner))


def tree(value: float, size: int = 3) -> Any:
    return {"a": Box(jnp.full(size, value)), "b": (None, Point(jnp.float32(value), [jnp.ones((2, 2)) * value]))}


def test_pytrees_in_every_collective(strategy: ms.Strategy) -> None:
    total = msj.all_reduce(tree(RANK + 1.0), "SUM", strategy=strategy)
    assert type(total["a"]) is Box
    assert isinstance(total["a"].inner, jax.Array)
    assert total["a"].inner.tolist() == [TOTAL] * 3
    assert total["b"][1].x == TOTAL
    mean = strategy.run(lambda: msj.average_gradients(tree(RANK + 1.0), weight=RANK + 1.0))
    assert mean["b"][1].y[0][0, 0] == pytest.approx(sum((r + 1) ** 2 for r in range(SIZE)) / TOTAL)
    assert msj.broadcast(tree(RANK), SIZE - 1, strategy=strategy)["a"].inner.tolist() == [SIZE - 1] * 3
    gathered = msj.all_gather(Box(jnp.full((RANK + 1, 2), RANK)), strategy=strategy)
    assert gathered.inner.shape == (TOTAL, 2)
    assert msj.all_reduce({}, strategy=strategy) == {}


def test_large_gradients_are_not_copied_out(strategy: ms.Strategy) -> None:
    gradients = [jnp.full(2**20, RANK + 1.0)]
    for _ in range(4):  # the memory for results is made when a size is asked for again
        kept = msj.average_gradients(gradients, strategy=strategy)
        again = msj.average_gradients([gradients[0] * 2], strategy=strategy)
        assert float(kept[0][0]) * 2 == float(again[0][-1]) == TOTAL / SIZE * 2
    memory = np.empty(2**18 + 16, np.float32)
    aligned = memory[-memory.ctypes.data % 64 // 4 :][: 2**18]
    from mpistrategy.arrays.foreign import as_kind_of

    assert as_kind_of(aligned, gradients[0]).unsafe_buffer_pointer() == aligned.ctypes.data


@pytest.mark.mpi(min_size=2)
def test_trees_that_differ_are_told(strategy: ms.Strategy) -> None:
    value = {"a" if RANK else "b": jnp.ones(2)}
    with pytest.raises(errors.CollectiveMismatchError, match="PyTreeDef"):
        msj.all_reduce(value, strategy=strategy)


def test_inside_jit_it_is_refused_with_what_to_do(strategy: ms.Strategy) -> None:
    for traced in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(errors.LeafError, match=r"between two compiled functions.*mpi4jax"):
            traced(lambda x: msj.all_reduce(x, strategy=strategy).sum())(jnp.ones(3))

    def step() -> Any:
        return jax.jit(lambda x: ms.get_replica_context().all_reduce("SUM", {"x": x}))(jnp.ones(3))

    with pytest.raises(errors.LeafError, match="between two compiled functions"):
        strategy.run(step)


def test_checkpoints_of_pytrees(strategy: ms.Strategy, tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    folder = shared_folder(tmp_path) / "c"
    parameters = {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    state = optimizer.init(parameters)
    _, state = optimizer.update(parameters, state, parameters)
    with strategy.scope():
        ms.Checkpoint(parameters=parameters, state=state, tree=msj.Tree(tree(2.0))).save(folder)
    for of in (strategy, ms.OneDeviceStrategy("CPU:0")):
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        with of.scope():
            checkpoint = ms.Checkpoint(parameters=zeros, state=optimizer.init(zeros), tree=msj.Tree(tree(0.0)))
        checkpoint.restore(folder)
        found = checkpoint.objects
        assert jax.tree.structure(found["state"]) == jax.tree.structure(state)
        for mine, saved in zip(
            jax.tree.leaves([zeros, found["state"]]), jax.tree.leaves([parameters, state]), strict=True
        ):
            assert isinstance(mine, jax.Array)
            assert (mine == saved).all()
        assert found["tree"].value["a"].inner.tolist() == [2.0] * 3
        with of.scope(), pytest.raises(errors.CheckpointMismatchError, match="parameters/w"):
            ms.Checkpoint(parameters={**zeros, "w": jnp.zeros(4)}, state=state, tree=msj.Tree(0.0)).restore(folder)
