"""What a process says about itself while its program runs on."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.one_rank

#: A main thread that calls and returns all the time and leaves garbage with finalizers, seen by another thread.
#: Without `_frames_stay` Python 3.11 ends in a segmentation fault, or finds other objects in the place of frames.
PROGRAM = """
import sys, threading, time, weakref
from mpistrategy.mpi.watchdog import local_process as process_view

sys.setswitchinterval(1e-5)
main, over, looks = threading.main_thread().ident, threading.Event(), []

def watch():
    count = 0
    while not over.is_set():
        with process_view._frames_stay():
            frame = sys._current_frames().get(main)
            while frame is not None:
                frame = frame.f_back
        count += 1
    looks.append(count)

class Garbage:
    def __init__(self):
        self.me = self
        weakref.finalize(self, lambda: [[each] for each in range(200)])

def work(depth):
    Garbage()
    return work(depth - 1) if depth else None

thread = threading.Thread(target=watch)
thread.start()
end = time.monotonic() + 0.5
while time.monotonic() < end:
    work(30)
over.set()
thread.join()
assert looks[0] > 0
"""


def test_looking_at_the_main_thread_while_it_runs_does_no_harm() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
