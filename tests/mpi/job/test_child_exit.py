"""How forked children of a rank come to their end: as any program, and nobody notices but who waits for them."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.one_rank


# What a child does, at the main program's own level, and its status.
ENDS = {
    "pass": 0,
    "raise ValueError('of the child')": 1,
    "raise KeyboardInterrupt": 130,
    "sys.exit()": 0,
    "sys.exit(3)": 3,
    "exit(4)": 4,
    "forks()": 8,
}
PROGRAM = """
import atexit, os, sys

def in_child(*words):
    if os.getpid() != parent:
        os.write(1, (" ".join(words) + "\\n").encode())

parent = os.getpid()
atexit.register(in_child, "registered first")
import mpistrategy as ms

def forks():
    child = os.fork()
    if child:
        sys.exit(8 + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

strategy = ms.MirroredStrategy()
strategy.reduce("SUM", 1.0)
{first}
atexit.register(in_child, "registered second")
for end in {ends}:
    child = os.fork()
    if child == 0:
        break
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "after", end, flush=True)
if child == 0:
    atexit.register(in_child, "registered last")
{branches}
else:
    total = ms.MirroredStrategy().reduce("SUM", 1.0)
    print(f"total {{total}}", flush=True)
"""


@pytest.mark.each_mpi
@pytest.mark.parametrize("first", ["", "strategy.close()"])
def test_a_child_ends_as_a_program_does_and_leaves_its_parent_alone(launch: launching.Launch, first: str) -> None:
    """It must not take part in MPI_Finalize."""
    branches = "\n".join(f"    if end == {end!r}: {end}" for end in ENDS)
    job = launch(2, PROGRAM.format(first=first, ends=list(ENDS), branches=branches), timeout=40).check()
    for end, status in ENDS.items():
        assert job.stdout.count(f"status {status} after {end}\n") == 2, (end, job)
    assert job.stdout.count("total 2.0") == 2, job
    children = 2 * (len(ENDS) + 1)  # one has a child of its own
    for handler, times in (("registered first", 0), ("registered second", children), ("registered last", children)):
        assert job.stdout.count(handler) == times, (handler, job)
    assert job.stderr.count("ValueError: of the child") == 2, job


@pytest.mark.parametrize("first", ["", "strategy.close()"])
def test_a_child_that_is_forked_at_the_end(launch: launching.Launch, first: str) -> None:
    source = f"""
        import atexit, os
        import mpistrategy as ms
        strategy = ms.MirroredStrategy()
        {first}
        @atexit.register
        def fork():
            child = os.fork()
            if child:
                print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    job = launch(2, source, timeout=40).check()
    assert job.stdout.count("status 0") == 2, job


@pytest.mark.slow
def test_a_child_under_mpistrategy_run(launch: launching.Launch, tmp_path: Path) -> None:
    """It ends with any status it likes, and the job is unfinished still."""
    (tmp_path / "unfinished").touch()
    (tmp_path / "job.py").write_text("""
import os, sys
import mpistrategy as ms

def fork(status):
    child = os.fork()
    if child == 0:
        raise SystemExit(status)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists("unfinished"), flush=True)

strategy = ms.MirroredStrategy()
fork(0)
fork(3)
child = os.fork()
if child:
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists("unfinished"), flush=True)
    strategy.barrier()
""")
    command = ["-m", "mpistrategy", "run", "--unfinished", "unfinished"]
    job = launch(2, [*command, "job.py"], cwd=tmp_path, timeout=40).check()
    assert job.stdout.count("status 0 True") == 4, job
    assert job.stdout.count("status 3 True") == 2, job
    assert not (tmp_path / "unfinished").exists()
