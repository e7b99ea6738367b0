"""What runs in the background: one thread, its queue of jobs, and what reduces in it.

The thread sleeps between two looks at its messages, to leave the core to the program.  While the program itself waits
for a job the naps are short: on two nodes at 1 Gbit/s, long ones would leave the network idle in between.

An engine uses a duplicate of the strategy's communicator, with a guard of its own.  It says its own goodbye when it is
freed, once it has no more jobs.  A job that some rank never started ends then with an error.

The reductions of a backward pass of torch (`Background`) are compared on the program's own guard, among the program's
other calls: each of these waits first until the thread has made what was submitted.  Only their data travel on a
communicator of their own.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.channel import wait_patiently
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.faults import injection
from mpistrategy.mpi.interface.buffers import Freed

_SHORTEST_NAP, _LONGEST_NAP = 5e-5, 4e-3
#: While the program waits: so many looks without a nap, then the shortest naps.
_LOOKS = 200
#: Over TCP each call of MPI moves only a part of MPICH's messages: so many calls after a pause.
_NUDGES = 8
#: Smaller reductions of torch are quicker in the program's own thread.
_LEAST_BYTES = 2**18


def patiently(looks: int) -> None:
    """Sleep between two looks at the messages: briefly at first, for small values, then some milliseconds."""
    time.sleep(min(_SHORTEST_NAP * 2 ** min(looks, 10), _LONGEST_NAP))


def promptly(looks: int) -> None:
    """Look on for a moment, then sleep briefly: also a core that nobody computes on may be wanted for the network.

    A step of torch's DDP, 25 M parameters, two nodes of one core each without a limit of the network: 247 ms, with naps
    of 0.5 ms 255, over gloo 252.  At 1 Gbit/s both take as long.
    """
    if looks <= _LOOKS:
        os.sched_yield()
    else:
        time.sleep(_SHORTEST_NAP)


class Job:
    """A function to be called once, and its result.

    Args:
        work: the function.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        #: Held until it has ended; an event takes longer to make than a small sum.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._result: Any = None
        self.error: BaseException | None = None
        self.was_waited_for: bool = False

    def run(self) -> None:
        """Call the function in this thread; keep its error for `result`."""
        assert self._work is not None
        try:
            self._result = self._work()
        except BaseException as error:
            self.error = error
        finally:  # whoever waits must not do so for ever
            self._work = None  # it refers to the caller's arrays
            self._under_way.release()

    def is_over(self) -> bool:
        """Return whether it has ended, with a result or an error; does not wait."""
        return self._work is None

    def join(self) -> None:
        """Wait for the end."""
        with self._under_way:
            pass

    def result(self) -> Any:
        """Wait for the end; return the result or raise the error."""
        self.join()
        self.was_waited_for = True
        if self.error is not None:
            raise self.error
        return self._result


class Worker:
    """The thread, from the first job on, and the jobs that have not begun.

    Args:
        ended: called in the thread with each job that has ended.
    """

    def __init__(self, ended: Callable[[Any], object]) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ended, self._takes_no_more = ended, False
        #: The jobs that threads of the program wait for.
        self._awaited: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="mpistrategy background", daemon=True)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.get_ident() == self._thread.ident

    def submit(self, job: Job) -> None:
        """Run `job` after all earlier ones.

        Raises:
            RuntimeError: after `end`.
        """
        if self._takes_no_more:
            raise RuntimeError("the thread for work in the background has ended")
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def finish(self, job: Job) -> None:
        """Wait for `job`; meanwhile the thread has the core of this one."""
        try:
            self._awaited.append(job)
            job.join()
        finally:
            if job in self._awaited:
                self._awaited.remove(job)

    def take(self, ranks: Any) -> Any:
        """Let the data of a communicator over MPI travel as this thread can wait for them; return it."""
        ranks.pause = partial(self.pause, ranks.progress)
        return ranks

    def pause(self, progress: Callable[[], object], looks: int) -> None:
        """Give the core away between two looks at the messages, and let them move on."""
        if self.is_here:
            (promptly if self._awaited else patiently)(looks)
        else:
            os.sched_yield()  # the program's own thread: 4 MiB at 1 Gbit/s took 43 ms with naps, and 37 without
        for _ in range(_NUDGES):
            progress()

    def end(self) -> None:
        """Finish all jobs, and end the thread."""
        self._takes_no_more = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        injection.inside.depth = 1  # planned faults count the calls when they are started
        while (job := self._jobs.get()) is not None:
            job.run()
            self._ended(job)
            del job  # its result is the program's


class AtOnce:
    """Says that the caller does the work itself, when it is started.

    Attributes:
        communicator: that of the work.
    """

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator


class Engine(AtOnce, Freed):
    """A thread and a communicator for jobs in the background.  Collective.

    Args:
        communicator: the strategy's; all its ranks make an engine at the same time.

    Attributes:
        submitted: the number of jobs so far.
        known_to_all: how many of them all ranks are known to have submitted.
    """

    def __init__(self, communicator: Any) -> None:
        self.submitted: int = 0
        self.known_to_all: int = 0
        self.worker: Worker = Worker(self._keep_failed)
        self._program: Guard = communicator.guard
        self._failed: list[Job] = []
        super().__init__(self.worker.take(communicator.duplicate()))
        guard: Guard = self.communicator.guard
        guard.is_in_background = guard.is_patient = True

    def submit(self, job: Job) -> None:
        """Run `job` after all earlier ones.

        A signal's handler may raise between any two lines.  Whether the other ranks have a job more is not known then:
        the strategy takes no more calls.
        """
        if self._program.closed:  # in a forked child, say, which has no such thread
            raise self._program.refusal("ReplicaContext.all_reduce_async")
        try:
            self.worker.submit(job)
            self.submitted += 1
        except BaseException as error:
            for guard in (self.communicator.guard, self._program):
                guard.break_off("ReplicaContext.all_reduce_async", error)
            raise

    def finish(self, job: Job) -> None:
        """Wait for `job`; meanwhile the thread has the core of this one."""
        self.worker.finish(job)

    def _keep_failed(self, job: Job) -> None:
        """Remember a job that has failed until somebody waits for it."""
        self._failed = [each for each in (*self._failed, job) if each.error and not each.was_waited_for]

    def free(self) -> None:
        """Finish the jobs that all ranks have started, then end the engine.  Collective.

        A job that some rank has not started ends with an error on the others.  Failed jobs that nobody has waited for
        are told in a warning.
        """
        self.worker.end()
        guard = self.communicator.guard
        guard.start_leaving()
        while not wait_patiently(guard.peers_have_left):
            guard.tell_peers("it starts no further all_reduce_async")
        self.communicator.free()
        for job in self._failed:
            if not job.was_waited_for:
                warn(f"an all_reduce_async failed and nobody waited for it: {job.error}", RuntimeWarning)


def engine_of(communicator: Any, agree: Callable[[Callable[[], Any]], Any], *, waits_for_gpu: bool = False) -> AtOnce:
    """Return what runs the jobs of a communicator; the first call is collective.

    It is an `Engine` where the MPI of all ranks allows several threads: on several nodes, and on one node for jobs that
    wait for a GPU.  Else jobs run at once: the ranks of a single node have no core to spare, and simulated ranks have
    no progress thread.

    Args:
        communicator: a strategy's.
        agree: compares the first call between the ranks, and returns what its argument makes in that call.
        waits_for_gpu: whether the jobs do.
    """
    has_nodes = communicator.nodes > 1

    def together() -> AtOnce:
        threads = set(communicator.allgather_text(str(communicator.may_use_threads))) == {"True"}
        return Engine(communicator) if threads else AtOnce(communicator)

    is_alone = not has_nodes and not (waits_for_gpu and communicator.size > 1)
    make = partial(AtOnce, communicator) if is_alone else partial(agree, together)
    made: AtOnce = communicator.once(AtOnce if has_nodes or not waits_for_gpu else Engine, make)
    return made


class Background(Worker):
    """The calls of a communicator that are made in the background.

    Args:
        communicator: whose calls they are.
    """

    def __init__(self, communicator: Any) -> None:
        super().__init__(self._tell_of)
        self._is_of_use = communicator.nodes > 1 and communicator.may_use_threads
        self._communicator = communicator
        self._ranks: Any = None
        self._last: Job | None = None
        self._error: BaseException | None = None

    def takes(self, nbytes: int) -> bool:
        """Return whether a reduction of so many bytes belongs here: between nodes, if MPI allows several threads."""
        return self._is_of_use and nbytes >= _LEAST_BYTES

    def call(self, work: Callable[[], object], ended: Callable[[], object]) -> Submitted:
        """Call `work` after all that was submitted before, and then `ended`, both in the thread.

        After an error nothing is done, and all that was submitted fails with it, until `wait` has raised it.
        """
        guard = self._communicator.guard
        if guard.closed:
            raise guard.refusal("torch.distributed.all_reduce")
        if self._last is None:  # the program may end without a wait, before the ranks say goodbye
            atexit.register(self.end)
        job = Submitted(self, partial(self._unless_failed, work), ended)
        self.submit(job)
        self._last = job
        return job

    def _tell_of(self, job: Submitted) -> None:
        """Call what the program wants to be called; it may wait for the job."""
        try:
            job.ended()
        except BaseException as error:
            self._error = self._error or error

    def _unless_failed(self, work: Callable[[], object]) -> None:
        try:
            if self._error is None:
                work()
        except BaseException as error:
            self._error = error
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all is done; raise the first error.  Does nothing in the thread itself."""
        if self._last is None or self.is_here:
            return
        self.finish(self._last)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def ranks(self, call: Call) -> Any:
        """Return the communicator on which the data of a call travel; the first time collective."""
        if self._ranks is None:
            call.agree("the first reduction in the background", patiently=True)
            self._ranks = self.take(self._communicator.duplicate())
            call.expect_more()
            self._ranks.first_message = None  # calls are compared on the other communicator
        return self._ranks

    def free(self) -> None:
        """Wait, and free the communicator.  Collective."""
        try:
            self.wait()
        finally:
            self.end()
            atexit.unregister(self.end)
            if self._ranks is not None and not self._communicator.guard.closed:
                self._ranks.free()


class Submitted(Job):
    """A job of the thread; a `Message` to those who wait for it.

    Args:
        background: whose job it is.
        work: the function.
        ended: what is called when it has ended.

    Attributes:
        source: None, as of what is sent.
    """

    source: int | None = None

    def __init__(self, background: Background, work: Callable[[], object], ended: Callable[[], object]) -> None:
        super().__init__(work)
        self._background = background
        self.ended: Callable[[], object] = ended

    def test(self) -> bool:
        """Return whether the work is done."""
        return self.is_over()

    def wait(self, where: str = "", timeout: float = 0.0) -> None:
        """Wait until all work is done; raise the first error, or that for which this was not done.

        The calls in it have their own timeouts.
        """
        self._background.wait()
        self.result()
