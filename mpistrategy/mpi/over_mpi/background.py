"""A thread that makes calls in their order while the program computes: the reductions of a backward pass between nodes.

Its calls are compared on the program's own guard, among the program's other calls: each of these waits first until the
thread has made what was submitted.  The data travel on a communicator of their own, with naps between two looks at the
messages, since the program needs the core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.multi_node.two_level import Manner
from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator
from mpistrategy.mpi.over_mpi.progress import patiently, promptly

#: Smaller values are quicker in the program's own thread.
_LEAST_BYTES = 2**18


class Background:
    """The thread of a communicator.

    Args:
        communicator: whose calls it makes.
    """

    def __init__(self, communicator: MpiCommunicator) -> None:
        self._is_of_use = communicator.nodes > 1 and communicator.may_use_threads
        self._communicator = communicator
        self._ranks: MpiCommunicator | None = None
        self._thread = ThreadPoolExecutor(1, "mpistrategy background")
        self._number = 0
        self._last: Future[None] | None = None
        self._error: BaseException | None = None
        self._is_awaited = False

    def takes(self, nbytes: int) -> bool:
        """Return whether a reduction of so many bytes belongs here: between nodes, if MPI allows several threads."""
        return self._is_of_use and nbytes >= _LEAST_BYTES

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.get_ident() == self._number

    def submit(self, work: Callable[[], object]) -> Submitted:
        """Call `work` after all that was submitted before.

        After an error nothing is done, and all that was submitted fails with it, until `wait` has raised it.
        """
        self._last = self._thread.submit(self._run, work)
        return Submitted(self, self._last)

    def _run(self, work: Callable[[], object]) -> None:
        self._number = threading.get_ident()
        if self._error is None:
            try:
                work()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all is done; raise the first error.  Does nothing in the thread itself."""
        last = self._last
        if last is None or self.is_here:
            return
        if not last.done():
            self._is_awaited = True
            try:
                wait([last])
            finally:
                self._is_awaited = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def ranks(self, call: Call) -> MpiCommunicator:
        """Return the communicator on which the data of a call travel; the first time collective."""
        if self._ranks is None:
            call.agree("the first reduction in the background", patiently=True)
            self._ranks = self._communicator.duplicate()
            call.expect_more()
            self._ranks.first_message = None  # calls are compared on the other communicator
            self._ranks.manner = Manner(self._pause, nudges=8, blocks=False)
        return self._ranks

    def _pause(self, looks: int) -> None:
        if self.is_here:
            (promptly if self._is_awaited else patiently)(looks)
        else:
            os.sched_yield()  # the program's own thread: 4 MiB at 1 Gbit/s took 43 ms with naps, and 37 without

    def free(self) -> None:
        """Wait, and free the communicator.  Collective."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._ranks is not None and not self._communicator.guard.closed:
                self._ranks.free()


class Submitted:
    """Work of the thread that is under way; a `Message` to those who wait for it.

    Attributes:
        future: of the work.
        source: None, as of what is sent.
    """

    source: int | None = None

    def __init__(self, background: Background, future: Future[None]) -> None:
        self._background = background
        self.future: Future[None] = future

    def test(self) -> bool:
        """Return whether the work is done."""
        return self.future.done()

    def wait(self, where: str = "", timeout: float = 0.0) -> None:
        """Wait until all work is done; raise the first error, or that for which this was not done.

        The calls in it have their own timeouts.
        """
        self._background.wait()
        self.future.result()
