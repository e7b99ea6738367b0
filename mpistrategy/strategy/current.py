"""The strategy and the context that this thread is in: the public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrategy.context import Mode, check_strategy, current_frame, current_strategy, warn_if_alone
from mpistrategy.strategy.replica_context import ReplicaContext

if TYPE_CHECKING:
    from mpistrategy.strategy.strategy import Strategy


def get_strategy() -> Strategy:
    """Return the strategy whose scope or step function this thread is in; the default strategy elsewhere."""
    return current_strategy()  # type: ignore[no-any-return]


def strategy_for(strategy: Strategy | None, where: str) -> Strategy:
    """Return `strategy`, or for None `get_strategy()`; warn where that leaves out the other ranks."""
    resolved = get_strategy() if strategy is None else strategy
    check_strategy(resolved, where)
    if strategy is None:
        warn_if_alone(resolved, where)
    return resolved


def has_strategy() -> bool:
    """Return whether this thread is in the scope, a step function or an update of another than the default strategy."""
    frame = current_frame()
    return frame is not None and not frame.strategy._is_default


def get_replica_context() -> ReplicaContext:
    """Return the ReplicaContext of this thread; None in cross-replica and update context.

    (Its type leaves None out, so that step functions need not check for it.)

    Outside every strategy it is the context of the default strategy, which has one replica.  Its reductions and gathers
    stay on this rank, with an OutsideStepWarning once a strategy of several ranks was made.
    """
    frame = current_frame()
    return frame.replica_context if frame else get_strategy().extended._default_replica_context


def in_cross_replica_context() -> bool:
    """Return whether this thread is in cross-replica (or update) context."""
    frame = current_frame()
    return frame is not None and frame.mode is not Mode.REPLICA
