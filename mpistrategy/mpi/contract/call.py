"""One public call that all ranks make together."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from sys import _getframe
from threading import get_ident
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

from mpistrategy import errors
from mpistrategy.mpi.contract.call_sites import Signature, site_of
from mpistrategy.mpi.contract.flight_recorder import LENGTH, CurrentCall
from mpistrategy.mpi.contract.guard import Guard, time_limit
from mpistrategy.mpi.contract.observers import observers
from mpistrategy.objects.jax_traces import refuse_in_jax_trace

#: Of code: generators, coroutines, and both.
_GENERATORS = 0x20 | 0x80 | 0x200


class Call(CurrentCall):
    """One public call that all ranks make together, as a context; leaving it with an exception tells the other ranks.

    The outermost call lends its name and its structure to the signatures of those inside it.  Entering it raises
    OptionTypeError, on all ranks, when `called` is neither None nor a string.

    Args:
        guard: of the ranks that make the call.
        where: the public name.
        called: the name= that the program gave; compared instead of the call site, and put before `name`.
        name: the object of the call: a variable's name.
        structure: the structure of the values, in words.
        anywhere: whether ranks may make the call at different call sites.
        own_frames: how many frames around the context are this package's: fewer are looked at.

    Raises:
        ContextError: when the strategy has been closed, and, on all ranks, while JAX traces on one.
        ForkedProcessError: in a forked child of a rank.
        CollectiveMismatchError: when an earlier comparison, made after its data had moved, failed.
    """

    _outer: CurrentCall | None = None
    _is_in_own_work: bool = False
    _on_gpu: AbstractContextManager[Any] | None = None

    def __init__(
        self,
        guard: Guard,
        where: str,
        called: Any = None,
        name: str = "",
        structure: str = "",
        anywhere: bool = False,
        *,
        own_frames: int = 2,
    ) -> None:
        if guard.closed:
            raise guard.refusal(where)
        self.where = where
        self.guard: Guard = guard
        self._called, self._anywhere, self._own_frames = called, anywhere or called, own_frames
        if structure:
            self.structure = structure
        if called and isinstance(called, str):
            self.name: str = f"{called}: {name}" if name else called
        elif name:
            self.name = name

    def __enter__(self) -> Call:
        guard, self.frame = self.guard, _getframe(1)
        outer = guard.current
        try:
            if outer is not None and not self._joins(guard, outer):
                outer = None
            self._outer = outer
            if outer is None:
                guard.thread, guard.agreed, guard.reported = get_ident(), False, None
                if not self._anywhere:
                    self.place: str = (guard.site or site_of(_getframe(self._own_frames))).place
                if guard.size > 1:
                    record, now = guard.record, monotonic()
                    self.number: int = record.number + 1
                    number = record.number = self.number
                    self.entered = now
                    record.entries.append(self)
                    at = number % LENGTH
                    record.before[at], record.times[at], record.after[at] = number, now, number
                for observer in observers:
                    observer.entered(guard, self)
            guard.current = self
            if self._called is not None and not isinstance(self._called, str):
                raise errors.OptionTypeError.at(
                    self.where, found=f"name={self._called!r}", expected="a string, or None"
                )
            refuse_in_jax_trace(self.where)  # also inside a call: in a function that the program gave it
            if outer is None and guard.on_gpu is not None:  # a new thread has GPU 0 as its current one
                self._enter(guard.on_gpu)
            return self
        except BaseException as error:
            if guard.current is self:
                self.__exit__(type(error), error, None)
            raise

    def _joins(self, guard: Guard, outer: CurrentCall) -> bool:
        """Become a part of the outer call, and return True; False for a call that was left."""
        if guard.thread != get_ident():
            raise errors.ContextError.at(
                self.where,
                found=f"a collective while another thread is in {outer.where} of the same strategy",
                expected="one thread at a time",
                fix="Make a MirroredStrategy for each thread, all ranks in the same order.",
            )
        if not _is_under_way(outer.frame):  # a signal has come where it was left, and it may not be done
            guard.current = None
            if guard.size == 1:
                return False
            guard.break_off(outer.where, KeyboardInterrupt("as the call was left"))
            raise guard.refusal(self.where)
        self._is_in_own_work = guard.since == math.inf
        self.join(outer)
        return True

    def _enter(self, on_gpu: Callable[[], AbstractContextManager[Any]]) -> None:
        try:
            context = on_gpu()
            context.__enter__()
        except Exception as error:  # CuPy's
            raise errors.DeviceError.at(
                self.where, found=f"a GPU that does not answer ({error})", expected="the GPU that this rank drives"
            ) from error
        self._on_gpu = context

    def agree(
        self,
        collective: str,
        *,
        op: str = "",
        values: tuple[tuple[str, tuple[int, ...]], ...] = (),
        destination: str = "",
        options: str = "",
        patiently: bool = False,
        sparingly: bool = False,
    ) -> bool:
        """Compare this call with the calls of the other ranks; on return all ranks make the same call.

        Return whether some ranks ask for the values of the others: see `mismatch_report.ASKS`.

        Args:
            collective, op, values, destination, options: what must be equal on all ranks.
            patiently: sleep while ranks are missing: another thread needs this core.
            sparingly: only as often as the check level says; for calls that need no barrier.

        Raises:
            CollectiveMismatchError: on every rank, when the calls differ.
            MpiStrategyError: on every rank, when a rank could not make the call; of the type raised there.
        """
        place, step = self.place, self.step
        signature = Signature(
            collective, op, self.structure, values, destination, options, self.name, self.where, place, step
        )
        return self.guard.compare(signature, patiently=patiently, sparingly=sparingly)

    def expect_more(self) -> None:
        """Say that there will be one more `agree`: a failure before it must be reported to the other ranks."""
        self.guard.agreed = False

    def wait_as(self, timeout_seconds: float | None) -> None:
        """Set how long this call may wait for the other ranks; None leaves it as it is."""
        if timeout_seconds is not None:
            self.timeout: float | None = time_limit(timeout_seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.guard.fail(self.where, error)
                # The program may raise the same object again, in another call.
                self.guard.reported = error if self._outer is not None else None
        finally:
            guard, self.frame = self.guard, None
            guard.current = self._outer
            if self._outer is None:
                self.left: float = monotonic()
                for observer in observers:
                    observer.left(guard, self)
                if self._on_gpu is not None:
                    on_gpu, self._on_gpu = self._on_gpu, None
                    with suppress(Exception):  # the next call finds out that the GPU has failed
                        on_gpu.__exit__(None, None, None)
            elif self._is_in_own_work:
                guard.since = math.inf  # it goes on


def _is_under_way(frame: FrameType | None) -> bool:
    """Return whether this thread runs in a frame; True for a generator, which may be suspended."""
    if frame is None or frame.f_code.co_flags & _GENERATORS:
        return True
    now: FrameType | None = _getframe(1)
    while now is not None and now is not frame:
        now = now.f_back
    return now is frame
