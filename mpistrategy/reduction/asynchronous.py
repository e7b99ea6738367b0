"""All-reduces that go on while the step computes: `ReplicaContext.all_reduce_async` and its handle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.values import Mirrored, contribution
from mpistrategy.context import current_frame, working_on
from mpistrategy.errors import UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Site, call_site
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.over_mpi.background import Background, background_of
from mpistrategy.objects.copies import NotPickled
from mpistrategy.objects.jax_traces import in_jax_trace, refuse_in_jax_trace
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.arena import Arena
from mpistrategy.reduction.inputs import leaves_like
from mpistrategy.reduction.reducer import AllReduce, Reducer

if TYPE_CHECKING:
    from mpistrategy.reduction.asynchronous_gpu import Begun

_WHERE = "ReplicaContext.all_reduce_async"
_CALL = "ReplicaContext.all_reduce"

T_co = TypeVar("T_co", covariant=True)


class AllReduceHandle(NotPickled, Generic[T_co]):
    """An all-reduce that was started by `ReplicaContext.all_reduce_async`; generic in the type of its result."""

    _instead_of_pickling = "Send what wait() returns."

    def __init__(self, result: Any, under_way: _UnderWay | None = None, begun: Begun | None = None) -> None:
        """Keep the result, or the job that will have it, and what was begun on a GPU."""
        self._result, self._under_way, self._begun = result, under_way, begun

    def done(self) -> bool:
        """Return whether `wait` would find a result or an error at once on this rank; never waits.

        The answer differs from rank to rank: do not let it decide about a collective call.
        """
        is_over = self._under_way is None or self._under_way.job.done()
        return is_over and (self._begun is None or self._begun.is_over)

    @collective("wait")
    def wait(self) -> T_co:
        """Return what `all_reduce` would have returned.  Collective: every rank waits, having started equally many.

        A second call returns the same again, and is no collective.  On several nodes, sums may have been added in
        another order than by `all_reduce`: still the same bits on all ranks, and in equal runs.

        Raises:
            CollectiveMismatchError: on every rank, when the ranks have started different all-reduces, or one of them
                does something else than wait.
            MpiStrategyError: on every rank, for bad input on any rank; of the kind raised there.
        """
        if self._under_way is None:
            refuse_in_jax_trace("AllReduceHandle.wait")
        else:
            self._result = self._under_way.result()
        result: T_co = self._result if self._begun is None else self._begun.results
        return result

    def __repr__(self) -> str:
        return f"<AllReduceHandle, {'over' if self.done() else 'under way'}>"


class _UnderWay:
    """A job in the background, as a handle sees it.

    Args:
        work: the function to be called there.
        background: calls it.
        guard: of the program's ranks.

    Attributes:
        job: its result to be.
    """

    def __init__(self, work: Callable[[], Any], background: Background, guard: Guard) -> None:
        self.job: Future[Any] = background.submit(work, _WHERE)
        self._background, self._guard, self._number = background, guard, background.submitted

    def result(self) -> Any:
        """Wait for the job, together with the other ranks; return its result or raise its error."""
        background, guard = self._background, self._guard
        # A peer in another collective may never start its part; this comparison finds that out.  Once all ranks have
        # started equally many, each of these ends.
        if (self._number > background.known_to_all or in_jax_trace()) and not guard.closed:
            started = background.submitted
            with Call(guard, "AllReduceHandle.wait", name=f"{started} all_reduce_async started", anywhere=True) as call:
                call.agree("wait", patiently=True)
            background.known_to_all = started
        return background.result(self.job)


def start_all_reduce(
    reducer: Reducer, reduce_op: Any, value: Any, options: CommunicationOptions | None, name: str | None, out: Any
) -> AllReduceHandle[Any]:
    """Start an all-reduce; see `ReplicaContext.all_reduce_async`."""
    communicator = reducer.communicator
    background: Background | None = None
    is_placed = type(value) is not np.ndarray and _is_on_device(value)
    if (is_placed or communicator.nodes > 1) and in_jax_trace():
        _first_call(communicator.guard, name, lambda: None)  # the call refuses it, and tells the other ranks
    if is_placed:
        begun = _started_on_device(reducer, reduce_op, value, options, name, out)
        if begun is not None:
            return begun
        # Of arrays on a host and a GPU together all is done now: another thread has another stream.
    elif communicator.nodes > 1:
        background = background_of(communicator, partial(_first_call, communicator.guard, name))
    if background is None:
        if isinstance(value, Arena):
            with Call(communicator.guard, _CALL, name):  # the other ranks hear of an error
                _check_arena(reducer, value, out)
        return AllReduceHandle(reducer.run(_CALL, AllReduce, reduce_op, value, options, name, out))
    try:
        _check_arena(reducer, value, out)
        work = _work(_on(reducer, background), reduce_op, value, options, name, out)
    except Exception as error:  # the peers start theirs: they must hear of it there
        work = partial(_fail, background.communicator.guard, name, error)
    # The thread has entered nothing; an algorithm of the program's own may ask for its strategy.
    in_step = current_frame() or nullcontext()
    work = partial(_in_background, background.communicator, call_site(), in_step, work)
    return AllReduceHandle(None, _UnderWay(work, background, communicator.guard))


def _in_background(ranks: Ranks, site: Site, in_step: AbstractContextManager[Any], work: Callable[[], Any]) -> Any:
    """Return what `work` does, in the thread in the background, as if it was called where the program started it."""
    ranks.guard.site = site
    try:
        with in_step, working_on(ranks):
            return work()
    finally:
        ranks.guard.site = None


def _first_call(guard: Guard, name: str | None, make: Callable[[], Any]) -> Any:
    """Return what `make` makes together with the other ranks."""
    with Call(guard, _WHERE, name) as call:
        call.agree("the first all_reduce_async")
        return make()


def _check_arena(reducer: Reducer, value: Any, out: Any) -> None:
    """Raise for an arena that cannot be reduced in place."""
    if isinstance(value, Arena):
        value._check(reducer, _WHERE, out)
        if not value._in_place and out is None:
            raise UnsupportedError.at(
                _WHERE,
                found="an arena with shared_result=True",
                expected="a reduction in place",
                fix="Pass out=arena, or use all_reduce.",
            )


def _started_on_device(
    reducer: Reducer,
    reduce_op: Any,
    value: Any,
    options: CommunicationOptions | None,
    name: str | None,
    out: Any,
) -> AllReduceHandle[Any] | None:
    """Start an all-reduce of arrays in GPU memory; None where these are not all, or are combined on the host."""
    from mpistrategy.reduction.asynchronous_gpu import (  # here: on CPUs nothing reads it
        Begun,
        background_for,
        known_path,
    )

    communicator, site = reducer.communicator, call_site()
    agree = partial(_first_call, communicator.guard, name)
    begun: Begun | None = None
    try:
        _check_arena(reducer, value, out)
        begun = Begun(reducer, ReduceOp._parse(reduce_op, _WHERE), value, options, out, _WHERE)
        seconds = reducer.options.merge(options).timeout_seconds
    except Exception as error:  # the peers start theirs: they must hear of it there
        background = background_for(communicator, known_path(reducer, options), agree)
        ranks = communicator if background is None else background.communicator
        work = partial(_fail, ranks.guard, name, error)
    else:
        if begun.path is None:
            return None
        background = background_for(communicator, begun.path, agree)
        ranks = communicator if background is None else background.communicator
        work = partial(_combined, ranks, begun, name, seconds)
    work = partial(_in_background, ranks, site, nullcontext(), work)
    if background is None:
        return AllReduceHandle(work(), begun=begun)
    return AllReduceHandle(None, _UnderWay(work, background, communicator.guard), begun)


def _combined(ranks: Ranks, begun: Begun, name: str | None, seconds: float | None) -> None:
    with Call(ranks.guard, _CALL, name) as call:
        call.structure = begun.structure.text
        call.wait_as(seconds)
        begun.work(ranks, call)


def _is_on_device(value: Any) -> bool:
    if isinstance(value, Arena):
        return value._on_device
    try:
        return any(is_on_device(contribution(leaf)) for leaf in nest.flatten_without_none(value)[0])
    except Exception:  # of other libraries, too: an array that was deleted, say
        return False  # the job raises it, so that the peers hear of it


def _work(
    reducer: Reducer, reduce_op: Any, value: Any, options: CommunicationOptions | None, name: str | None, out: Any
) -> Callable[[], Any]:
    """Look at the arguments in the caller's thread and context; return the rest of the work."""
    ReduceOp._parse(reduce_op, _WHERE)
    if isinstance(value, Arena):  # bucket by bucket
        buckets = list(value._mine)
        work = partial(reducer.run, _CALL, AllReduce, reduce_op, buckets, options, name, buckets)
        return partial(_then, work, value.values)
    given, structure = nest.flatten_without_none(value)
    leaves_like(out, structure, _WHERE)
    # The caller may put other arrays into the nest meanwhile.
    kept = structure.pack([leaf if isinstance(leaf, Mirrored) else contribution(leaf) for leaf in given])
    return partial(reducer.run, _CALL, AllReduce, reduce_op, kept, options, name, out)


def _then(work: Callable[[], Any], result: Any) -> Any:
    work()
    return result


def _fail(guard: Guard, name: str | None, error: Exception) -> Any:
    with Call(guard, _CALL, name):
        raise error


def _on(reducer: Reducer, background: Background) -> Reducer:
    """Return a reducer that does as `reducer`, in the background; what has been started goes on with it."""
    make = partial(Reducer, background.communicator, reducer.algorithm, reducer.options)
    found: Reducer = reducer.kept(background, make)
    return found
