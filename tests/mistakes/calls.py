"""Mistakes in calls, their arguments and their order; with arenas, and in the background."""

# ruff: noqa: RUF034  (equal branches stand at different places, which is what is tried)

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from declared import IN_STEPS, called, variants

import mpistrategy as ms
from mistakes.matrix import BY_DESIGN, RIGHT, RIGHT_AT_ONCE, Program, add, mistake

SAME_PLACE = "two equal calls of one place"


@mistake()
def a_call_left_out(p: Program, wrong: bool) -> Any:
    if not wrong:
        p.sum(1.0)
    return p.sum(np.ones(3))


@mistake()
def a_call_too_many(p: Program, wrong: bool) -> Any:
    if wrong:
        p.sum(1.0)
    return p.sum(np.ones(3))


@mistake()
def the_last_call_left_out(p: Program, wrong: bool) -> Any:
    total = p.sum(np.ones(3))
    return total if wrong else (total, p.sum(1.0))[0]


@mistake(BY_DESIGN, f"{SAME_PLACE}, until the calls run out")
def one_left_out_in_a_loop_that_others_go_on_with(p: Program, wrong: bool) -> Any:
    return [p.sum(float(number)) for number in range(4) if not (wrong and number == 2)]


@mistake(BY_DESIGN, SAME_PLACE)
def two_swapped_in_a_loop(p: Program, wrong: bool) -> Any:
    return [p.sum(number + float(p.rank)) for number in ([1, 0] if wrong else [0, 1])]


@mistake()
def one_left_out_in_a_loop_with_names(p: Program, wrong: bool) -> Any:
    return [p.sum(float(number), name=f"number {number}") for number in range(4) if not (wrong and number == 2)]


@mistake()
def two_swapped_in_a_loop_with_names(p: Program, wrong: bool) -> Any:
    return [p.sum(float(number), name=f"number {number}") for number in ([1, 0] if wrong else [0, 1])]


@mistake()
def two_swapped_at_different_lines(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        if wrong:
            second = ctx.all_reduce("SUM", 2.0)
            first = ctx.all_reduce("SUM", 1.0)
        else:
            first = ctx.all_reduce("SUM", 1.0)
            second = ctx.all_reduce("SUM", 2.0)
        return first, second

    return p.step(step)


def allsum(value: Any) -> Any:
    return ms.get_replica_context().all_reduce("SUM", value)


@mistake()
def two_swapped_through_a_helper(p: Program, wrong: bool) -> Any:
    def step(_: Any) -> Any:
        if wrong:
            count = allsum(2.0)
            loss = allsum(1.0)
        else:
            loss = allsum(1.0)
            count = allsum(2.0)
        return loss, count

    return p.step(step)


def allsum_of(value: Any) -> Any:
    return allsum(value)


@mistake()
def two_swapped_through_a_helper_of_a_helper(p: Program, wrong: bool) -> Any:
    return p.step(lambda _: (allsum_of(1.0), allsum_of(2.0)) if wrong else (allsum_of(1.0), allsum_of(2.0)))


@mistake()
def two_swapped_lambdas_on_one_line(p: Program, wrong: bool) -> Any:
    one, other = (lambda ctx: ctx.all_reduce("SUM", 1.0)), (lambda ctx: ctx.all_reduce("SUM", 1.0))
    return [p.step(each) for each in ((other, one) if wrong else (one, other))]


@mistake()
def another_verb(p: Program, wrong: bool) -> Any:
    return p.step(lambda ctx: ctx.all_gather(np.ones(3), 0) if wrong else ctx.all_reduce("SUM", np.ones(3)))


@mistake()
def inside_and_outside_a_step(p: Program, wrong: bool) -> Any:
    return p.strategy.reduce("SUM", 1.0) if wrong else p.sum(1.0)


# ------------------------------------------------------------------------------------------------- arguments


@mistake()
def another_dtype(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(3, np.float32 if wrong else np.float64))


@mistake(RIGHT)
def another_byte_order(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(3).astype(">f8" if wrong else "<f8"))


@mistake()
def an_int_for_a_float(p: Program, wrong: bool) -> Any:
    return p.sum(1 if wrong else 1.0)


@mistake()
def a_transposed_shape(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones((3, 2) if wrong else (2, 3)))


@mistake()
def a_shape_by_one_element(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(500_001 if wrong else 500_000))


@mistake()
def another_number_of_dimensions(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones((3, 1) if wrong else 3))


@mistake()
def another_operation(p: Program, wrong: bool) -> Any:
    return p.step(lambda ctx: ctx.all_reduce("MEAN" if wrong else "SUM", np.ones(3)))


@mistake()
def a_tuple_for_a_list(p: Program, wrong: bool) -> Any:
    return p.sum((np.ones(3),) if wrong else [np.ones(3)])


@mistake()
def other_keys(p: Program, wrong: bool) -> Any:
    return p.sum({"a": 1.0, "c" if wrong else "b": 2.0})


@mistake(RIGHT)
def keys_in_another_order(p: Program, wrong: bool) -> Any:
    return p.sum({"b": 2.0, "a": 1.0} if wrong else {"a": 1.0, "b": 2.0})["b"]


@mistake()
def other_bytes_per_pack(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(3), options=ms.CommunicationOptions(bytes_per_pack=4096 if wrong else 8192))


@mistake()
def another_wire(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(3), options=ms.CommunicationOptions(wire="bfloat16" if wrong else None))


@mistake(RIGHT)
def another_timeout(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(3), options=ms.CommunicationOptions(timeout_seconds=70 if wrong else 80))


@mistake()
def another_name(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(3), name="odd" if wrong else "even")


@mistake()
def a_name_on_one_rank_only(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(3), name="odd" if wrong else None)


@mistake(RIGHT)
def out_on_one_rank_only(p: Program, wrong: bool) -> Any:
    return p.sum(np.ones(100_000), out=np.empty(100_000) if wrong else None).sum()


@mistake()
def a_weight_on_one_rank_only(p: Program, wrong: bool) -> Any:
    return p.step(lambda ctx: ctx.all_reduce("MEAN", np.ones(3), weight=2.0 if wrong else None))


def another_argument(p: Program, wrong: bool, *, method: str, parameter: str) -> Any:
    given, other = variants(method)[parameter]
    return p.step(lambda ctx: called(method, ctx, **(other if wrong else given)))


def another_collective(p: Program, wrong: bool, *, method: str) -> Any:
    return p.step(lambda ctx: called(method, ctx) if wrong else ctx.all_reduce("SUM", np.ones(3)))


for _method in IN_STEPS:  # as they are declared
    if _method != "all_reduce":  # whose mistakes are written down above
        _words = _method.replace("_", " ")
        add(f"{_words} for an all reduce", partial(another_collective, method=_method))
        for _parameter in variants(_method):
            made = partial(another_argument, method=_method, parameter=_parameter)
            add(f"another {_parameter.replace('_', ' ')} of {_words}", made)


@mistake()
def none_on_one_rank_only(p: Program, wrong: bool) -> Any:
    return p.sum([1.0, None if wrong else 2.0])


@mistake()
def another_axis_of_a_reduction(p: Program, wrong: bool) -> Any:
    return p.strategy.reduce("SUM", np.ones((2, 2)), axis=1 if wrong else 0)


@mistake()
def another_destination(p: Program, wrong: bool) -> Any:
    p.strategy.extended.reduce_to("SUM", np.ones(3), "task:1" if wrong else "task:0")


@mistake()
def another_destination_of_a_broadcast(p: Program, wrong: bool) -> Any:
    p.strategy.extended.broadcast_to(np.ones(3), "task:1" if wrong else "task:0")


@mistake()
def a_string_among_the_leaves(p: Program, wrong: bool) -> Any:
    return p.sum([1.0, "two" if wrong else 2.0])


# ------------------------------------------------------------------------------------------------- arenas, async


@mistake()
def an_array_for_an_arena(p: Program, wrong: bool) -> Any:
    arena = p.once("arena", lambda: p.strategy.arena([np.zeros(3)]))
    arena.values[0][...] = 1
    return p.sum(np.ones(3) if wrong else arena)


@mistake()
def an_arena_of_another_layout(p: Program, wrong: bool) -> Any:
    return p.sum(p.strategy.arena([np.zeros(4 if wrong else 3)]))


@mistake()
def another_arena(p: Program, wrong: bool) -> Any:
    arenas = p.once("arenas", lambda: [p.strategy.arena([np.zeros(3)]) for _ in range(2)])
    return p.sum(arenas[1 if wrong else 0])


@mistake(BY_DESIGN, "on one node the sum is made at the start; between nodes the array travels until `wait`")
def a_write_after_the_start(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        value = np.ones(3)
        handle = ctx.all_reduce_async("SUM", value)
        if wrong:
            value[...] = 77
        return handle.wait()

    return p.step(step)


@mistake(RIGHT)
def waits_in_another_order(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        handles = [ctx.all_reduce_async("SUM", 1.0), ctx.all_reduce_async("SUM", np.ones(3))]
        for handle in reversed(handles) if wrong else handles:
            handle.wait()
        return [handle.wait() for handle in handles]

    return p.step(step)


@mistake(RIGHT_AT_ONCE)
def no_wait(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        handle = ctx.all_reduce_async("SUM", 1.0)
        return None if wrong else handle.wait() and None

    return p.step(step)


@mistake()
def one_start_left_out(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        first = ctx.all_reduce_async("SUM", 1.0)
        second = None if wrong else ctx.all_reduce_async("SUM", np.ones(3))
        return first.wait(), second and second.wait()

    return p.step(step)


# ------------------------------------------------------------------------------------------------- errors, others


@mistake()
def an_error_before_the_call_that_is_caught(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        try:
            if wrong:
                raise ValueError("of this rank")
            ctx.all_reduce("SUM", 1.0)
        except ValueError:
            pass
        return ctx.all_reduce("SUM", np.ones(3))

    return p.step(step)


@mistake()
def an_error_in_a_loop_that_is_caught(p: Program, wrong: bool) -> Any:
    def step(ctx: Any) -> Any:
        totals = []
        for number in range(3):
            try:
                if wrong and number == 2:
                    raise ValueError("of this rank")
                totals.append(ctx.all_reduce("SUM", float(number)))
            except ValueError:
                pass
        return totals

    return p.step(step)


@mistake()
def a_merge_fn_that_differs(p: Program, wrong: bool) -> Any:
    def one(strategy: Any, value: Any) -> Any:
        return strategy.reduce("SUM", value)

    def other(strategy: Any, value: Any) -> Any:
        return strategy.reduce("MEAN", value)

    return p.step(lambda ctx: ctx.merge_call(other if wrong else one, args=(1.0,)))


@mistake(BY_DESIGN, "an update is this rank's own; assert_mirrored finds copies that differ")
def an_update_function_that_differs(p: Program, wrong: bool) -> Any:
    variable = p.variable()
    p.strategy.extended.update(variable, lambda v: v.assign(np.full(3, 7.0 if wrong else 1.0)))
    return variable.numpy().tolist()


@mistake()
def a_barrier_of_another_name(p: Program, wrong: bool) -> Any:
    return p.strategy.barrier("odd" if wrong else "even")


@mistake(RIGHT)
def expect_long_on_one_rank(p: Program, wrong: bool) -> Any:
    with p.strategy.expect_long(30) if wrong else nullcontext():
        return p.sum(1.0)


@mistake(BY_DESIGN, "a local function of gradients; the optimizer's global_clipnorm is compared")
def clipping_with_another_norm(p: Program, wrong: bool) -> Any:
    clipped, _ = ms.gradients.clip_by_global_norm([np.ones(3)], 0.1 if wrong else 1.0)
    return p.sum(clipped)
