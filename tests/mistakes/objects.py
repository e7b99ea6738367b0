"""Mistakes with variables, optimizers, metrics, strategies and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import mpistrategy as ms
from mistakes.matrix import BY_DESIGN, RIGHT, RIGHT_AT_ONCE, ROLL_CALL, Mistake, Program, add, mistake


def _new(p: Program, value: Any = 0.0, **more: Any) -> Any:
    with p.strategy.scope():
        return ms.Variable(np.zeros(3) + value, **{"aggregation": "SUM", **more}).numpy()


def _variables(p: Program) -> tuple[Any, Any]:
    return p.variable("weights"), p.variable("bias")


def _in_order(objects: Iterable[Any], wrong: bool) -> list[Any]:
    """Return objects in their order; of the rank that is wrong, the other way round."""
    return list(objects)[:: -1 if wrong else 1]


def _apply(p: Program, optimizer: Any, *pairs: Any) -> None:
    p.step(lambda _: optimizer.apply_gradients(pairs))


def _sgd(p: Program, name: str = "sgd", **more: Any) -> Any:
    return p.once(f"optimizer {name}", lambda: ms.optimizers.SGD(0.5, **more))


def _pair(p: Program, number: int = 0) -> tuple[Any, Any]:
    """Return a gradient and a variable."""
    return np.ones(3), _variables(p)[number]


def _made_with(p: Program, **more: Any) -> None:
    with p.strategy.scope():
        optimizer = ms.optimizers.SGD(**{"learning_rate": 0.5, **more})
    _apply(p, optimizer, _pair(p))


def _strategy_with(**options: Any) -> None:
    ms.MirroredStrategy(**options).close()


def _saved(p: Program, name: str = "saved", **objects: Any) -> None:
    ms.Checkpoint(**objects).save(p.folder / name, overwrite=True)


def _by_name(objects: Iterable[Any]) -> dict[str, Any]:
    return dict(zip("vw", objects, strict=True))


#: Mistakes in one expression.
REPORTED: dict[str, Mistake] = {
    "a variable too many": lambda p, wrong: [_new(p, 1.0) for _ in range(1 + wrong)],
    "variables in another order": lambda p, wrong: [
        len(_new(p, np.zeros(shape))) for shape in _in_order(((1, 3), (2, 3)), wrong)
    ],
    "named variables in another order": lambda p, wrong: [
        _new(p, name=name) for name in _in_order(("first", "second"), wrong)
    ],
    "assignments swapped between two variables": lambda p, wrong: p.step(
        lambda _: [variable.assign(np.ones(3)) for variable in _in_order(_variables(p), wrong)] and None
    ),
    "pairs in another order": lambda p, wrong: _apply(p, _sgd(p), *_in_order((_pair(p), _pair(p, 1)), wrong)),
    "one variable missing": lambda p, wrong: _apply(p, _sgd(p), *[_pair(p), _pair(p, 1)][: 1 if wrong else 2]),
    "another variable": lambda p, wrong: _apply(p, _sgd(p), _pair(p, 1 if wrong else 0)),
    "another learning rate": lambda p, wrong: _made_with(p, learning_rate=0.25 if wrong else 0.5),
    "another nonfinite": lambda p, wrong: _made_with(p, nonfinite="skip" if wrong else "raise"),
    "another check every": lambda p, wrong: _made_with(p, mirrored_check_steps=2 if wrong else 3),
    "another aggregation": lambda p, wrong: _made_with(p, aggregation="MEAN" if wrong else "SUM"),
    "another global clipnorm": lambda p, wrong: _made_with(p, global_clipnorm=2.0 if wrong else 1.0),
    "no gradient on one rank": lambda p, wrong: _apply(
        p, _sgd(p), (None if wrong else np.ones(3), _variables(p)[0]), _pair(p, 1)
    ),
    "a strategy with another algorithm": lambda p, wrong: _strategy_with(
        cross_device_ops=ms.ReductionToOneDevice() if wrong else ms.MpiAllReduce()
    ),
    "a strategy with other options": lambda p, wrong: _strategy_with(
        communication_options=ms.CommunicationOptions(bytes_per_pack=4096 if wrong else 8192)
    ),
    "a strategy with another check level": lambda p, wrong: _strategy_with(check="off" if wrong else "always"),
    "a strategy with other devices": lambda p, wrong: _strategy_with(devices="auto" if wrong else "cpu"),
    "saved on one rank only": lambda p, wrong: [_saved(p, v=p.variable()) if wrong else None, p.sum(1.0)][1],
    "saved under another name": lambda p, wrong: _saved(p, **{"w" if wrong else "v": p.variable()}),
    "another object saved": lambda p, wrong: _saved(p, v=_in_order(_variables(p), wrong)[0]),
    "the same objects swapped": lambda p, wrong: _saved(p, **_by_name(_in_order(_variables(p), wrong))),
    "another folder": lambda p, wrong: _saved(p, "odd" if wrong else "even", v=p.variable()),
}
for _name, _made in REPORTED.items():
    add(_name, _made)
add(
    "another seed of random numbers",
    lambda p, wrong: [p.strategy.rng(4 if wrong else 3), p.sum(1.0)][1],
    BY_DESIGN,
    "a seed is this rank's own; a checkpoint of the streams is compared",
)


# ------------------------------------------------------------------------------------------------- variables


@mistake(BY_DESIGN, "a write outside steps is this rank's own; assert_mirrored finds copies that differ")
def a_cross_replica_assign_on_one_rank_only(p: Program, wrong: bool) -> Any:
    variable = p.variable()
    with p.strategy.scope():
        variable.assign(np.full(3, 7.0 if wrong else 1.0))


# ------------------------------------------------------------------------------------------------- optimizers


@mistake()
def another_optimizer(p: Program, wrong: bool) -> Any:
    both = [_sgd(p), p.once("adam", lambda: ms.optimizers.Adam(0.5))]
    for optimizer in both:  # both have their slots and steps
        if optimizer.iterations is None:
            _apply(p, optimizer, _pair(p))
    _apply(p, _in_order(both, wrong)[0], _pair(p))


@mistake()
def a_learning_rate_that_is_set_later(p: Program, wrong: bool) -> Any:
    optimizer = _sgd(p, "to be set")
    optimizer.learning_rate = 0.25 if wrong else 0.5
    _apply(p, optimizer, _pair(p))


@mistake()
def a_sparse_gradient_on_one_rank(p: Program, wrong: bool) -> Any:
    matrix = p.variable("matrix", (4, 3))
    sparse = ms.IndexedSlices(np.ones((1, 3)), np.array([0]), (4, 3))
    _apply(p, _sgd(p), (sparse if wrong else np.ones((4, 3)), matrix))


@mistake()
def two_optimizers_in_another_order(p: Program, wrong: bool) -> Any:
    pairs = list(zip((_sgd(p, "one"), _sgd(p, "other")), _variables(p), strict=True))
    p.step(lambda _: [o.apply_gradients([(np.ones(3), variable)]) for o, variable in _in_order(pairs, wrong)] and None)


def _by_buckets(p: Program, order: tuple[int, ...] = (1, 0), *, tells: bool = True) -> Any:
    optimizer = _sgd(p, "buckets")
    buckets = p.once("buckets", lambda: optimizer.gradient_buckets(_variables(p), bytes_per_bucket=8))

    def step(_: Any) -> None:
        for number in order:
            buckets.values[number][...] = 1
            if tells:
                buckets.ready(number)
        optimizer.apply_gradients(buckets)

    p.step(step)


#: They are reduced in one order, whichever is ready first.
add("buckets in another order", lambda p, wrong: _by_buckets(p, (0, 1) if wrong else (1, 0)), RIGHT)
add("a bucket that is not said to be ready", lambda p, wrong: _by_buckets(p, tells=not wrong), RIGHT_AT_ONCE)
add("gradients in place of buckets", lambda p, wrong: _apply(p, _sgd(p), _pair(p)) if wrong else _by_buckets(p))


# ------------------------------------------------------------------------------------------------- metrics, ON_READ


def _metrics(p: Program) -> tuple[Any, Any]:
    pair = p.once("metrics", lambda: (ms.metrics.Mean("one"), ms.metrics.Mean("other")))
    for metric in pair:
        p.step(lambda _, metric=metric: metric.update_state(1.0))  # type: ignore[misc]
    return pair


@mistake()
def a_metric_read_on_one_rank_only(p: Program, wrong: bool) -> Any:
    mean, _ = _metrics(p)
    if wrong:
        mean.result()
    return p.sum(1.0)


@mistake(RIGHT)
def a_metric_printed_on_one_rank_only(p: Program, wrong: bool) -> Any:
    mean, _ = _metrics(p)
    if wrong:
        repr(mean)
        repr(mean.variables)
    return p.sum(1.0)


add("two metrics read in another order", lambda p, wrong: [each.result() for each in _in_order(_metrics(p), wrong)])


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
    return [strategy.reduce("SUM", 1.0) for strategy in _in_order((p.strategy, other), wrong)]


@mistake(ROLL_CALL)
def a_strategy_too_many(p: Program, wrong: bool) -> Any:
    if wrong:
        ms.MirroredStrategy()
    return p.sum(1.0)


@mistake(BY_DESIGN, "random numbers are this rank's own; a checkpoint, and what is made of them, is compared")
def random_numbers_drawn_on_one_rank_only(p: Program, wrong: bool) -> Any:
    stream = p.once("streams", lambda: p.strategy.rng(3)).shared
    if wrong:
        stream.random()
    return p.sum(1.0)


# ------------------------------------------------------------------------------------------------- checkpoints


@mistake()
def a_restored_object_swapped(p: Program, wrong: bool) -> Any:
    _saved(p, **_by_name(_variables(p)))
    ms.Checkpoint(**_by_name(_in_order(_variables(p), wrong))).restore(p.folder / "saved")


@mistake(RIGHT)
def another_plain_value(p: Program, wrong: bool) -> Any:
    """It is this rank's own, and comes back on as many ranks only."""
    _saved(p, v=p.variable(), epoch=4 if wrong else 3)
    ms.Checkpoint(v=p.variable(), epoch=0).restore(p.folder / "saved")


@mistake()
def another_step_of_a_manager(p: Program, wrong: bool) -> Any:
    manager = p.once("manager", lambda: ms.CheckpointManager(ms.Checkpoint(v=p.variable()), p.folder / "steps"))
    p.made["step"] = p.made.get("step", 0) + 1
    manager.save(p.made["step"] + 100 * wrong)
