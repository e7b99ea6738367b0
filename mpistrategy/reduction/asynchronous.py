"""All-reduces that go on while the step computes: `ReplicaContext.all_reduce_async` and its handle.

Arrays on the host are reduced by a thread in the background between nodes, and at once on one node.

Arrays in GPU memory are packed on the program's stream.  The reduction runs on a stream of its own.  The results are
unpacked on the program's stream, when the program waits for them.  Events order the streams: the reduction waits for
earlier work on the program's stream, and the program's stream waits for the reduction where the result is asked for.
Nothing waits on the host.  Only NCCL needs nothing else.  On the other paths the host takes part: this thread,
or the call that starts the reduction where MPI may not be called in several threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import cupy_for, is_on_device, layout_of
from mpistrategy.arrays.values import Mirrored, contribution, event_of_reads
from mpistrategy.context import current_frame, working_on
from mpistrategy.errors import UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Site, call_site
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.gpu.transports.choice import device_path
from mpistrategy.mpi.interface.gpu_transport import ON_THE_STREAM, chosen_path
from mpistrategy.mpi.interface.ranks import Freed, Ranks
from mpistrategy.mpi.over_mpi.background import Background, background_of
from mpistrategy.objects.jax_traces import in_jax_trace, refuse_in_jax_trace
from mpistrategy.objects.settings import NotPickled
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.arena import Arena, check_dtypes
from mpistrategy.reduction.gpu import GpuRoute
from mpistrategy.reduction.inputs import EVERY_RANK, leaves_like
from mpistrategy.reduction.reducer import AllReduce, Reducer, checked_inputs, outputs_for
from mpistrategy.reduction.transfer import layouts_of

_WHERE = "ReplicaContext.all_reduce_async"
_CALL = "ReplicaContext.all_reduce"

T_co = TypeVar("T_co", covariant=True)


class AllReduceHandle(NotPickled, Generic[T_co]):
    """An all-reduce that `ReplicaContext.all_reduce_async` has started; generic in the type of its result."""

    _instead_of_pickling = "Send what wait() returns."

    def __init__(
        self,
        result: Any,
        background: Background | None = None,
        job: Any = None,
        guard: Any = None,
        begun: _Begun | None = None,
        values: Any = None,
    ) -> None:
        """Keep the result, or the job that will have it.

        Args:
            result: of a reduction that is done.
            background: where the reduction is a job; None for none.
            job: the future of its result.
            guard: of the program's ranks.
            begun: the reduction on a GPU.
            values: of an arena.
        """
        self._result, self._background, self._job, self._guard = result, background, job, guard
        self._gpu_reduction, self._values = begun, values
        self._number = 0 if background is None else background.submitted

    def done(self) -> bool:
        """Return whether `wait` would find a result or an error at once on this rank; never waits.

        The answer differs from rank to rank: do not let it decide about a collective call.
        """
        is_over = self._background is None or self._job.done()
        return is_over and (self._gpu_reduction is None or self._gpu_reduction.is_over)

    @collective("wait")
    def wait(self) -> T_co:
        """Return what `all_reduce` would have returned.  Collective: every rank waits, having started equally many.

        A second call returns the same result, and is no collective.  On several nodes, sums may have been added in
        another order than by `all_reduce`: still the same bits on all ranks, and in equal runs.

        Raises:
            CollectiveMismatchError: on every rank, when the ranks have started different all-reduces, or a rank
                does something else than wait.
            MpiStrategyError: on every rank, for bad input on any rank; of the kind raised there.
        """
        if self._background is None:
            refuse_in_jax_trace("AllReduceHandle.wait")
        else:
            self._result = self._result_of_job(self._background, self._guard)
        result: Any = self._result if self._gpu_reduction is None else self._gpu_reduction.results
        return result if self._values is None else self._values  # type: ignore[no-any-return]

    def _result_of_job(self, background: Background, guard: Guard) -> Any:
        """Wait for the job, together with the other ranks; return its result or raise its error."""
        # A peer in another collective may never start its part; this comparison finds that out.  Once all ranks have
        # started equally many all-reduces, all of them end.
        # A forked child has no such thread: there the call refuses.
        if guard.is_forked or (not guard.closed and (self._number > background.known_to_all or in_jax_trace())):
            started = background.submitted
            with Call(guard, "AllReduceHandle.wait", name=f"{started} all_reduce_async started", anywhere=True) as call:
                call.agree("wait", patiently=True)
            background.known_to_all = started
        return background.result(self._job)

    def __repr__(self) -> str:
        return f"<AllReduceHandle, {'over' if self.done() else 'under way'}>"


def start_all_reduce(
    reducer: Reducer, reduce_op: Any, value: Any, options: CommunicationOptions | None, name: str | None, out: Any
) -> AllReduceHandle[Any]:
    """Start an all-reduce; see `ReplicaContext.all_reduce_async`."""
    ranks, arena = reducer.communicator, value if isinstance(value, Arena) else None
    is_on_gpu = type(value) is not np.ndarray and _is_on_device(value if arena is None else arena._own_arrays)
    if ranks.nodes == 1 and not is_on_gpu and arena is None:
        return AllReduceHandle(reducer.run(_CALL, AllReduce, reduce_op, value, options, name, out))
    at_once = partial(reducer.run, _CALL, AllReduce, reduce_op, value, options, name, out)
    agree = partial(_first_call, ranks.guard, name)
    if in_jax_trace():
        agree(lambda: None)  # the call refuses it, and tells the other ranks
    begun: _Begun | None = None
    failure: Exception | None = None
    try:
        op = ReduceOp._parse(reduce_op, _WHERE)
        value, out = _parts(reducer, op, value, out)
        if is_on_gpu:
            begun = _Begun(reducer, op, value, out, reducer.options.merge(options))
        leaves, structure = nest.flatten_without_none(value)
        leaves_like(out, structure, _WHERE)
        # The caller may put other arrays into the nest meanwhile.
        value = structure.pack([leaf if isinstance(leaf, Mirrored) else contribution(leaf) for leaf in leaves])
    except Exception as error:  # the peers start theirs: they must hear of it there
        failure = error
    path = chosen_path(ranks).name if begun is None else begun.path_name
    # This thread does work that waits for nothing.
    is_here = is_on_gpu and path in ("", *ON_THE_STREAM)
    background = None if is_here else background_of(ranks, agree, waits_for_gpu=is_on_gpu)
    if (background is None and not is_on_gpu) or not path:  # also for arrays on a host and a GPU together
        return AllReduceHandle(at_once() if failure is None else _fail(ranks.guard, name, failure))
    where = ranks if background is None else background.communicator
    if failure is not None:
        work = partial(_fail, where.guard, name, failure)
    elif begun is not None:
        work = partial(begun.work, where, name)
    else:  # a reducer on the thread's communicator; it goes on with the present algorithm and options
        thread = reducer.cached(background, partial(Reducer, where, reducer.algorithm, reducer.options))
        work = partial(thread.run, _CALL, AllReduce, reduce_op, value, options, name, out)
    # The thread has entered nothing; an algorithm of the program's own may ask for its strategy.
    work = partial(_in_background, where, call_site(), current_frame() or nullcontext(), work)
    values = None if arena is None else arena._values
    if background is None:
        return AllReduceHandle(work(), begun=begun, values=values)
    return AllReduceHandle(None, background, background.submit(work, _WHERE), ranks.guard, begun, values)


def _parts(reducer: Reducer, op: ReduceOp, value: Any, out: Any) -> tuple[Any, Any]:
    """Return the value and the target of the reduction: for an arena its buckets, in place.

    Raises:
        MpiStrategyError: for an arena that cannot be reduced in place, with this operation.
    """
    if not isinstance(value, Arena):
        return value, out
    value._check(reducer, _WHERE, out)
    if not value._in_place and out is None:
        raise UnsupportedError.at(
            _WHERE,
            found="an arena with shared_result=True",
            expected="a reduction in place",
            fix="Pass out=arena, or use all_reduce.",
        )
    check_dtypes(value._buckets, op, _WHERE)
    return [*value._own_arrays], [*value._own_arrays]


def _in_background(ranks: Ranks, site: Site, in_step: AbstractContextManager[Any], work: Callable[[], Any]) -> Any:
    """Return the result of `work` in the background thread, as if the program called it at its call site."""
    ranks.guard.site = site
    try:
        with in_step, working_on(ranks):
            return work()
    finally:
        ranks.guard.site = None


def _first_call(guard: Guard, name: str | None, make: Callable[[], Any]) -> Any:
    """Return the result of `make`, called together with the other ranks."""
    with Call(guard, _WHERE, name) as call:
        call.agree("the first all_reduce_async")
        return make()


def _is_on_device(value: Any) -> bool:
    try:
        return any(is_on_device(contribution(leaf)) for leaf in nest.flatten_without_none(value)[0])
    except Exception:  # of other libraries, too: an array that was deleted, say
        return False  # the job raises it, so that the peers hear of it


def _fail(guard: Guard, name: str | None, error: Exception) -> Any:
    with Call(guard, _CALL, name):
        raise error


# ------------------------------------------------------------------------------------------------- in GPU memory


class _Stream(Freed):
    """The stream of the current device on which reductions run.

    Attributes:
        stream: CuPy's.
    """

    def __init__(self) -> None:
        self._cupy: Any = cupy_for("arrays in GPU memory")
        self.stream: Any = self._cupy.cuda.Stream(non_blocking=True)
        #: Objects that the stream may still use, and the events after their last use; the oldest first.
        self._used: deque[tuple[Any, object]] = deque()

    def note(self) -> Any:
        """Return an event behind the current stream's work so far."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._cupy.cuda.get_current_stream())
        return event

    def keep(self, memory: object) -> Any:
        """Return an event behind the current stream's work, and keep `memory` alive until the event."""
        event = self.note()
        self._used.append((event, memory))
        while self._used and self._used[0][0].done:
            self._used.popleft()
        return event

    def free(self) -> None:
        """Wait for the stream: then its work uses no memory."""
        self.stream.synchronize()
        self._used.clear()


class _Begun:
    """An all-reduce in GPU memory, from the packing on; made on the program's stream, on the device of the arrays.

    Args:
        reducer: reduces them.
        op: how they are combined.
        value: a nest.
        out: where the results go, or None.
        options: of the strategy and the call.

    Attributes:
        path_name: of the strategy's path, which all ranks know from here on; "" where nothing has begun: the arrays
            are not all in GPU memory, or are combined on the host.

    Raises:
        As `Reducer.all_reduce_leaves`.
    """

    path_name: str = ""

    def __init__(self, reducer: Reducer, op: ReduceOp, value: Any, out: Any, options: CommunicationOptions) -> None:
        leaves, self._structure = nest.flatten_without_none(value)
        targets, paths = leaves_like(out, self._structure, _WHERE), partial(nest.leaf_paths, value)
        components, self._arrays, memory = checked_inputs(op, leaves, paths, _WHERE, None, targets)
        self._components, self._targets, self._memory_of_targets = components, targets, memory
        ranks, self._guard = reducer.communicator, reducer.communicator.guard
        if any(isinstance(component, Mirrored) for component in components) or not all(map(is_on_device, self._arrays)):
            return
        route = reducer.plan_for(layouts_of(self._arrays), op, options, on_gpu=True)
        if not isinstance(route, GpuRoute):
            return
        self._route, self._op, self._timeout_seconds = route, op, options.timeout_seconds
        self._settings = reducer.algorithm._settings(options)
        self._device: Any = self._arrays[0].device
        with self._device:
            own_results = None if memory is None else route.direct(self._arrays, memory)
            self._memory = route.bring(self._arrays, own_results)
            self._stream = ranks.once((_Stream, self._device.id), _Stream)
            self._packed = self._stream.note()
            self.path_name = device_path(ranks, route.word).name
            #: The event after which the memory of other libraries' arrays may be used again.
            self._read = event_of_reads(components)
        self._sent_event: Any = None

    def work(self, ranks: Ranks, name: str | None) -> None:
        """Agree, and combine the packed arrays; with the communicator of the thread."""
        with Call(ranks.guard, _CALL, name) as call, self._device:
            call.structure = self._structure.text
            call.wait_as(self._timeout_seconds)
            chosen_path(ranks).check()
            values = tuple(map(layout_of, self._arrays))
            call.agree("reduce", op=self._op.value, values=values, destination=EVERY_RANK.text, options=self._settings)
            path = device_path(ranks, self.path_name)  # the ranks of the thread have a path of their own, of this kind
            with self._stream.stream as stream:
                stream.wait_event(self._packed)
                try:
                    self._route.send(ranks, path, self._memory)
                finally:
                    self._sent_event = self._stream.keep((self._arrays, self._memory))

    @property
    def is_over(self) -> bool:
        """Whether the GPU has done the work of `work`."""
        return self._sent_event is None or bool(self._sent_event.done)

    @cached_property
    def results(self) -> Any:
        """Return the program's results, on the current stream, behind the reduction."""
        with self._device:
            cupy_for("arrays in GPU memory").cuda.get_current_stream().wait_event(self._sent_event)
            arrays = self._route.unpacked(self._memory)
            results = outputs_for(arrays, self._components, self._targets, self._memory_of_targets)
        self._guard.wait_for_gpu(self._read)
        return self._structure.pack(results)
