"""The strategy and the context that this thread is in: the public functions."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mpistrategy.context import Frame, Mode, check_strategy, current_frame, current_strategy, frames, in_words
from mpistrategy.errors import ContextError
from mpistrategy.strategy import replica_context
from mpistrategy.strategy.outside_steps import warn_if_alone

if TYPE_CHECKING:
    from mpistrategy.strategy.strategy import Strategy

    class ReplicaContext(replica_context.ReplicaContext):
        """The same class, which cannot name Strategy where it is written."""

        @property
        def strategy(self) -> Strategy:
            """The strategy whose step function this is."""

else:
    ReplicaContext = replica_context.ReplicaContext


def get_strategy() -> Strategy:
    """Return the strategy whose scope or step function this thread is in; the default strategy elsewhere."""
    strategy: Strategy = current_strategy()
    return strategy


def strategy_for(strategy: Strategy | None, where: str) -> Strategy:
    """Return `strategy`, or with None what `get_strategy` returns; warn where that leaves out the other ranks."""
    if strategy is not None:
        check_strategy(strategy, where)
        return strategy
    found = get_strategy()
    if found._is_default:
        warn_if_alone(found, where)
    return found


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
    found: Any = frame.replica_context if frame else get_strategy().extended._default_replica_context
    return found  # type: ignore[no-any-return]


def in_cross_replica_context() -> bool:
    """Return whether this thread is in cross-replica (or update) context."""
    frame = current_frame()
    return frame is not None and frame.mode is not Mode.REPLICA


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter the scope of `strategy` in this thread until this function is called again with None.

    Args:
        strategy: the strategy; None leaves the scope.

    Raises:
        ContextError: inside a scope or a step function.
        OptionTypeError: when `strategy` is not a strategy.
    """
    if strategy is not None:
        check_strategy(strategy, "experimental_set_strategy")
    frame = current_frame()
    if frame is not None and frames() != [_set_frame.frame]:
        raise ContextError.at(
            "experimental_set_strategy",
            found=f"a call in {in_words(frame)}",
            expected="a call outside every scope",
            fix="Leave the `with strategy.scope():` block first.",
        )
    if frame is not None:
        frame.__exit__(None, None, None)
        _set_frame.frame = None
    if strategy is not None:
        _set_frame.frame = Frame(strategy, Mode.CROSS_REPLICA).__enter__()


class _SetFrame(threading.local):
    def __init__(self) -> None:
        self.frame: Frame | None = None


_set_frame = _SetFrame()
