"""Mistakes with variables, optimizers, metrics, strategies and checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms
from mistakes.matrix import BY_DESIGN, RIGHT, RIGHT_AT_ONCE, ROLL_CALL, Program, mistake

# ------------------------------------------------------------------------------------------------- variables


def _new(p: Program, **more: Any) -> Any:
    with p.strategy.scope():
        return ms.Variable(more.pop("value", np.zeros(3)), **{"aggregation": "SUM", **more})


@mistake()
def a_variable_too_many(p: Program, wrong: bool) -> Any:
    if wrong:
        _new(p)
    return _new(p, value=np.ones(3)).numpy()


@mistake()
def variables_in_another_order(p: Program, wrong: bool) -> Any:
    shapes = ((2,), (3,))
    return [_new(p, value=np.zeros(shape)).shape for shape in (reversed(shapes) if wrong else shapes)]


@mistake()
def named_variables_in_another_order(p: Program, wrong: bool) -> Any:
    names = ("first", "second")
    return len([_new(p, name=name) for name in (reversed(names) if wrong else names)])


@mistake()
def another_policy(p: Program, wrong: bool) -> Any:
    return _new(p, aggregation="MEAN" if wrong else "SUM").numpy()


@mistake()
def another_synchronization(p: Program, wrong: bool) -> Any:
    return _new(p, synchronization="ON_READ" if wrong else "ON_WRITE").numpy()


@mistake()
def a_variable_of_another_dtype(p: Program, wrong: bool) -> Any:
    return _new(p, value=np.zeros(3, np.float32 if wrong else np.float64)).numpy()


@mistake()
def a_variable_of_another_shape(p: Program, wrong: bool) -> Any:
    return _new(p, value=np.zeros(4 if wrong else 3)).numpy()


@mistake()
def assignments_swapped_between_two_variables(p: Program, wrong: bool) -> Any:
    pair = p.variable("one"), p.variable("other")

    def step(_: Any) -> Any:
        for number, variable in enumerate(reversed(pair) if wrong else pair):
            variable.assign(np.full(3, number + 1.0))

    p.step(step)
    return [variable.numpy() for variable in pair]


@mistake(BY_DESIGN, "a write outside steps is this rank's own; assert_mirrored finds copies that differ")
def a_cross_replica_assign_on_one_rank_only(p: Program, wrong: bool) -> Any:
    variable = p.variable()
    with p.strategy.scope():
        variable.assign(np.full(3, 7.0 if wrong else 1.0))
    return None


@mistake(RIGHT)
def a_scatter_with_other_rows(p: Program, wrong: bool) -> Any:
    matrix = p.variable("matrix", (4, 3))
    with p.strategy.scope():
        matrix.assign(np.zeros((4, 3)))
    rows = np.array([0, 2] if wrong or p.rank == 0 else [1, 3])
    p.step(lambda _: matrix.scatter_add(ms.IndexedSlices(np.ones((2, 3)), rows, (4, 3))))
    return matrix.numpy().sum()


# ------------------------------------------------------------------------------------------------- optimizers


def _apply(p: Program, optimizer: Any, pairs: Any) -> None:
    p.step(lambda _: optimizer.apply_gradients(pairs))


def _variables(p: Program) -> tuple[Any, Any]:
    return p.variable("weights"), p.variable("bias")


def _sgd(p: Program, name: str = "sgd", **more: Any) -> Any:
    return p.once(f"optimizer {name}", lambda: ms.optimizers.SGD(0.5, **more))


@mistake()
def pairs_in_another_order(p: Program, wrong: bool) -> Any:
    pairs = [(np.ones(3), variable) for variable in _variables(p)]
    _apply(p, _sgd(p), pairs[::-1] if wrong else pairs)


@mistake()
def one_variable_missing(p: Program, wrong: bool) -> Any:
    pairs = [(np.ones(3), variable) for variable in _variables(p)]
    _apply(p, _sgd(p), pairs[:1] if wrong else pairs)


@mistake()
def another_variable(p: Program, wrong: bool) -> Any:
    one, other = _variables(p)
    _apply(p, _sgd(p), [(np.ones(3), other if wrong else one)])


@mistake()
def another_optimizer(p: Program, wrong: bool) -> Any:
    adam = p.once("adam", lambda: ms.optimizers.Adam(0.5))
    sgd = _sgd(p)
    for optimizer in (adam, sgd):  # both have their slots and steps
        if optimizer.iterations is None:
            _apply(p, optimizer, [(np.ones(3), _variables(p)[0])])
    _apply(p, adam if wrong else sgd, [(np.ones(3), _variables(p)[0])])


def _made_with(p: Program, **more: Any) -> None:
    with p.strategy.scope():
        optimizer = ms.optimizers.SGD(**{"learning_rate": 0.5, **more})
    _apply(p, optimizer, [(np.ones(3), _variables(p)[0])])


@mistake()
def another_learning_rate(p: Program, wrong: bool) -> Any:
    _made_with(p, learning_rate=0.25 if wrong else 0.5)


@mistake()
def a_learning_rate_that_is_set_later(p: Program, wrong: bool) -> Any:
    optimizer = _sgd(p, "to be set")
    optimizer.learning_rate = 0.25 if wrong else 0.5
    _apply(p, optimizer, [(np.ones(3), _variables(p)[0])])


@mistake()
def another_schedule(p: Program, wrong: bool) -> Any:
    optimizer = _sgd(p, "scheduled")
    for number in range(3):
        optimizer.learning_rate = 0.5 / (1 + number * (2 if wrong else 1))
        _apply(p, optimizer, [(np.ones(3), _variables(p)[0])])


@mistake()
def another_nonfinite(p: Program, wrong: bool) -> Any:
    _made_with(p, nonfinite="skip" if wrong else "raise")


@mistake()
def another_check_every(p: Program, wrong: bool) -> Any:
    _made_with(p, mirrored_check_steps=2 if wrong else 3)


@mistake()
def another_aggregation(p: Program, wrong: bool) -> Any:
    _made_with(p, aggregation="MEAN" if wrong else "SUM")


@mistake()
def another_global_clipnorm(p: Program, wrong: bool) -> Any:
    _made_with(p, global_clipnorm=2.0 if wrong else 1.0)


@mistake()
def no_gradient_on_one_rank(p: Program, wrong: bool) -> Any:
    one, other = _variables(p)
    _apply(p, _sgd(p), [(None if wrong else np.ones(3), one), (np.ones(3), other)])


@mistake()
def a_sparse_gradient_on_one_rank(p: Program, wrong: bool) -> Any:
    matrix = p.variable("matrix", (4, 3))
    sparse = ms.IndexedSlices(np.ones((1, 3)), np.array([0]), (4, 3))
    _apply(p, _sgd(p), [(sparse if wrong else np.ones((4, 3)), matrix)])


@mistake()
def two_optimizers_in_another_order(p: Program, wrong: bool) -> Any:
    pairs = list(zip((_sgd(p, "one"), _sgd(p, "other")), _variables(p), strict=True))

    def step(_: Any) -> None:
        for optimizer, variable in pairs[:: -1 if wrong else 1]:
            optimizer.apply_gradients([(np.ones(3), variable)])

    p.step(step)


@mistake()
def one_step_more(p: Program, wrong: bool) -> Any:
    for _ in range(3 if wrong else 2):
        _apply(p, _sgd(p), [(np.ones(3), _variables(p)[0])])


def _buckets(p: Program) -> Any:
    optimizer = _sgd(p, "buckets")
    return optimizer, p.once("buckets", lambda: optimizer.gradient_buckets(_variables(p), bytes_per_bucket=8))


@mistake(RIGHT)
def buckets_in_another_order(p: Program, wrong: bool) -> Any:
    """They are reduced in one order, whichever is ready first."""

    optimizer, buckets = _buckets(p)

    def step(_: Any) -> None:
        for number in (0, 1) if wrong else (1, 0):
            buckets.values[number][...] = 1
            buckets.ready(number)
        optimizer.apply_gradients(buckets)

    p.step(step)


@mistake(RIGHT_AT_ONCE)
def a_bucket_that_is_not_said_to_be_ready(p: Program, wrong: bool) -> Any:
    optimizer, buckets = _buckets(p)

    def step(_: Any) -> None:
        for number in (1, 0):
            buckets.values[number][...] = 1
            if not wrong:
                buckets.ready(number)
        optimizer.apply_gradients(buckets)

    p.step(step)


@mistake()
def gradients_in_place_of_buckets(p: Program, wrong: bool) -> Any:
    optimizer, buckets = _buckets(p)
    if wrong:
        _apply(p, optimizer, [(np.ones(3), _variables(p)[0])])
        return

    def step(_: Any) -> None:
        for number in (1, 0):
            buckets.values[number][...] = 1
            buckets.ready(number)
        optimizer.apply_gradients(buckets)

    p.step(step)


@mistake()
def an_accumulator_with_other_steps(p: Program, wrong: bool) -> Any:
    accumulator = ms.gradients.GradientAccumulator(3 if wrong else 2)
    for _ in range(4):
        gradients = accumulator.add([np.ones(3)])
        if gradients is not None:
            _apply(p, _sgd(p), [(gradients[0], _variables(p)[0])])


# ------------------------------------------------------------------------------------------------- metrics, ON_READ


@mistake()
def a_metric_read_on_one_rank_only(p: Program, wrong: bool) -> Any:
    mean = p.once("mean", ms.metrics.Mean)
    p.step(lambda _: mean.update_state(1.0))
    if wrong:
        mean.result()
    return p.sum(1.0)


@mistake()
def two_metrics_read_in_another_order(p: Program, wrong: bool) -> Any:
    pair = p.once("metrics", lambda: (ms.metrics.Mean("one"), ms.metrics.Mean("other")))
    for metric in pair:
        p.step(lambda _, metric=metric: metric.update_state(1.0))  # type: ignore[misc]
    return [metric.result() for metric in (reversed(pair) if wrong else pair)]


@mistake(RIGHT)
def a_metric_printed_on_one_rank_only(p: Program, wrong: bool) -> Any:
    mean = p.once("mean", ms.metrics.Mean)
    p.step(lambda _: mean.update_state(1.0))
    if wrong:
        repr(mean)
        repr(mean.variables)
    return p.sum(1.0)


@mistake()
def an_on_read_variable_read_on_one_rank_only(p: Program, wrong: bool) -> Any:
    total = p.once(
        "total", lambda: ms.Variable(0.0, synchronization="ON_READ", aggregation="SUM", trainable=False, name="total")
    )
    with p.strategy.scope():
        if wrong:
            float(total)
    return p.sum(1.0)


# ------------------------------------------------------------------------------------------------- strategies


@mistake(ROLL_CALL)
def a_strategy_closed_on_one_rank_first(p: Program, wrong: bool) -> Any:
    other = ms.MirroredStrategy()
    if wrong:
        other.close()
    total = p.sum(1.0)
    other.close()
    return total


@mistake(ROLL_CALL)
def two_strategies_in_another_order(p: Program, wrong: bool) -> Any:
    other = p.made["other"] = p.made.get("other") or ms.MirroredStrategy()
    pair = (p.strategy, other)
    return [strategy.reduce("SUM", 1.0) for strategy in (reversed(pair) if wrong else pair)]


@mistake(ROLL_CALL)
def a_strategy_too_many(p: Program, wrong: bool) -> Any:
    if wrong:
        ms.MirroredStrategy()
    return p.sum(1.0)


@mistake()
def a_strategy_with_another_algorithm(p: Program, wrong: bool) -> Any:
    algorithm: Any = ms.ReductionToOneDevice() if wrong else ms.MpiAllReduce()
    ms.MirroredStrategy(cross_device_ops=algorithm).close()


@mistake()
def a_strategy_with_other_options(p: Program, wrong: bool) -> Any:
    options = ms.CommunicationOptions(bytes_per_pack=4096 if wrong else 8192)
    ms.MirroredStrategy(communication_options=options).close()


@mistake()
def a_strategy_with_another_check_level(p: Program, wrong: bool) -> Any:
    ms.MirroredStrategy(check="off" if wrong else "always").close()


@mistake()
def a_strategy_with_other_devices(p: Program, wrong: bool) -> Any:
    ms.MirroredStrategy(devices="auto" if wrong else "cpu").close()


@mistake(BY_DESIGN, "random numbers are this rank's own; a checkpoint, and what is made of them, is compared")
def random_numbers_drawn_on_one_rank_only(p: Program, wrong: bool) -> Any:
    stream = p.once("streams", lambda: p.strategy.rng(3)).shared
    if wrong:
        stream.random()
    return p.sum(1.0)


@mistake(BY_DESIGN, "a seed is this rank's own; a checkpoint of the streams is compared")
def another_seed_of_random_numbers(p: Program, wrong: bool) -> Any:
    p.strategy.rng(4 if wrong else 3)
    return p.sum(1.0)


# ------------------------------------------------------------------------------------------------- checkpoints


def _saved(p: Program, name: str = "saved", **objects: Any) -> None:
    ms.Checkpoint(**objects).save(p.folder / name, overwrite=True)


@mistake()
def saved_on_one_rank_only(p: Program, wrong: bool) -> Any:
    variable = p.variable()
    if wrong:
        _saved(p, v=variable)
    return p.sum(1.0)


@mistake()
def saved_under_another_name(p: Program, wrong: bool) -> Any:
    variable = p.variable()
    ms.Checkpoint(**{"w" if wrong else "v": variable}).save(p.folder / "saved", overwrite=True)


@mistake()
def another_object_saved(p: Program, wrong: bool) -> Any:
    one, other = _variables(p)
    _saved(p, v=other if wrong else one)


@mistake()
def the_same_objects_swapped(p: Program, wrong: bool) -> Any:
    one, other = _variables(p)
    if wrong:
        _saved(p, v=other, w=one)
    else:
        _saved(p, v=one, w=other)


@mistake()
def a_restored_object_swapped(p: Program, wrong: bool) -> Any:
    one, other = _variables(p)
    _saved(p, v=one, w=other)
    checkpoint = ms.Checkpoint(v=other, w=one) if wrong else ms.Checkpoint(v=one, w=other)
    checkpoint.restore(p.folder / "saved")


@mistake(RIGHT)
def another_plain_value(p: Program, wrong: bool) -> Any:
    """It is this rank's own, and comes back on as many ranks only."""
    _saved(p, v=p.variable(), epoch=4 if wrong else 3)
    ms.Checkpoint(v=p.variable(), epoch=0).restore(p.folder / "saved")


@mistake()
def another_folder(p: Program, wrong: bool) -> Any:
    _saved(p, "odd" if wrong else "even", v=p.variable())


@mistake()
def another_step_of_a_manager(p: Program, wrong: bool) -> Any:
    manager = p.once("manager", lambda: ms.CheckpointManager(ms.Checkpoint(v=p.variable()), p.folder / "steps"))
    p.made["step"] = p.made.get("step", 0) + 1
    manager.save(p.made["step"] + 100 * wrong)


# ------------------------------------------------------------------------------------------------- checks


@mistake()
def assert_mirrored_of_a_subset(p: Program, wrong: bool) -> Any:
    p.strategy.assert_mirrored(list(_variables(p))[: 1 if wrong else 2])


@mistake()
def assert_mirrored_of_swapped_variables(p: Program, wrong: bool) -> Any:
    p.strategy.assert_mirrored(list(_variables(p))[:: -1 if wrong else 1])
