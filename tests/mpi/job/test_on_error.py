"""The library in somebody else's program: what it takes it gives back, and it ends nothing that it was asked not to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import launching
import pytest
from replicas import RANK, in_step, outcomes, rows, several, still_works

import mpistrategy as ms

pytestmark = pytest.mark.mpi


# ------------------------------------------------------------------------------------------------- what is given back

FREE = """
import threading
from contextlib import closing
from mpi4py import MPI
import mpistrategy as ms

def threads():
    return sorted(thread.name for thread in threading.enumerate())

half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
for make in (
    lambda: ms.MirroredStrategy(),
    lambda: ms.MirroredStrategy(communicator=half),
    lambda: ms.MirroredStrategy(on_error="raise"),
):
    with closing(make()) as first, closing(make()) as second:
        assert first.reduce("SUM", 1.0) == second.reduce("SUM", 1.0)
        assert len(threads()) > 1
    assert threads() == ["MainThread"], threads()
print("given back")
"""


@pytest.mark.one_rank
@pytest.mark.slow
def test_threads_are_given_back_at_the_last_close(launch: launching.Launch) -> None:
    job = launch(4, FREE, timeout=60).check()
    assert job.stdout.count("given back") == 4, job


@pytest.mark.one_rank
def test_after_the_last_close_an_exception_is_pythons_again(launch: launching.Launch) -> None:
    """In any thread; the job ends when MPI does."""
    source = """
        import sys, threading
        import mpistrategy as ms
        strategy = ms.MirroredStrategy()
        rank = strategy.replica_id_in_sync_group
        strategy.barrier()
        strategy.close()
        if rank == 1:
            thread = threading.Thread(target=lambda: {}["of a thread"])
            thread.start()
            thread.join()
            print("goes on", flush=True)
            raise ValueError("of the program")
        print("ends well", flush=True)
    """
    job = launch(2, source, timeout=40)
    assert job.returncode, job
    assert "goes on" in job.stdout, job
    assert "ends well" in job.stdout, job
    assert "KeyError: 'of a thread'" in job.stderr, job
    assert "ValueError: of the program" in job.stderr, job
    assert "whole job ends" not in job.stderr, job


# ------------------------------------------------------------------------------------------------- on_error="raise"

ENSEMBLE = """
import sys, threading, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms

how, world = sys.argv[1], MPI.COMM_WORLD
member, me = divmod(world.rank, 2)
node_key = world.rank if "nodes" in how else None
if node_key is not None:
    from mpistrategy.mpi.over_mpi import ranks as communicator
    usual = communicator.MpiRanks.__init__
    def on_nodes(self, comm=None, key=None, *arguments, **more):
        usual(self, comm, world.rank if key is None else key, *arguments, **more)
    communicator.MpiRanks.__init__ = on_nodes
strategy = ms.MirroredStrategy(communicator=world.Split(member), on_error="raise")
assert strategy.reduce("SUM", 1.0) == 2


def step(value):
    return ms.get_replica_context().all_reduce("SUM", value)


def train():
    for number in range(5):
        if (member, me, number) == (0, 1, 3):
            if "in a step" in how:
                strategy.run(lambda: {}["of member 0"])
            if "in a thread" in how:
                thread = threading.Thread(target=lambda: {}["of member 0"])
                thread.start()
                thread.join()
            elif "interrupted" in how:
                raise KeyboardInterrupt("of member 0")
            else:
                raise ValueError("of member 0")
        for value in (1.0, np.ones(5), np.ones(300_000), {"a": 1, "b": 2.0}):
            strategy.run(step, args=(value,))


if "caught" in how and member == 0:
    try:
        train()
    except Exception as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
        raise
else:
    train()
print(f"rank {world.rank} is done", flush=True)
"""


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("how", "nodes"), rows(2, ["in the program", "in a step", "interrupted", "caught"], [False, True])
)
def test_a_failure_stays_in_its_communicator(launch: launching.Launch, tmp_path: Path, how: str, nodes: bool) -> None:
    path = launching.program(ENSEMBLE, tmp_path)
    job = launch(4, [path, how + " nodes" * nodes], timeout=60)
    assert job.returncode, job
    assert sorted(re.findall(r"rank (\d) is done", job.stdout)) == ["2", "3"], job
    kind = {"in a step": "KeyError", "interrupted": "KeyboardInterrupt"}.get(how, "ValueError")
    assert f"{kind}: " in job.stderr, job
    assert "[rank 1/4] " + kind + " was not caught." in job.stderr, job
    assert re.search(rf"RemoteError: rank 1 .*{kind}: .*of member 0", job.stderr), job
    assert "whole job ends" not in job.stderr, job


@pytest.mark.one_rank
@pytest.mark.slow
def test_an_exception_in_a_thread_of_the_programs_is_its_own(launch: launching.Launch, tmp_path: Path) -> None:
    path = launching.program(ENSEMBLE, tmp_path)
    job = launch(4, [path, "in a thread"], timeout=60).check()
    assert len(re.findall(r"rank \d is done", job.stdout)) == 4, job
    assert "KeyError: 'of member 0'" in job.stderr, job


LATE = """
import pickle
from mpi4py import MPI
import mpistrategy as ms

world = MPI.COMM_WORLD
member, me = divmod(world.rank, 2)
options = ms.CommunicationOptions(timeout_seconds=2)
strategy = ms.MirroredStrategy(communicator=world.Split(member), on_error="raise", communication_options=options)
assert strategy.reduce("SUM", 1.0) == 2
try:
    if (member, me) != (0, 1):
        strategy.reduce("SUM", 1.0)
    else:
        world.recv(source=0)  # what never comes before the other has given up
        strategy.reduce("SUM", 1.0)
except (ms.errors.RemoteError, ms.errors.ContextError) as error:
    print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
    if isinstance(error, TimeoutError):
        error = pickle.loads(pickle.dumps(error))
        print("missing", error.missing, "call", error.calls[0].call, "left", error.calls[1].left)
        print("waited", error.waited_seconds[0] >= 2, error.waited_seconds[1], flush=True)
    if me == 0:
        world.send(None, 1)
strategy.close()
print(f"rank {world.rank} is done", flush=True)
"""


@pytest.mark.each_mpi
@pytest.mark.one_rank
def test_a_late_collective_raises_and_ends_nothing(launch: launching.Launch, tmp_path: Path) -> None:
    job = launch(4, LATE, timeout=60, cwd=tmp_path).check()
    assert len(re.findall(r"rank \d is done", job.stdout)) == 4, job
    assert re.search(r"rank 0: CollectiveTimeoutError: a collective is late.*not come: rank 1\.", job.stdout), job
    assert re.search(r"rank 1: (CollectiveTimeoutError|RemoteError|ContextError): ", job.stdout), job
    assert re.search(
        r"missing \(1,\) call in #3 Strategy.reduce .*; at \S+:\d+ in <module> left .*at \S+:\d+", job.stdout
    ), job
    assert "waited True 0" in job.stdout, job
    assert "The ranks that wait raise CollectiveTimeoutError." in job.stderr, job
    assert "1 of 2 ranks wait; not come: rank 1" in job.stderr, job


STOPPED = """
import os, signal
from mpi4py import MPI
import mpistrategy as ms

world, strategy = MPI.COMM_WORLD, ms.MirroredStrategy(on_error="raise")
strategy.reduce("SUM", 1.0)
processes = world.allgather(os.getpid())
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    try:
        strategy.reduce("SUM", 1.0)
    except ms.errors.CollectiveTimeoutError as error:
        print("raised", flush=True)
    os.kill(processes[1], signal.SIGCONT)
world.Barrier()
strategy.close()
"""


@pytest.mark.slow  # the roll call waits for the other node, which does not answer, longer than for anything else
@pytest.mark.one_rank
def test_a_late_collective_raises_where_another_node_does_not_answer(launch: launching.Launch, tmp_path: Path) -> None:
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2", "MPISTRATEGY_TIMEOUT_SECONDS": "2"}
    job = launch(2, STOPPED, timeout=60, cwd=tmp_path, env=environment).check()
    assert "raised\n" in job.stdout, job


LEAVES = """
import sys
from mpi4py import MPI
import mpistrategy as ms

world, nodes = MPI.COMM_WORLD, "nodes" in sys.argv
if nodes:
    from mpistrategy.mpi.over_mpi import ranks as communicator
    usual = communicator.MpiRanks.__init__
    def on_nodes(self, comm=None, key=None, *arguments, **more):
        usual(self, comm, world.rank if key is None else key, *arguments, **more)
    communicator.MpiRanks.__init__ = on_nodes


def with_block():
    with ms.MirroredStrategy(on_error=on_error) as strategy:
        strategy.reduce("SUM", 1.0)
        if world.rank == 1:
            raise ValueError("of rank 1")
        strategy.reduce("SUM", 1.0)


def closed():
    strategy = ms.MirroredStrategy(on_error=on_error)
    strategy.reduce("SUM", 1.0)
    try:
        if world.rank == 1:
            raise ValueError("of rank 1")
        strategy.reduce("SUM", 1.0)
    finally:
        strategy.close()


def closed_early():
    strategy = ms.MirroredStrategy(on_error=on_error)
    if world.rank != 1:
        strategy.reduce("SUM", 1.0)
    strategy.close()


for end in (with_block, closed, closed_early):
    for on_error in ("raise", "abort"):
        if on_error == "abort" and (nodes or end is closed_early):
            continue
        try:
            end()
        except (ValueError, ms.errors.RemoteError) as error:
            print(f"{end.__name__} {on_error} {world.rank}: {type(error).__name__}: {error}", flush=True)
        assert world.allgather(world.rank) == list(range(world.size))  # nobody waits elsewhere
"""


UNHEARD = """
import sys
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
from mpistrategy.mpi.over_mpi import ranks as communicator

world = MPI.COMM_WORLD
usual = communicator.MpiRanks.__init__
def on_nodes(self, comm=None, key=None, *arguments, **more):
    usual(self, comm, world.rank if key is None else key, *arguments, **more)
communicator.MpiRanks.__init__ = on_nodes

class Raising(ms.MpiAllReduce):
    def reduce_implementation(self, *arguments):
        result = super().reduce_implementation(*arguments)
        if world.rank == world.size - 1:
            raise ValueError("after the others have their results")
        return result

strategy = ms.MirroredStrategy(on_error="raise")
strategy.extended.cross_device_ops = Raising()
for _ in range(2):
    try:
        strategy.extended.reduce_to("SUM", np.ones(100_000), np.ones(100_000))
    except (ValueError, ms.errors.MpiStrategyError) as error:
        print(f"rank {world.rank}: {type(error).__name__}", flush=True)
    world.Barrier()  # by now the failed rank no longer waits for the others to hear of it
strategy.close()
world.Barrier()
print("closed", flush=True)
"""


COMES_LATE = (
    UNHEARD[: UNHEARD.index("class Raising")]
    + """
strategy = ms.MirroredStrategy(on_error="raise")
if world.rank == 1:
    world.recv()
try:
    strategy.reduce("SUM", np.ones(200_000))
except ms.errors.CollectiveTimeoutError:
    print("late", flush=True)
    world.send(None, 1 - world.rank)
    if world.rank == 0:
        world.recv(source=1)  # which waits for data that nobody sends, unless it has heard of the error
"""
)


@pytest.mark.each_mpi
@pytest.mark.one_rank
def test_a_rank_on_another_node_that_comes_after_the_roll_call_does_not_wait(
    launch: launching.Launch, tmp_path: Path
) -> None:
    environment = {"MPISTRATEGY_TIMEOUT_SECONDS": "2"}
    job = launch(2, [launching.program(COMES_LATE, tmp_path)], timeout=60, env=environment)
    assert "late" in job.stdout, job
    if job.stdout.count("late") == 1:
        assert job.returncode not in (0, None), job
        assert re.search(r"\[rank 1/2\] waits in vain", job.stderr), job


@pytest.mark.each_mpi
@pytest.mark.one_rank
def test_ranks_on_other_nodes_that_hear_late_can_close(launch: launching.Launch, tmp_path: Path) -> None:
    job = launch(3, [launching.program(UNHEARD, tmp_path)], timeout=60).check()
    assert sorted(set(job.stdout.split("\n"))) == [
        "", "closed", "rank 0: RemoteError", "rank 1: RemoteError", "rank 2: ContextError", "rank 2: ValueError",
    ], job  # fmt: skip


@pytest.mark.each_mpi
@pytest.mark.one_rank
@pytest.mark.parametrize("nodes", [False, True])
def test_a_rank_that_leaves_tells_the_others(launch: launching.Launch, tmp_path: Path, nodes: bool) -> None:
    """By an error that leaves the with block, and by close(); then all meet in a call of the program's own."""
    job = launch(3, [launching.program(LEAVES, tmp_path), *["nodes"] * nodes], timeout=60).check()
    for end, where in (("with_block", "its with block"), ("closed", "Strategy.close")):
        for on_error in ("raise",) if nodes else ("raise", "abort"):
            assert f"{end} {on_error} 1: ValueError: of rank 1" in job.stdout, job
            for rank in (0, 2):
                told = f"{end} {on_error} {rank}: RemoteError: rank 1 failed in {where}: ValueError: of rank 1."
                assert told in job.stdout, job
    for rank in (0, 2):
        told = f"closed_early raise {rank}: RemoteError: rank 1 has ended: it has closed the strategy."
        assert told in job.stdout, job
    assert "closed_early raise 1" not in job.stdout, job


FIRST = """
import sys, threading, time
from mpi4py import MPI
import mpistrategy as ms


def fails(*given, **more):
    raise RuntimeError("can't start new thread") if "thread" in how else MemoryError("no more")


how = sys.argv[1]
if MPI.COMM_WORLD.rank == 1:
    if "thread" in how:
        threading.Thread.start = fails
    else:
        from mpistrategy.mpi.over_mpi import ranks as communicator
        communicator.share = fails
try:
    ms.MirroredStrategy(on_error="raise" if "raise" in how else "abort")
except (RuntimeError, MemoryError):
    if "caught" in how:
        time.sleep(60)  # goes on with its program
    raise
"""


@pytest.mark.each_mpi
@pytest.mark.one_rank
@pytest.mark.parametrize("how", ["thread", "thread caught", "memory raise"])
def test_a_rank_that_fails_inside_its_first_strategy_ends_the_job(
    launch: launching.Launch, tmp_path: Path, how: str
) -> None:
    job = launch(3, [launching.program(FIRST, tmp_path), how], timeout=50)
    assert job.returncode == 1, job
    said = "MemoryError: no more" if "memory" in how else "RuntimeError: can't start new thread"
    assert f"[rank 1/3] {said}" in job.stderr, job
    assert "the whole job ends here" in job.stderr, job


@several
def test_raised_and_caught_another_strategy_goes_on() -> None:
    with ms.MirroredStrategy(on_error="raise") as strategy:
        ends = outcomes(lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", "a" if RANK == 0 else 1.0)))
        assert all(end.error is not None for end in ends)
        assert still_works(strategy)
        assert strategy.extended.communicator.guard.contains_errors


@several
def test_the_choice_is_checked_and_compared() -> None:
    for wrong in ("stop", None, 3):
        value: Any = wrong
        with pytest.raises(ms.errors.OptionError, match='expected "abort" or "raise"'):
            ms.MirroredStrategy(on_error=value)
    with pytest.raises(ms.errors.OptionError, match='on_error="raise" with check='):
        ms.MirroredStrategy(on_error="raise", check="off")
    with pytest.raises(ms.errors.CollectiveMismatchError, match="on_error="):
        ms.MirroredStrategy(on_error="raise" if RANK else "abort")


# ------------------------------------------------------------------------------------------------- reports


@pytest.mark.each_mpi
@pytest.mark.one_rank
def test_a_long_report_is_read_before_the_job_ends(launch: launching.Launch) -> None:
    """MPI_Abort kills what forwards it: a report larger than a pipe comes out whole."""
    source = """
        import mpistrategy as ms
        strategy = ms.MirroredStrategy()
        if strategy.replica_id_in_sync_group:
            raise ValueError("\\n".join(f"line {number} of the report" for number in range(5000)))
        strategy.barrier()
    """
    job = launch(2, source, timeout=60)
    assert job.returncode == 1, job
    assert "[rank 1/2] line 4999 of the report" in job.stderr
    assert "[rank 1/2] ValueError was not caught" in job.stderr
