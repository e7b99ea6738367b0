"""Calls that a thread makes in their order while the program computes: the reductions of a backward pass between nodes.

They are compared on the program's own guard, among the program's other calls: each of these waits first until the
thread has made what was submitted.  The data travel on a communicator of their own.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial

from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.over_mpi.engine import Job, Worker
from mpistrategy.mpi.over_mpi.ranks import MpiRanks

#: Smaller values are quicker in the program's own thread.
_LEAST_BYTES = 2**18


class Background(Worker):
    """The calls of a communicator that are made in the background.

    Args:
        communicator: whose calls they are.
    """

    def __init__(self, communicator: MpiRanks) -> None:
        super().__init__(self._tell_of)
        self._is_of_use = communicator.nodes > 1 and communicator.may_use_threads
        self._communicator = communicator
        self._ranks: MpiRanks | None = None
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

    def ranks(self, call: Call) -> MpiRanks:
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
