"""Where each public method may be called: one table; and leaving a context restores the one before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from declared import IN_STEPS, called
from replicas import RANK, SIZE, context, still_works

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def other() -> Iterator[ms.MirroredStrategy]:
    made = ms.MirroredStrategy()
    yield made
    made.close()


@pytest.fixture(scope="module")
def variable(strategy: ms.Strategy) -> ms.Variable:
    with strategy.scope():
        return ms.Variable(np.zeros(2), aggregation="SUM")


@pytest.fixture(autouse=True)
def nothing_is_left_entered() -> Iterator[None]:
    yield
    assert not ms.has_strategy()
    assert not ms.in_cross_replica_context()
    assert ms.get_replica_context() is not None


# ------------------------------------------------------------------------------------------------- the table
# A column: how a thread comes into the context in which it calls ``call()``.


def in_default(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    return call()


def in_scope(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    with strategy.scope():
        return call()


def in_run(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    return strategy.run(call)


def in_merge_fn(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    return strategy.run(lambda: context().merge_call(lambda given: call()))


def in_update_fn(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    return strategy.extended.update(variable, lambda given: call())


def in_other_scope(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    with other.scope():
        return call()


def in_other_run(strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    return other.run(call)


def in_thread_of_scope(
    strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, call: Callable[[], Any]
) -> Any:
    with strategy.scope():
        return in_thread(call)


def in_thread(call: Callable[[], Any]) -> Any:
    """Call in a thread of its own, and hand on what it returned or raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


COLUMNS = {
    "default": in_default,
    "scope": in_scope,
    "run": in_run,
    "merge_fn": in_merge_fn,
    "update fn": in_update_fn,
    "other's scope": in_other_scope,
    "other's run": in_other_run,
    "thread": in_thread_of_scope,
}
#: How an error names the context that is meant.
CROSS, REPLICA, OTHER, STALE = (
    "in cross-replica context",
    "in replica context",
    "another strategy",
    "this thread is not in",
)
SCOPE = r"inside strategy\.scope\(\)"
OK = ""
# default, scope, run, merge_fn, update fn, other's scope, other's run, thread
EVERYWHERE = (OK, OK, OK, OK, OK, OK, OK, OK)
CROSS_REPLICA = (OK, OK, CROSS, OK, OK, OTHER, OTHER, OK)
STEP = (STALE, REPLICA, OK, REPLICA, REPLICA, REPLICA, STALE, STALE)


def entered(manager: AbstractContextManager[Any]) -> bool:
    with manager:
        return True


# A row: a public method, and what happens in each column; a text means a ContextError that says so.
METHODS: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "scope": (lambda s, v: entered(s.scope()), CROSS_REPLICA),
    "run": (lambda s, v: s.run(int), CROSS_REPLICA),
    "reduce": (lambda s, v: s.reduce("SUM", 1.0), CROSS_REPLICA),
    "reduce with axis": (lambda s, v: s.reduce("SUM", np.ones(1), axis=0), CROSS_REPLICA),
    "gather": (lambda s, v: s.gather(np.ones(1), 0), CROSS_REPLICA),
    "distribute values": (
        lambda s, v: s.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync),
        EVERYWHERE,
    ),
    "distribute dataset": (lambda s, v: list(s.experimental_distribute_dataset([np.ones(4)])), EVERYWHERE),
    "local results": (lambda s, v: s.experimental_local_results(1), EVERYWHERE),
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
    assert still_works(strategy)


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
    else:
        assert COLUMNS[column](strategy, other, variable, call) is not None
    assert still_works(strategy)


@pytest.mark.parametrize("row", STEP_METHODS)
def test_a_context_kept_from_an_earlier_step_is_refused_in_a_later_one(strategy: ms.Strategy, row: str) -> None:
    stale = strategy.run(context)
    with pytest.raises(errors.ContextError, match="get_replica_context"):
        strategy.run(lambda: STEP_METHODS[row](stale))
    assert stale.replica_id_in_sync_group == RANK  # facts stay readable


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


@pytest.mark.parametrize("column", ["scope", "run", "merge_fn", "update fn"])
def test_an_exception_restores_the_context(
    strategy: ms.Strategy, other: ms.Strategy, variable: ms.Variable, column: str
) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with strategy.scope(), pytest.raises(KeyError, match="mine"):
        COLUMNS[column](strategy, other, variable, fail)
    assert not ms.has_strategy()
    assert still_works(strategy)


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
