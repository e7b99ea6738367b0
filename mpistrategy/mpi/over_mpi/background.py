"""Jobs in the background: one thread, its queue of jobs, and the communicator on which their data travel.

The thread sleeps between two looks at its messages, to leave the core to the program.  While the program itself waits
for a job the naps are short: on two nodes at 1 Gbit/s, long naps would leave the network idle in between.

The communicator is a duplicate of the strategy's, with a guard of its own, on which `all_reduce_async` compares its
calls.  The reductions of a backward pass of torch are compared on the program's own guard, among the program's other
calls: each such call waits first until the thread has made all submitted jobs.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from mpistrategy.errors import ContextError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.channel import wait_patiently
from mpistrategy.mpi.faults import injection
from mpistrategy.mpi.interface.ranks import Freed, Ranks

_SHORTEST_NAP, _LONGEST_NAP = 5e-5, 4e-3
#: While the program waits: so many looks without a nap, then the shortest naps.
_LOOKS = 200
#: Over TCP each call of MPI moves only a part of MPICH's messages: so many calls after a pause.
_NUDGES = 8
#: Smaller reductions of torch are quicker in the program's own thread.
_LEAST_BYTES = 2**18


class Background(Freed):
    """The thread, from the first job on, and its jobs.

    Args:
        program: the ranks of the program.

    Attributes:
        communicator: the ranks of the jobs; None before `connect`.
        submitted: the number of jobs so far.
        known_to_all: the number of jobs that all ranks are known to have submitted.
    """

    def __init__(self, program: Any) -> None:
        self.communicator: Any = None
        self.submitted: int = 0
        self.known_to_all: int = 0
        self._program = program
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        #: The jobs that threads of the program wait for; failed jobs that nobody has waited for.
        self._awaited: list[Future[Any]] = []
        self._failed: list[Future[Any]] = []
        self._thread = threading.Thread(target=self._run, name="mpistrategy background", daemon=True)

    def connect(self) -> Background:
        """Make the communicator of the jobs, whose data travel as this thread can wait for them.  Collective."""
        self.communicator = communicator = self._program.duplicate()
        communicator.pause = self.pause
        communicator.guard.is_in_background = communicator.guard.is_patient = True
        return self

    def connected(self, call: Call) -> Any:
        """Return the communicator, on which the data of a call of the program travel; the first time collective."""
        if self.communicator is None:
            call.agree("the first reduction in the background", patiently=True)
            self.connect()
            call.expect_more()
        return self.communicator

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the background thread."""
        return threading.get_ident() == self._thread.ident

    def takes(self, nbytes: int) -> bool:
        """Return whether a reduction of torch belongs here: between nodes, if MPI allows several threads."""
        return nbytes >= _LEAST_BYTES and self._program.nodes > 1 and self._program.may_use_threads

    def submit(self, work: Callable[[], Any], where: str) -> Future[Any]:
        """Call `work` in the thread after all earlier jobs; return its result to be.

        A signal's handler may raise between any two lines.  Whether the other ranks have a job more is not known then:
        the strategy takes no more calls.
        """
        if self._program.guard.closed:  # in a forked child, say, which has no such thread
            raise self._program.guard.refusal(where)
        try:
            if self._thread.ident is None:
                self._thread.start()
            elif not self._thread.is_alive():
                raise ContextError.at(where, found="a call at the end of the program", expected="one before it")
            job: Future[Any] = Future()
            self._jobs.put((job, work))
            self.submitted += 1
            self._last = job  # not before: nobody must wait for a job that the thread does not get
            return job
        except BaseException as error:
            for ranks in filter(None, (self.communicator, self._program)):
                ranks.guard.break_off(where, error)
            raise

    def join(self, job: Future[Any]) -> None:
        """Wait for a job; meanwhile the background thread has the core."""
        try:
            self._awaited.append(job)
            job.exception()
            if self._last is job:
                self._last = None  # its result is the program's
        finally:
            if job in self._awaited:
                self._awaited.remove(job)

    def result(self, job: Future[Any]) -> Any:
        """Wait for a job; return its result or raise its error."""
        self.join(job)
        if job in self._failed:
            self._failed.remove(job)
        return job.result()

    def wait(self) -> None:
        """Wait until all is done; raise the first unreported error.

        A job in the thread itself waits for nothing, but goes no further after an error of an earlier job: the program
        hears of it when all are done, and makes none of the later calls on other ranks.
        """
        if self.is_here:
            for job in self._failed[:1]:
                job.result()
            return
        last = self._last
        if last is not None:
            self.join(last)
        for job in self._failed[:1]:
            self._failed.clear()
            job.result()

    def pause(self, looks: int) -> None:
        """Give the core away between two looks at the messages, and let them move on.

        The program's own thread does not nap: 4 MiB at 1 Gbit/s took 43 ms with naps, and 37 without.  The background
        thread naps for some milliseconds, at first and while the program waits for it only briefly: the network may
        need this core.  A step of torch's DDP, 25 M parameters, two nodes of one core each without a limit of the
        network: 247 ms, with naps of 0.5 ms 255, over gloo 252.  At 1 Gbit/s both take as long.
        """
        if not self.is_here or (self._awaited and looks <= _LOOKS):
            os.sched_yield()
        else:
            time.sleep(_SHORTEST_NAP if self._awaited else min(_SHORTEST_NAP * 2 ** min(looks, 10), _LONGEST_NAP))
        for _ in range(_NUDGES):
            self.communicator.progress()

    def _run(self) -> None:
        injection.inside.set(True)  # planned faults count the calls when they are started
        while (entry := self._jobs.get()) is not None:
            job, work = entry
            try:
                job.set_result(work())
            except BaseException as error:
                self._failed.append(job)
                job.set_exception(error)
            del job, work, entry  # they refer to the program's arrays

    def end(self) -> None:
        """Finish all jobs, and end the thread."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def free(self) -> None:
        """Finish the jobs that all ranks have started, then free the communicator.  Collective.

        A job that some rank has not started ends with an error on the others.  Failed jobs without a waiter
        are reported in a warning.
        """
        self.end()
        if self.communicator is not None and not self._program.guard.closed:
            guard = self.communicator.guard
            guard.start_leaving()
            while not wait_patiently(guard.peers_have_left):
                guard.tell_peers("it starts no further all_reduce_async")
            self.communicator.free()
        failed, self._failed, self._last = self._failed, [], None
        for job in failed:
            warn(f"a reduction in the background failed and nobody waited for it: {job.exception()}", RuntimeWarning)


def background_of(
    ranks: Ranks, agree: Callable[[Callable[[], Background | None]], Background | None], *, waits_for_gpu: bool = False
) -> Background | None:
    """Return the background of the ranks; None where jobs run at once.  The first call is collective.

    There is a thread where the MPI of all ranks allows several: on several nodes, and on one node for jobs that wait
    for a GPU.  The ranks of a single node have no core to spare otherwise.

    Args:
        ranks: of a strategy.
        agree: compares the first call between the ranks, and returns the result of its argument in that call.
        waits_for_gpu: whether the jobs wait for a GPU.
    """
    if ranks.size == 1 or (ranks.nodes == 1 and not waits_for_gpu):
        return None
    return ranks.once(Background, partial(agree, partial(_new_background, ranks)))


def _new_background(ranks: Ranks) -> Background | None:
    may_use_threads = set(ranks.allgather_text(str(ranks.may_use_threads))) == {"True"}
    return Background(ranks).connect() if may_use_threads else None
