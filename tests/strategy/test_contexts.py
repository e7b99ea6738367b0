"""Where each public method may be called: one table; and leaving a context restores the one before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from declared import IN_STEPS, called
from replicas import RANK, SIZE, context, in_scope, new_variable

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def variable(strategy: ms.Strategy) -> ms.Variable:
    return new_variable(strategy, np.zeros(2), aggregation="SUM")


@pytest.fixture(autouse=True)
def nothing_is_left_entered() -> Iterator[None]:
    yield
    assert not ms.has_strategy()
    assert not ms.in_cross_replica_context()
    assert ms.get_replica_context() is not None


# ------------------------------------------------------------------------------------------------- the table
# A column: how a thread comes into the context in which it calls ``call()``.


def in_thread(call: Callable[[], Any]) -> Any:
    """Call in a thread of its own, and hand on what it returned or raised."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


Column = Callable[[ms.Strategy, ms.Strategy, ms.Variable, Callable[[], Any]], Any]
COLUMNS: dict[str, Column] = {
    "default": lambda strategy, other, variable, call: call(),
    "scope": lambda strategy, other, variable, call: in_scope(strategy, call),
    "run": lambda strategy, other, variable, call: strategy.run(call),
    "merge_fn": lambda strategy, other, variable, call: strategy.run(
        lambda: context().merge_call(lambda given: call())
    ),
    "update fn": lambda strategy, other, variable, call: strategy.extended.update(variable, lambda given: call()),
    "other's scope": lambda strategy, other, variable, call: in_scope(other, call),
    "other's run": lambda strategy, other, variable, call: other.run(call),
    "thread": lambda strategy, other, variable, call: in_scope(strategy, lambda: in_thread(call)),
}
#: How an error names the context that is meant.
CROSS, OTHER, STALE = "in cross-replica context", "another strategy", "this thread is not in"
SCOPE = r"inside strategy\.scope\(\)"
OK = ""
# default, scope, run, merge_fn, update fn, other's scope, other's run, thread
EVERYWHERE = (OK, OK, OK, OK, OK, OK, OK, OK)
CROSS_REPLICA = (OK, OK, CROSS, OK, OK, OTHER, OTHER, OK)
STEP = (STALE, STALE, OK, *[STALE] * 5)


def entered(manager: AbstractContextManager[Any]) -> bool:
    with manager:
        return True


# A row: a public method, and what happens in each column; a text means a ContextError that says so.
METHODS: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "scope": (lambda s, v: entered(s.scope()), CROSS_REPLICA),
    "run": (lambda s, v: s.run(int), CROSS_REPLICA),
    "experimental_run": (lambda s, v: s.experimental_run(int), CROSS_REPLICA),
    "experimental_run_v2": (lambda s, v: s.experimental_run_v2(int), CROSS_REPLICA),
    "reduce": (lambda s, v: s.reduce("SUM", 1.0), CROSS_REPLICA),
    "reduce with axis": (lambda s, v: s.reduce("SUM", np.ones(1), axis=0), CROSS_REPLICA),
    "gather": (lambda s, v: s.gather(np.ones(1), 0), CROSS_REPLICA),
    "distribute values": (
        lambda s, v: s.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync),
        EVERYWHERE,
    ),
    "distribute dataset": (lambda s, v: list(s.experimental_distribute_dataset([np.ones(4)])), EVERYWHERE),
    "local results": (lambda s, v: s.experimental_local_results(1), EVERYWHERE),
    "barrier": (lambda s, v: s.barrier() is None, EVERYWHERE),
    "num_replicas_in_sync": (lambda s, v: s.num_replicas_in_sync, EVERYWHERE),
    "reduce_to": (lambda s, v: s.extended.reduce_to("SUM", 1.0, v), CROSS_REPLICA),
    "batch_reduce_to": (lambda s, v: s.extended.batch_reduce_to("SUM", [(1.0, v), (2, "CPU:0")]), CROSS_REPLICA),
    "broadcast_to": (lambda s, v: s.extended.broadcast_to(1.0, v), CROSS_REPLICA),
    "update": (lambda s, v: s.extended.update(v, lambda v: v.assign_add([1.0, 1.0])), (*[OK] * 5, OTHER, OTHER, OK)),
    "update_non_slot": (
        lambda s, v: s.extended.update_non_slot(s.extended.non_slot_devices([v]), lambda: 1),
        CROSS_REPLICA,
    ),
    "call_for_each_replica": (lambda s, v: s.extended.call_for_each_replica(int), CROSS_REPLICA),
    "colocate_vars_with": (
        lambda s, v: entered(s.extended.colocate_vars_with(v)),
        (SCOPE, OK, OK, OK, OK, SCOPE, SCOPE, SCOPE),
    ),
    "worker_devices": (lambda s, v: s.extended.worker_devices, EVERYWHERE),
    "variable_created_in_scope": (lambda s, v: s.extended.variable_created_in_scope(v), EVERYWHERE),
}
STEP_METHODS: dict[str, Callable[[ms.ReplicaContext], Any]] = {
    **{method: partial(called, method) for method in IN_STEPS},
    "merge_call": lambda ctx: ctx.merge_call(lambda given: given.num_replicas_in_sync),
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", METHODS)
def test_methods_of_the_strategy(
    strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, row: str, column: str
) -> None:
    method, row_of_table = METHODS[row]
    refused = row_of_table[list(COLUMNS).index(column)]
    enter = COLUMNS[column]
    if refused:
        with pytest.raises(errors.ContextError, match=refused):
            enter(strategy, other, variable, lambda: method(strategy, variable))
    else:
        assert enter(strategy, other, variable, lambda: method(strategy, variable)) is not None


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", STEP_METHODS)
def test_methods_of_the_replica_context(
    strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, row: str, column: str
) -> None:
    stale = strategy.run(context)
    refused = STEP[list(COLUMNS).index(column)]

    def call() -> Any:
        return STEP_METHODS[row](context() if column == "run" else stale)

    if refused:
        with pytest.raises(errors.ContextError, match=refused) as refusal:
            COLUMNS[column](strategy, other, variable, call)
        assert f"ReplicaContext.{row}" in str(refusal.value)
        assert stale.replica_id_in_sync_group == RANK  # facts stay readable
    else:
        assert COLUMNS[column](strategy, other, variable, call) is not None
        with pytest.raises(errors.ContextError, match="get_replica_context"):  # kept from an earlier step
            strategy.run(lambda: STEP_METHODS[row](stale))


FUNCTIONS = {
    "default": (False, False, True),
    "scope": (True, True, False),
    "run": (True, False, True),
    "merge_fn": (True, True, False),
    "update fn": (True, True, False),
    "thread": (False, False, True),
}


@pytest.mark.parametrize("column", FUNCTIONS)
def test_the_context_functions(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, column: str) -> None:
    def look() -> tuple[bool, bool, bool]:
        assert (ms.get_strategy() is strategy) is ms.has_strategy()
        return ms.has_strategy(), ms.in_cross_replica_context(), ms.get_replica_context() is not None

    assert COLUMNS[column](strategy, other, variable, look) == FUNCTIONS[column]


# ------------------------------------------------------------------------------------------------- leaving


def test_the_step_may_catch_what_its_merge_fn_raises(strategy: ms.Strategy) -> None:
    def merge_fn(given: ms.Strategy) -> None:
        given.reduce("SUM", 1.0)
        raise KeyError("mine")

    def step() -> Any:
        with pytest.raises(KeyError, match="mine"):
            context().merge_call(merge_fn)
        assert ms.get_replica_context() is not None
        return context().all_reduce("SUM", 1.0)

    assert strategy.run(step) == SIZE


def is_interrupted(made: Callable[[], object], moment: int) -> bool:
    """Return whether a KeyboardInterrupt ends `made`: where a function of the package begins, after so many others."""
    begun, before = 0, sys.gettrace()

    def interrupt(frame: FrameType, what: str, _: object) -> None:
        nonlocal begun
        begun += "/mpistrategy/" in frame.f_code.co_filename
        if begun > moment:
            sys.settrace(before)
            raise KeyboardInterrupt

    sys.settrace(interrupt)
    try:
        made()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("call", ["run", "update"])
def test_an_interruption_at_any_moment_leaves_the_context(
    strategy: ms.Strategy, variable: ms.Variable, call: str
) -> None:
    """As the handler of a signal may raise it: no context stays entered."""

    def made() -> None:
        if call == "run":
            strategy.run(lambda: None)
        else:
            strategy.extended.update(variable, lambda v: None)

    moment = 0
    while is_interrupted(made, moment):
        assert not ms.has_strategy()
        assert not ms.in_cross_replica_context()
        moment += 1
    assert moment > 3


# ------------------------------------------------------------------------------------------------- nesting


def test_a_scope_may_be_nested_in_itself_and_entered_again(strategy: ms.Strategy, other: ms.Strategy) -> None:
    scope = strategy.scope()
    with scope as entered, strategy.scope(), scope:
        assert entered is strategy
        for refused in (other.scope(), ms.ReplicaContext(other, RANK)):
            with pytest.raises(errors.ContextError, match="another strategy"), refused:
                pass
        assert ms.get_strategy() is strategy
    with scope:
        assert ms.in_cross_replica_context()


def test_a_merge_fn_may_run_steps_and_enter_the_scope(strategy: ms.Strategy) -> None:
    def merge_fn(given: ms.Strategy, x: int, *, y: int) -> Any:
        with given.scope():
            return given is strategy, x, y, given.run(lambda: context().all_reduce("SUM", 1.0))

    found = strategy.run(lambda: context().merge_call(merge_fn, args=[RANK], kwargs={"y": 2}))
    assert found == (True, RANK, 2, SIZE)


def test_merge_call_unpacks_what_merge_fn_returns(strategy: ms.Strategy) -> None:
    def merge_fn(given: ms.Strategy, mine: Any) -> Any:
        to = given.extended
        return {
            "nest": [to.reduce_to("SUM", mine, mine), (ms.PerReplica((mine,)), "text")],
            "batch": to.batch_reduce_to("SUM", [(mine, mine)]),
            "elsewhere": to.reduce_to("SUM", mine, f"task:{SIZE - 1}"),
        }

    def step() -> Any:
        got = context().merge_call(merge_fn, args=(np.full(2, RANK + 1.0),))
        total, (own, text) = got["nest"]
        assert type(total) is type(own) is type(got["batch"][0]) is np.ndarray
        assert text == "text"
        total *= 0.5  # as any array of the program's own
        assert (context().all_reduce("MEAN", total) == SIZE * (SIZE + 1) / 4).all()
        if RANK == SIZE - 1:
            assert (got["elsewhere"] == got["batch"][0]).all()
        else:
            with pytest.raises(errors.PlacementError, match=f"rank {SIZE - 1}"):
                _ = got["elsewhere"] + 1
        return own

    assert (strategy.run(step) == RANK + 1).all()
    v = new_variable(strategy, np.zeros(2), aggregation="SUM")
    added = strategy.run(lambda: strategy.extended.update(v, lambda v: v.assign_add(np.ones(2)).numpy()))
    assert type(added) is np.ndarray


def test_what_a_replica_context_knows(strategy: ms.Strategy) -> None:
    ctx = strategy.run(context)
    assert ctx.strategy is strategy
    assert (ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync) == (RANK, SIZE)
    with strategy.scope(), ms.ReplicaContext(strategy, RANK) as entered, entered:  # nested in itself
        assert ms.get_replica_context() is entered
        assert entered.all_reduce("SUM", 1.0) == SIZE


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
def test_the_default_strategy_is_one_replica(strategy: ms.Strategy) -> None:
    default = ms.get_strategy()
    assert default is ms.get_strategy()
    assert context().merge_call(lambda given: given is default and not ms.has_strategy())
    with default.scope():
        assert not ms.has_strategy()
        assert default.run(lambda: context().num_replicas_in_sync) == 1
    with strategy.scope(), pytest.raises(errors.ContextError, match="another strategy"), default.scope():
        pass


def test_experimental_set_strategy(strategy: ms.Strategy, other: ms.Strategy) -> None:
    ms.experimental_set_strategy(strategy)
    try:
        assert ms.get_strategy() is strategy
        assert ms.in_cross_replica_context()
        assert in_thread(ms.has_strategy) is False
        with strategy.scope(), pytest.raises(errors.ContextError, match="outside every scope"):
            ms.experimental_set_strategy(None)
        with pytest.raises(errors.ContextError):
            strategy.run(lambda: ms.experimental_set_strategy(other))
        ms.experimental_set_strategy(other)
        assert ms.get_strategy() is other
    finally:
        ms.experimental_set_strategy(None)
    assert not ms.has_strategy()
    ms.experimental_set_strategy(None)  # again is no mistake
