"""The context of a thread: in a step function (replica context), in cross-replica context, or in an update.

Each thread has its own.  A thread that has entered no context is in the replica context of the default strategy.
"""

from __future__ import annotations

import enum
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar
from weakref import ReferenceType, ref

from mpistrategy.errors import ContextError, OptionTypeError, OutsideStepWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.over_threads import Threads


class Strategy(Protocol):
    """What the floors below use of a strategy."""

    _is_default: bool

    @property
    def extended(self) -> Any:
        """The part for library authors, with the ranks: `communicator`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part."""


R = TypeVar("R")


class Mode(enum.StrEnum):
    """The three contexts."""

    REPLICA = "replica"
    CROSS_REPLICA = "cross-replica"
    UPDATE = "update"


@dataclass(slots=True, eq=False)
class Frame:
    """One entered context.

    Attributes:
        strategy: the strategy that the context belongs to.
        mode: which of the three contexts.
        replica_context: the ReplicaContext; None in the other two contexts.
    """

    strategy: Strategy
    mode: Mode
    replica_context: Any = None

    def __enter__(self) -> Frame:
        _thread.entered.append((self, self.strategy.extended.communicator))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.entered.pop()


class _Thread(threading.local):
    """The contexts that this thread has entered, and the strategies that it has made as a simulated rank.

    Attributes:
        entered: the innermost last: contexts, and the ranks that the thread works for in each.
        set_frame: the context that `experimental_set_strategy` has entered.
        references: to the strategies of several simulated ranks.
    """

    def __init__(self) -> None:
        self.entered: list[tuple[Frame | None, Ranks | None]] = []
        self.set_frame: Frame | None = None
        self.references: list[ReferenceType[Strategy]] = []


_thread = _Thread()
#: The strategies of several ranks that were made, also closed strategies: the other ranks still exist.
_in_process: list[ReferenceType[Strategy]] = []
#: The function that returns the default strategy, which lies above.
default_strategy: list[Callable[[], Strategy]] = []


def call_in(frame: Frame, fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Return ``fn(*args, **kwargs)``, called in a context.

    As ``with frame:``, but nothing runs at its end that the handler of a signal could keep from leaving the context.
    """
    stack = _thread.entered
    depth = len(stack)
    try:
        frame.__enter__()
        return fn(*args, **kwargs)
    finally:
        del stack[depth:]


def current_frame() -> Frame | None:
    """Return the innermost context that this thread has entered, or None."""
    stack = _thread.entered
    return stack[-1][0] if stack else None


def current_communicator() -> Ranks | None:
    """Return the ranks that this thread works for, or None outside every strategy.

    Users make a CrossDeviceOps without a communicator, and may call it directly or from another object: here it finds
    its ranks.
    """
    stack = _thread.entered
    return stack[-1][1] if stack else None


@contextmanager
def working_on(communicator: Ranks) -> Iterator[None]:
    """Let this thread work for other ranks in the same context."""
    _thread.entered.append((current_frame(), communicator))
    try:
        yield
    finally:
        _thread.entered.pop()


def current_strategy() -> Any:
    """Return the strategy whose scope or step function this thread is in; the default strategy elsewhere."""
    frame = current_frame()
    return frame.strategy if frame is not None else default_strategy[0]()


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
    if len(_thread.entered) != (_thread.set_frame is not None):
        raise ContextError.at(
            "experimental_set_strategy",
            found=f"a call in {in_words(current_frame())}",
            expected="a call outside every scope",
            fix="Leave the `with strategy.scope():` block first.",
        )
    _thread.entered.clear()
    _thread.set_frame = None if strategy is None else cross_replica(strategy).__enter__()


def cross_replica(strategy: Strategy) -> Frame:
    """Return the cross-replica context of `strategy`, to be entered with `with`."""
    return Frame(strategy, Mode.CROSS_REPLICA)


def require_cross_replica(strategy: Strategy, where: str) -> None:
    """Raise ContextError in a step function, and in any context of another strategy."""
    frame = current_frame()
    if frame is None or (frame.strategy is strategy and frame.mode is not Mode.REPLICA):
        return
    require_same_strategy(frame, strategy, where)
    raise ContextError.at(
        where,
        found="a call in replica context (inside a step function)",
        expected="a call in cross-replica context",
        fix="Call it outside `strategy.run`, or in a function given to `get_replica_context().merge_call`.",
    )


def require_same_strategy(frame: Frame | None, strategy: Strategy, where: str) -> None:
    """Raise ContextError when `frame` belongs to another strategy."""
    if frame is not None and frame.strategy is not strategy:
        raise ContextError.at(
            where,
            found=f"a call in {in_words(frame)} of another strategy",
            expected="one strategy at a time",
            fix="Leave the other strategy's scope first.",
        )


def check_strategy(strategy: Any, where: str) -> None:
    """Raise OptionTypeError unless `strategy` is a strategy."""
    if not hasattr(type(strategy), "extended"):  # the instance may be half made
        raise OptionTypeError.at(where, found=f"{strategy!r}", expected="a Strategy")


def check_call(where: str, fn: Any, args: Any = (), kwargs: Any = None) -> None:
    """Raise OptionTypeError unless ``fn(*args, **kwargs)`` can be written."""
    if not callable(fn):
        raise OptionTypeError.at(where, found=f"{fn!r}", expected="a function")
    if not isinstance(args, (list, tuple)):
        raise OptionTypeError.at(
            where, found=f"args of type {type(args).__name__}", expected="a tuple", fix="Write args=(x,)."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionTypeError.at(where, found=f"kwargs of type {type(kwargs).__name__}", expected="a dict or None")


def in_words(frame: Frame | None) -> str:
    """Return the name of a context."""
    return "no context" if frame is None else f"{frame.mode.value} context"


class Scope(Frame):
    """The cross-replica context of a strategy, as the program enters it; may be entered several times.

    The default strategy has none: the thread stays outside every context.
    """

    def __enter__(self) -> Any:
        require_cross_replica(self.strategy, "Strategy.scope")
        is_default = self.strategy._is_default
        _thread.entered.append((None, None) if is_default else (self, self.strategy.extended.communicator))
        return self.strategy


# ------------------------------------------------------------------------------------- are there other ranks


def note_strategy(strategy: Strategy, communicator: Ranks) -> None:
    """Remember that a strategy of these ranks was made."""
    if communicator.size > 1:
        references = _thread.references if isinstance(communicator, Threads) else _in_process
        references.append(ref(strategy))


def has_peers() -> bool:
    """Return whether this rank has made a strategy of several ranks."""
    return bool(_in_process or _thread.references)


def open_strategy(where: str, subject: str) -> Strategy | None:
    """Return the strategy of several ranks that an object made outside scope() joins: the only open strategy.

    None if this rank has made no strategy of several ranks.

    Args:
        where: the public name of the object.
        subject: the object, in words.

    Raises:
        ContextError: if no strategy is open any more, or several are.
    """
    if not has_peers():
        return None
    if len(_open_strategies()) > 1:
        gc.collect()  # strategies that the program has dropped
    strategies = _open_strategies()
    if len(strategies) == 1:
        return strategies[0]
    raise ContextError.at(
        where,
        found=f"{subject} made outside scope(), and {len(strategies) or 'no'} open strategies of several ranks",
        expected="to know whose ranks share it",
        fix=_INSIDE,
    )


def _open_strategies() -> list[Strategy]:
    """Return the open strategies that the program holds; of copies, which have the same ranks, the last."""
    alive = [strategy for reference in (*_in_process, *_thread.references) if (strategy := reference()) is not None]
    by_guard = {strategy.extended.communicator.guard: strategy for strategy in alive}
    return [strategy for guard, strategy in by_guard.items() if not guard.closed]


def refuse_outside(where: str, subject: str) -> None:
    """Raise ContextError outside every scope, once this rank has made a strategy of several ranks."""
    if current_frame() is None and has_peers():
        raise ContextError.at(
            where,
            found=f"{subject} made outside scope(): it would be this rank's own, and no call would combine the ranks'",
            expected="one that belongs to a strategy",
            fix=_INSIDE,
        )


_INSIDE = (
    "Make it in `with strategy.scope():`. If this rank alone is meant, make it in the scope of a OneDeviceStrategy."
)


def warn_if_alone(
    strategy: Strategy,
    where: str,
    how: str = "was called on the default strategy",
    cure: str = "Outside its scope, call the method on your own strategy object.",
) -> None:
    """Warn, once for each call site, of a collective of the default strategy, which leaves out the other ranks.

    TensorFlow does the same, which is harmless in its one process.  Here each rank would go on with its own value,
    without an error.  In a step of the default strategy and inside another collective there is no warning.

    Args:
        strategy: whose collective it is.
        where: its public name.
        how: the mistake.
        cure: what to write instead.
    """
    if (
        not strategy._is_default
        or not has_peers()
        or strategy.extended.communicator.guard.current is not None
        or any(frame is not None and frame.mode is Mode.REPLICA for frame, _ in _thread.entered)
    ):
        return
    warn(
        f"{where} {how}: it works on this rank alone, and the value stays this rank's own. {cure} If this rank alone "
        "is meant, use a OneDeviceStrategy.",
        OutsideStepWarning,
    )
