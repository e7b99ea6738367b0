"""The scope of a strategy, as a context manager."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Generic, TypeVar

from mpistrategy import context
from mpistrategy.context import Frame, Mode, Strategy

S = TypeVar("S", bound=Strategy)


class Scope(Generic[S]):
    """Puts the thread into the cross-replica context of a strategy; may be entered several times."""

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> S:
        strategy = self._strategy
        if context.current_frame() is not None:
            context.require_cross_replica(strategy, "Strategy.scope")
        inner: AbstractContextManager[Any] = Frame(strategy, Mode.CROSS_REPLICA)
        if strategy._is_default:
            inner = nullcontext()
        inner.__enter__()
        self._entered.append(inner)
        return strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<scope of {self._strategy!r}>"

    @property
    def is_entered(self) -> bool:
        """Whether it is entered."""
        return bool(self._entered)

    def _copy_for(self, strategy: S) -> Scope[S]:
        """Return a scope of another strategy, not entered."""
        return Scope(strategy)
