"""Mistakes in calls, their arguments and their order; with arenas, and in the background."""

# ruff: noqa: RUF034  (equal branches stand at different places, which is what is tried)

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from declared import IN_STEPS, called, variants

import mpistrategy as ms
from mistakes.matrix import BY_DESIGN, RIGHT, RIGHT_AT_ONCE, Mistake, Program, add, mistake

SAME_PLACE = "two equal calls of one place"


def allsum(value: Any) -> Any:
    return ms.get_replica_context().all_reduce("SUM", value)


def allsum_of(value: Any) -> Any:
    return allsum(value)


#: What one rank gives, calls or leaves out, each in one expression.
AT_ONE_PLACE: dict[str, Mistake] = {
    "a call left out": lambda p, wrong: [None if wrong else p.sum(1.0), p.sum(np.ones(3))][1],
    "a call too many": lambda p, wrong: [p.sum(1.0) if wrong else None, p.sum(np.ones(3))][1],
    "the last call left out": lambda p, wrong: [p.sum(np.ones(3)), None if wrong else p.sum(1.0)][0],
    "one left out in a loop with names": lambda p, wrong: [
        p.sum(float(number), name=f"number {number}") for number in range(4) if not (wrong and number == 2)
    ],
    "two swapped in a loop with names": lambda p, wrong: [
        p.sum(float(number), name=f"number {number}") for number in ([1, 0] if wrong else [0, 1])
    ],
    "two swapped through a helper of a helper": lambda p, wrong: p.step(
        lambda _: (allsum_of(1.0), allsum_of(2.0)) if wrong else (allsum_of(1.0), allsum_of(2.0))
    ),
    "a shape by one element": lambda p, wrong: p.sum(np.ones(500_001 if wrong else 500_000)),
    "another wire": lambda p, wrong: p.sum(
        np.ones(3), options=ms.CommunicationOptions(wire="bfloat16" if wrong else None)
    ),
    "a name on one rank only": lambda p, wrong: p.sum(np.ones(3), name="odd" if wrong else None),
    "a weight on one rank only": lambda p, wrong: p.step(
        lambda ctx: ctx.all_reduce("MEAN", np.ones(3), weight=2.0 if wrong else None)
    ),
    "none on one rank only": lambda p, wrong: p.sum([1.0, None if wrong else 2.0]),
    "a string among the leaves": lambda p, wrong: p.sum([1.0, "two" if wrong else 2.0]),
    "another destination of a broadcast": lambda p, wrong: p.strategy.extended.broadcast_to(
        np.ones(3), "task:1" if wrong else "task:0"
    ),
    "an array for an arena": lambda p, wrong: p.sum(np.ones(3) if wrong else arenas(p)[0]),
    "an arena of another layout": lambda p, wrong: p.sum(p.strategy.arena([np.zeros(4 if wrong else 3)])),
    "another arena": lambda p, wrong: p.sum(arenas(p)[1 if wrong else 0]),
}
ALL_THE_SAME: dict[str, Mistake] = {
    "another byte order": lambda p, wrong: p.sum(np.ones(3).astype(">f8" if wrong else "<f8")),
    "keys in another order": lambda p, wrong: p.sum({"b": 2.0, "a": 1.0} if wrong else {"a": 1.0, "b": 2.0})["b"],
    "another timeout": lambda p, wrong: p.sum(
        np.ones(3), options=ms.CommunicationOptions(timeout_seconds=70 if wrong else 80)
    ),
    "out on one rank only": lambda p, wrong: p.sum(np.ones(100_000), out=np.empty(100_000) if wrong else None).sum(),
}
for _name, _made in AT_ONE_PLACE.items():
    add(_name, _made)
for _name, _made in ALL_THE_SAME.items():
    add(_name, _made, RIGHT)
add(
    "one left out in a loop that others go on with",
    lambda p, wrong: [p.sum(float(number)) for number in range(4) if not (wrong and number == 2)],
    BY_DESIGN,
    f"{SAME_PLACE}, until the calls run out",
)
add(
    "two swapped in a loop",
    lambda p, wrong: [p.sum(number + float(p.rank)) for number in ([1, 0] if wrong else [0, 1])],
    BY_DESIGN,
    SAME_PLACE,
)


# ------------------------------------------------------------------------------------------------- as declared


def another_argument(p: Program, wrong: bool, *, method: str, parameter: str) -> Any:
    given, other = variants(method)[parameter]
    return p.step(lambda ctx: called(method, ctx, **(other if wrong else given)))


def another_collective(p: Program, wrong: bool, *, method: str) -> Any:
    return p.step(lambda ctx: called(method, ctx) if wrong else ctx.all_reduce("SUM", np.ones(3)))


for _method in IN_STEPS:
    if _method != "all_reduce":  # whose mistakes are written down above
        _words = _method.replace("_", " ")
        add(f"{_words} for an all reduce", partial(another_collective, method=_method))
        for _parameter in variants(_method):
            made = partial(another_argument, method=_method, parameter=_parameter)
            add(f"another {_parameter.replace('_', ' ')} of {_words}", made)


# ------------------------------------------------------------------------------------------------- arenas, async


def arenas(p: Program) -> Any:
    return p.once("arenas", lambda: [p.strategy.arena([np.zeros(3)]) for _ in range(2)])


@mistake(BY_DESIGN, "on one node the sum is made at the start; between nodes the array travels until `wait`")
def a_write_after_the_start(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        value = np.ones(3)
        handle = ctx.all_reduce_async("SUM", value)
        if wrong:
            value[...] = 77
        return handle.wait()

    return p.step(step)


@mistake(RIGHT_AT_ONCE)
def no_wait(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        handle = ctx.all_reduce_async("SUM", 1.0)
        return None if wrong else handle.wait() and None

    return p.step(step)


# ------------------------------------------------------------------------------------------------- errors, others


@mistake(BY_DESIGN, "an update is this rank's own; assert_mirrored finds copies that differ")
def an_update_function_that_differs(p: Program, wrong: bool) -> Any:
    variable = p.variable()
    p.strategy.extended.update(variable, lambda v: v.assign(np.full(3, 7.0 if wrong else 1.0)))
    return variable.numpy().tolist()


@mistake(BY_DESIGN, "a local function of gradients; the optimizer's global_clipnorm is compared")
def clipping_with_another_norm(p: Program, wrong: bool) -> Any:
    clipped, _ = ms.gradients.clip_by_global_norm([np.ones(3)], 0.1 if wrong else 1.0)
    return p.sum(clipped)
