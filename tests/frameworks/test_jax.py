"""JAX: pytrees in collectives and checkpoints between compiled functions, and nothing of this library inside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pages
import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE, context, new_variable

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.objects.jax_traces import FIX

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
    assert dir(msj) == sorted(msj.__all__)


@pytest.mark.mpi(min_size=2)
def test_trees_that_differ_are_told(strategy: ms.Strategy) -> None:
    value = {"a" if RANK else "b": jnp.ones(2)}
    with pytest.raises(errors.CollectiveMismatchError, match=r"dict\(\['a'\]\)"):
        msj.all_reduce(value, strategy=strategy)
    for call in (msj.all_reduce, msj.all_gather, msj.broadcast):
        with pytest.raises(errors.CollectiveMismatchError) as told:
            call({} if RANK else value, strategy=strategy)  # an empty one, too, at this call
        assert "dict()" in told.value.calls[1].structure
        assert all("test_jax.py" in rank.site for rank in told.value.calls.values())


# ------------------------------------------------------------------------------------------------- inside a trace


def scanned(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.scan(lambda carry, y: (carry, step(y)), 0.0, x)[1]


def mapped(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    everywhere = jax.sharding.PartitionSpec()
    return jax.shard_map(step, mesh=jax.make_mesh((1,), ("rows",)), in_specs=everywhere, out_specs=everywhere)  # type: ignore[no-any-return]


#: Each makes a function that JAX traces when it is called.
TRANSFORMATIONS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "jit": jax.jit,
    "grad": lambda step: jax.grad(lambda x: step(x).sum()),
    "vmap": jax.vmap,
    "scan": scanned,
    "remat": jax.checkpoint,
    "eval_shape": lambda step: lambda x: jax.eval_shape(step, x),
    "jit in vmap": lambda step: jax.vmap(jax.jit(step)),
    "computed while compiling": lambda step: jax.jit(lambda x: _at_compile_time(step, x)),
    **({"shard_map": mapped} if hasattr(jax, "shard_map") else {}),
}


def _at_compile_time(step: Callable[[Any], Any], x: Any) -> Any:
    with jax.ensure_compile_time_eval():
        return step(x)


def uses_of(strategy: ms.Strategy) -> dict[str, Callable[[Any], Any]]:
    """Return what a program may do with this library, with the values of JAX and without."""
    with strategy.scope():
        v = ms.Variable(np.ones(3, np.float32), aggregation="SUM")
        own = ms.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        mean = ms.metrics.Mean()
        sgd = ms.optimizers.SGD(0.1)
        checkpoint = ms.Checkpoint(v=v)
        buckets = ms.optimizers.SGD(0.1).gradient_buckets([v])
    streams, accumulator = strategy.rng(1), ms.gradients.GradientAccumulator(2)
    arena = strategy.arena({"a": np.ones(2)})
    batches = iter(strategy.experimental_distribute_dataset(ms.Dataset.from_arrays(np.ones(12), 12)))
    here = ms.ReplicaContext(strategy, strategy.rank)
    ones = np.ones(3, np.float32)

    def in_step(call: Callable[[], Any]) -> Callable[[Any], Any]:
        def made(x: Any) -> Any:
            with here:
                return call()

        return made

    reads: dict[str, Callable[[Any], Any]] = {
        "x * v": lambda x: x * v,
        "v * 2": lambda x: v * 2,
        "v @ v": lambda x: v @ v,
        "v[0]": lambda x: v[0],
        "float": lambda x: float(own),
        "jnp.asarray": lambda x: jnp.asarray(v),
        "np.asarray": lambda x: np.asarray(v),
        "numpy": lambda x: v.numpy(),
        "read_value": lambda x: v.read_value(),
        "value": lambda x: v.value(),
        "local_view": lambda x: v.local_view,
        "local_copy": lambda x: v.local_copy(),
        "array of a list": lambda x: jnp.array([v, v]),
        "arena": lambda x: arena.values["a"],
        "metric": lambda x: mean.result(),
        "shared": lambda x: streams.shared.normal(),
        "replica": lambda x: streams.replica.normal(),
        "at": lambda x: streams.at(1).normal(),
        "rng": lambda x: strategy.rng(2),
        "next": lambda x: next(batches),
        "learning_rate": lambda x: sgd.learning_rate,
    }
    writes: dict[str, Callable[[Any], Any]] = {
        "assign": lambda x: v.assign(ones),
        "assign a traced value": lambda x: v.assign(x),
        "assign_add in a step": in_step(lambda: v.assign_add(ones)),
        "assign_add ON_READ": in_step(lambda: own.assign_add(1.0)),
        "update_state": in_step(lambda: mean.update_state(2.0)),
        "update_state of a traced value": lambda x: mean.update_state(x),
        "reset_state": lambda x: mean.reset_state(),
        "accumulate": lambda x: accumulator.add([ones]),
        "ready": in_step(lambda: buckets.ready(0)),
        "apply_gradients": in_step(lambda: sgd.apply_gradients([(ones, v)])),
        "a variable": lambda x: ms.Variable(1.0),
        "a checkpoint": lambda x: checkpoint.save("never written"),
    }
    collectives: dict[str, Callable[[Any], Any]] = {
        "reduce": lambda x: strategy.reduce("SUM", x.size),
        "reduce a traced value": lambda x: strategy.reduce("SUM", x),
        "gather": lambda x: strategy.gather(ones, 0),
        "broadcast": lambda x: strategy.broadcast(3),
        "barrier": lambda x: strategy.barrier(),
        "all_reduce": in_step(lambda: context().all_reduce("SUM", 1.0)),
        "all_reduce_async": in_step(lambda: context().all_reduce_async("SUM", ones).wait()),
        "all_gather": in_step(lambda: context().all_gather(ones, 0)),
        "reduce_to": lambda x: strategy.extended.reduce_to("SUM", ms.PerReplica((ones,)), v),
        "an arena": lambda x: strategy.reduce("SUM", arena),
        "run": lambda x: strategy.run(lambda: x),
        "msj.all_reduce": lambda x: msj.all_reduce({"x": x}, strategy=strategy),
        "msj.broadcast": lambda x: msj.broadcast({"n": 1}, strategy=strategy),
    }
    return {**reads, **writes, **collectives}


@pytest.mark.one_rank
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_nothing_works_inside_a_trace(strategy: ms.Strategy, transformation: str) -> None:
    uses = uses_of(strategy)
    for _ in range(3):  # from the second time on a plan is run
        assert uses["all_reduce"](None) == SIZE
    for name, use in uses.items():
        # A use of whatever kind returns what it was given, so that only this library's refusal can stop it.
        traced = TRANSFORMATIONS[transformation](lambda x, use=use: (use(x), x * 1.0)[1])
        with pytest.raises(errors.ContextError) as refused:
            traced(jnp.ones(3))
        assert refused.value.fix == FIX or FIX in str(refused.value), name
    variable = uses["read_value"](None)
    assert variable.tolist() == [1.0] * 3  # nothing was written
    assert uses["metric"](None) != uses["metric"](None)  # NaN: nothing was added
    assert len(uses["next"](None)) == 12 // SIZE  # the first batch is still to come
    assert strategy.reduce("SUM", 1) == SIZE


@pytest.mark.mpi(min_size=2)
def test_a_trace_on_one_rank_is_told_to_all(strategy: ms.Strategy) -> None:
    def mean(x: Any) -> Any:
        return x.sum() / strategy.reduce("SUM", float(x.shape[0]))

    with pytest.raises(errors.ContextError, match="JAX traces"):
        (jax.jit(mean) if RANK == 1 else mean)(jnp.ones(3))
    assert mean(jnp.ones(3)) == 1 / SIZE


def test_outside_a_trace_everything_works(strategy: ms.Strategy) -> None:
    v = new_variable(strategy, np.arange(3, dtype=np.float32))
    ones = jnp.ones(3)
    seen: list[Any] = []

    def elsewhere(x: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(v.numpy().tolist()))
        thread.start()
        thread.join()
        return x

    jax.jit(elsewhere)(ones)
    assert seen == [[0.0, 1.0, 2.0]]  # another thread than the one in which JAX traces
    times_v = jax.jit(lambda x: jax.pure_callback(lambda y: np.asarray(y) * v, x, x))
    assert times_v(ones).tolist() == [0.0, 1.0, 2.0]
    v.assign_add(np.ones(3, np.float32))
    assert times_v(ones).tolist() == [1.0, 2.0, 3.0]
    with jax.disable_jit():
        assert jax.jit(lambda x: x * strategy.reduce("SUM", 1))(ones).tolist() == [SIZE] * 3


def test_the_guide_says_what_the_error_says() -> None:
    assert FIX in " ".join(pages.TEXTS["jax"].split())


# ------------------------------------------------------------------------------------------------ memory and leaves


def test_jax_gets_the_value_of_that_moment(strategy: ms.Strategy) -> None:
    """JAX copies large arrays later, and not at once while compiled functions are under way."""
    start, other = np.ones((1024, 1024), np.float32), np.full((1024, 1024), 7, np.float32)
    v = new_variable(strategy, start)
    held = ms.PerReplica((start.copy(),))
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda i, y: y @ y * 0.001, x))
    size = jnp.ones((400, 400))
    for way in (jnp.asarray, jnp.array, lambda v: jnp.ones((), jnp.float32) * v, lambda v: jnp.stack([v])[0]):
        for trial in range(4):
            v.assign(start)
            held.values[0][...] = 1
            work = [busy(size) for _ in range(2 * (trial % 2))]
            taken = way(v), way(held)
            v.assign(other)
            held.values[0][...] = 7
            assert [np.asarray(each).max() for each in taken] == [1, 1]
            jax.block_until_ready(work)


def test_results_live_longer_than_donated_arguments(strategy: ms.Strategy) -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for size in (64, 2**20):
        given = jnp.full(size, RANK + 1.0)
        results = [
            msj.all_reduce(given, "SUM", strategy=strategy),
            msj.broadcast(given, strategy=strategy),
            msj.all_gather(given, strategy=strategy)[:size],
        ]
        add(given).block_until_ready()
        assert [float(result.max()) for result in results] == [TOTAL, 1, 1]


def test_leaves_without_numbers_are_told_on_every_rank(strategy: ms.Strategy, tmp_path: Path) -> None:
    donated, fine = jnp.ones(3), jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    last = SIZE - 1
    for bad, words in {
        "donated": (donated, r"donated to.*donate_argnums"),
        "keys": (jax.random.key(1), r"of dtype key.*jax\.random\.key_data"),
        "function": (jax.nn.relu, r"static data"),
    }.values():
        for call in (msj.all_reduce, msj.broadcast, msj.all_gather, msj.average_gradients):
            with pytest.raises(errors.LeafError, match=rf"at leaf \['a'\]\[1\].*{words}"):
                call({"a": [fine, fine if last > RANK else bad]}, strategy=strategy)
    for bad in (donated, jax.random.key(1)):
        for reduce in (lambda value: context().all_reduce("SUM", value), lambda value: context().all_gather(value, 0)):
            with pytest.raises(errors.LeafError, match=r"donate_argnums|key_data"):
                strategy.run(reduce, args=({"a": fine if last > RANK else bad},))
        with strategy.scope(), pytest.raises(errors.LeafError, match=r"state/bad.*(donate_argnums|key_data)"):
            ms.Checkpoint(state={"w": fine, "bad": bad}).save(shared_folder(tmp_path) / "c")
    with pytest.raises(errors.DTypeError, match=r"float8_e4m3fn at leaf.*astype"):
        msj.all_reduce(jnp.ones(3, jnp.float8_e4m3fn), strategy=strategy)
    with pytest.raises(errors.DTypeError, match="float0"):  # the gradient of a whole number
        msj.average_gradients(jax.grad(lambda count: 2.0 * count, allow_int=True)(3), strategy=strategy)
    assert strategy.reduce("SUM", 1) == SIZE


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "uint4", "bfloat16", "bool"])
def test_small_dtypes_are_sent(strategy: ms.Strategy, dtype: str) -> None:
    value = {"w": jnp.array([0, 1, RANK]).astype(dtype)}
    sent = msj.broadcast(value, SIZE - 1, strategy=strategy)["w"]
    assert isinstance(sent, jax.Array)
    assert sent.dtype == dtype
    assert sent.astype(np.float32).tolist() == jnp.array([0, 1, SIZE - 1]).astype(dtype).astype(np.float32).tolist()
    assert msj.all_gather(value, strategy=strategy)["w"].shape == (3 * SIZE,)


# ----------------------------------------------------------------------------------------------- classes of libraries


def of_flax(value: float) -> tuple[Any, Callable[[Any], Any]]:
    train_state = pytest.importorskip("flax.training.train_state")
    optax = pytest.importorskip("optax")
    made = train_state.TrainState.create(
        apply_fn=lambda *_: None, params={"w": jnp.full(3, value), "none": None}, tx=optax.adam(0.1)
    )
    return made, lambda state: state.params["w"]


def of_equinox(value: float) -> tuple[Any, Callable[[Any], Any]]:
    equinox = pytest.importorskip("equinox")

    class Model(equinox.Module):  # type: ignore[misc, name-defined]
        network: Any
        how: Any = equinox.field(static=True)

    mlp = equinox.filter(equinox.nn.MLP(3, 1, 4, 1, key=jax.random.key(0)), equinox.is_array)
    model = Model(jax.tree.map(lambda x: jnp.full(3, value), mlp), lambda x: x)
    return model, lambda model: model.network.layers[0].bias


def of_a_class(value: float) -> tuple[Any, Callable[[Any], Any]]:
    class Static:
        """Keyed by objects without words of their own, and with static data that have no hash."""

        def __init__(self, w: Any, how: Any) -> None:
            self.w, self.how = w, how

    def with_keys(of: Static) -> Any:
        return [(jax.tree_util.DictKey(object()), of.w), (jax.tree_util.GetAttrKey("none"), None)], of.how

    jax.tree_util.register_pytree_with_keys(Static, with_keys, lambda how, children: Static(children[0], how))
    return Static(jnp.full(3, value), [lambda: 0]), lambda static: static.w


@pytest.mark.parametrize("make", [of_flax, of_equinox, of_a_class])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_trees_with_functions_as_static_data(strategy: ms.Strategy, make: Callable[[float], Any]) -> None:
    mine, read = make(RANK + 1.0)
    first = msj.broadcast(mine, strategy=strategy)
    assert type(first) is type(mine)
    assert jax.tree.structure(first) is not None
    assert read(first).tolist() == [1.0] * 3
    for _ in range(2):
        total = strategy.run(lambda: msj.all_reduce(mine, "SUM", strategy=strategy))
        assert read(total).tolist() == [TOTAL] * 3
    assert read(msj.all_gather(jax.tree.map(jnp.atleast_1d, mine), strategy=strategy)).shape == (3 * SIZE,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_checkpoints_of_pytrees(strategy: ms.Strategy, tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    folder = shared_folder(tmp_path) / "c"
    parameters = {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    state = optimizer.init(parameters)
    _, state = optimizer.update(parameters, state, parameters)
    (model, read), (other, _) = of_flax(2.0), of_flax(0.0)  # with other functions
    trees = {"tree": msj.Tree(tree(2.0)), "model": msj.Tree(model)}
    with strategy.scope():
        ms.Checkpoint(parameters=parameters, state=state, **trees).save(folder)
    for of in (strategy, ms.OneDeviceStrategy("CPU:0")):
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        with of.scope():
            trees = {"tree": msj.Tree(tree(0.0)), "model": msj.Tree(other)}
            checkpoint = ms.Checkpoint(parameters=zeros, state=optimizer.init(zeros), **trees)
        checkpoint.restore(folder)
        found = checkpoint.objects
        assert jax.tree.structure(found["state"]) == jax.tree.structure(state)
        for mine, saved in zip(
            jax.tree.leaves([zeros, found["state"]]), jax.tree.leaves([parameters, state]), strict=True
        ):
            assert isinstance(mine, jax.Array)
            assert (mine == saved).all()
        assert found["tree"].value["a"].inner.tolist() == read(found["model"].value).tolist() == [2.0] * 3
        assert found["model"].value.apply_fn is other.apply_fn
        with of.scope(), pytest.raises(errors.CheckpointMismatchError, match="parameters/w"):
            ms.Checkpoint(parameters={**zeros, "w": jnp.zeros(4)}, state=state, **trees).restore(folder)
