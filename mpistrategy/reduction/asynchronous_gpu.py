"""All-reduces of arrays in GPU memory that go on while the program's stream computes.

What is packed is packed on the program's stream, and the results are made of it there, when somebody waits for them.
Between the two the reduction goes on a stream of its own.  Events order them: this stream waits for what was put on the
program's stream before the call, and a program's stream waits for the reduction where the result is asked for.  Nothing
waits on the host.

Only NCCL needs nothing else.  On the other paths the host takes part: a thread of ours, or the call that starts the
reduction where MPI may not be called in several threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from mpistrategy.arrays import nest
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.arrays.values import event_of_reads
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.gpu_transport import ON_THE_STREAM, DevicePath, device_paths
from mpistrategy.mpi.interface.ranks import Freed, Ranks
from mpistrategy.mpi.over_mpi.background import Background, background_of
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction.arena import Arena, check_dtypes
from mpistrategy.reduction.inputs import in_kind, leaves_like
from mpistrategy.reduction.reducer import Reducer, handed_out, looked_at


class CommunicationStream(Freed):
    """One stream for each device, made at the first use; an event belongs to a stream of its device."""

    def __init__(self) -> None:
        self._cupy: Any = cupy_for("arrays in GPU memory")
        self._streams: dict[int, Any] = {}
        #: What the stream may still use, and the events behind it; the oldest first.
        self._used: deque[tuple[Any, object]] = deque()

    def note(self) -> Any:
        """Return an event behind what is on the current stream so far."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._cupy.cuda.get_current_stream())
        return event

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Make the stream of the current device the current one, behind an event."""
        device = self._cupy.cuda.runtime.getDevice()
        if device not in self._streams:
            self._streams[device] = self._cupy.cuda.Stream(non_blocking=True)
        with self._streams[device] as stream:
            stream.wait_event(event)
            yield

    def keep(self, what: object) -> Any:
        """Return an event behind what is on the current stream, and keep `what` alive until it has been reached."""
        event = self.note()
        self._used.append((event, what))
        while self._used and self._used[0][0].done:
            self._used.popleft()
        return event

    def free(self) -> None:
        """Wait for what is on the streams: then nothing of it uses any memory."""
        for stream in self._streams.values():
            stream.synchronize()
        self._used.clear()


class Begun:
    """One of these all-reduces, from the packing on; made on the program's stream, on the device of the arrays.

    Args:
        reducer: reduces them.
        op: how they are combined.
        value: an arena, or a nest.
        options, out: of the call.
        where: the public call.

    Attributes:
        structure: of the nest.
        path: of the strategy, which all ranks know from here on; None where nothing has begun: the arrays are not all
            in GPU memory, or are combined on the host.

    Raises:
        As `Reducer.all_reduce_leaves`.
    """

    def __init__(
        self, reducer: Reducer, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any, where: str
    ) -> None:
        self._arena = value if isinstance(value, Arena) else None
        leaves, structure = nest.flatten_without_none(value if self._arena is None else self._arena.values)
        self._leaves = leaves
        self.structure: nest.Structure = structure
        self._targets = leaves_like(out if self._arena is None else None, self.structure, where)
        paths = partial(nest.paths_without_none, value)
        if self._arena is not None:
            check_dtypes(self._arena._buckets, op, where)
            self._leaves = self._targets = list(self._arena._mine)
            paths = partial(nest.leaf_paths, self._leaves)
        self._given, _, self._memory = looked_at(op, self._leaves, paths, where, None, self._targets)
        communicator, chosen = reducer.communicator, reducer.options.merge(options)
        begun = reducer.algorithm._begin_on_device(communicator, op, self._given, chosen, self._memory, where)
        self.path: DevicePath | None = None
        if begun is None:
            return
        self._begun, self._device, self._guard = begun, begun.arrays[0].device, communicator.guard
        with self._device:
            self._stream = communicator.once(CommunicationStream, CommunicationStream)
            self._packed = self._stream.note()
            self.path = begun.route.path(communicator)
            #: Whose memory may be used again only when it has been packed.
            self._read = event_of_reads(self._given)
        self._sent: Any = None

    def work(self, communicator: Ranks, call: Call) -> None:
        """Agree, and combine what has been packed; inside `call`, with the communicator of the thread."""
        route, _, memory, words = self._begun
        path: Any = self.path  # the ranks of the thread have a path of their own, of the same kind
        with self._device:
            device_paths(communicator).check()
            call.agree("reduce", **words)
            if path.name not in ON_THE_STREAM:
                path = route.path(communicator, path.name)
            with self._stream.after(self._packed):
                try:
                    route.send(communicator, path, memory)
                finally:
                    self._sent = self._stream.keep(self._begun)

    @property
    def is_over(self) -> bool:
        """Whether the GPU is done with what `work` has given it."""
        return self._sent is None or bool(self._sent.done)

    @cached_property
    def results(self) -> Any:
        """Return what the program gets, on the current stream, behind the reduction."""
        with self._device:
            cupy_for("arrays in GPU memory").cuda.get_current_stream().wait_event(self._sent)
            found = self._begun.route.results(self._begun.memory)
            kinds = [in_kind(result, like) for result, like in zip(found, self._given, strict=True)]
            results = handed_out(kinds, self._leaves, self._targets, self._memory)
        self._guard.wait_for_gpu(self._read)
        return self.structure.pack(results) if self._arena is None else self._arena.values


def background_for(
    communicator: Ranks, path: DevicePath | None, agree: Callable[[Callable[[], Any]], Any]
) -> Background | None:
    """Return what runs the work of these all-reduces on a path; None for the caller's thread, where nothing waits."""
    if path is None or path.name in ON_THE_STREAM:
        return None
    return background_of(communicator, agree, waits_for_gpu=True)


def known_path(reducer: Reducer, options: CommunicationOptions | None) -> DevicePath | None:
    """Return the path that arrays with these options take; None while the ranks have not chosen it."""
    word = path_word(reducer.options.merge(options), reducer.algorithm._device_path)
    return device_paths(reducer.communicator).known.get(word)
