"""An error on one rank in the middle of a call, caught or not, ends the job or reaches the others; nobody waits."""

from __future__ import annotations

import re
from pathlib import Path

import launching
import pytest
from declared import IN_STEPS

pytestmark = pytest.mark.mpi

ONE_RANK_LEAVES = """
import sys, numpy as np, mpistrategy as ms
strategy = ms.MirroredStrategy(on_error="raise")
rank = strategy.replica_id_in_sync_group
large = np.ones(300_000)

def no_memory(*_):
    raise MemoryError("there is none")

def step():
    return ms.get_replica_context().all_reduce("SUM", large)

for _ in range(3):
    strategy.run(step)
if rank == 1:
    strategy.extended.communicator.node_sum.run = no_memory
try:
    strategy.run(step)
except (MemoryError, ms.errors.RemoteError) as error:
    print(f"rank {rank}: {type(error).__name__}", flush=True)
    {after}
"""


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("after", "status"),
    [("pass", 0), ("strategy.close()", 0), ("raise", 1)],
    ids=["caught", "closed", "uncaught"],
)
def test_a_job_whose_strategy_has_failed_ends(launch: launching.Launch, after: str, status: int | None) -> None:
    job = launch(3, ONE_RANK_LEAVES.replace("{after}", after), timeout=40)
    assert job.returncode == status
    assert "rank 1: MemoryError" in job.stdout
    if after in ("pass", "strategy.close()"):
        assert "rank 0: RemoteError" in job.stdout
        assert "rank 2: RemoteError" in job.stdout
        assert job.stderr == ""


SIGNALLED = """
import signal, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms


def too_long(number, frame):
    raise TimeoutError("of the program")


def wait_too_long(what):
    strategy = ms.MirroredStrategy(on_error="raise")
    rank = strategy.replica_id_in_sync_group
    with strategy.scope():
        variable = ms.Variable(np.zeros(3), aggregation="SUM")
    arena = strategy.arena([np.ones(300_000)])
    value = {"number": 1.0, "array": np.ones(4), "large": np.ones(200_000), "arena": arena}.get(what)

    def step():
        if what == "assign":
            return variable.assign(np.ones(3))
        return ms.get_replica_context().all_reduce("SUM", value)

    for _ in range(3):
        strategy.run(step)
    began = time.monotonic()
    try:
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        else:
            time.sleep(1)
        for _ in range(2):  # a small array has come with what rank 0 has shown: its failure is found in the next call
            strategy.run(step)
    except Exception as error:
        is_soon = time.monotonic() - began < 5
        print(f"rank {rank}: {what}: {type(error).__name__}: {error} {is_soon}", flush=True)
    MPI.COMM_WORLD.Barrier()
    strategy.close()


signal.signal(signal.SIGALRM, too_long)
for what in ("number", "array", "large", "arena", "assign"):
    wait_too_long(what)
"""


@pytest.mark.each_mpi
@pytest.mark.one_rank
@pytest.mark.slow
def test_a_signal_that_raises_while_a_rank_waits_for_the_others(launch: launching.Launch) -> None:
    """It has shown its call already; the peers must not take that for an agreement."""
    job = launch(2, SIGNALLED, timeout=60).check()
    for what in ("number", "array", "large", "arena", "assign"):
        assert f"rank 0: {what}: TimeoutError: of the program True" in job.stdout, job
        call = "Variable.assign" if what == "assign" else "ReplicaContext.all_reduce"
        assert f"rank 1: {what}: RemoteError: rank 0 failed in {call}: TimeoutError: of the program" in job.stdout, job
    assert job.stdout.count(" True") == 10, job


LEFT_BETWEEN_REPORTS = """
import numpy as np
from mpi4py import MPI
import mpistrategy as ms

strategy = ms.MirroredStrategy(on_error="raise")
rank = strategy.replica_id_in_sync_group
mailboxes = strategy.extended.communicator.mailboxes
compare, gather = type(mailboxes).all_equal, mailboxes.allgather_text
all_send_reports = MPI.COMM_WORLD.Dup()


def interrupted(*_):
    all_send_reports.Barrier()
    raise KeyboardInterrupt("Ctrl-C")


def gather_with_all(*arguments):
    all_send_reports.Barrier()
    return gather(*arguments)


if rank == 2:
    mailboxes.all_equal = interrupted
mailboxes.allgather_text = gather_with_all
try:
    strategy.reduce("MAX" if rank else "SUM", np.ones(5))
except (KeyboardInterrupt, ms.errors.RemoteError) as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.each_mpi
@pytest.mark.one_rank
@pytest.mark.slow
def test_a_rank_that_leaves_while_the_others_send_their_reports(launch: launching.Launch) -> None:
    """Ranks 0 and 1 know that their calls differ, and wait for the report of rank 2, which takes no more calls."""
    job = launch(3, LEFT_BETWEEN_REPORTS, timeout=60).check()
    assert job.stdout.count(": RemoteError: rank 2 failed in Strategy.reduce: KeyboardInterrupt: Ctrl-C") == 2, job
    assert "rank 2: KeyboardInterrupt" in job.stdout, job


FAILS_AFTER_THE_AGREEMENT = """
import sys
from functools import partial
import numpy as np
import mpistrategy as ms
sys.path[:0] = {helpers}
import declared

LARGE = np.ones(300_000)
CALLS = {
    **{method: partial(declared.called, method, value=LARGE) for method in declared.IN_STEPS},
    "float16": lambda: strategy.reduce("MEAN", np.ones(300_000, np.float16)),
    "broadcast": lambda: strategy.broadcast(np.ones(3)),
    "arena": lambda: strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", arena)),
    "barrier": lambda: strategy.barrier("here"),
    "reduce": lambda: strategy.reduce("SUM", 1.0),
    "gather": lambda: strategy.gather(np.ones(3), 0),
    "reduce_to": lambda: strategy.extended.reduce_to("SUM", LARGE, "task:0"),
    "broadcast_to": lambda: strategy.extended.broadcast_to(LARGE, "task:0"),
    "scatter": lambda: strategy.run(lambda: variable.scatter_add(ms.IndexedSlices(np.ones(1), np.array([2])))),
    "apply": lambda: strategy.run(lambda: sgd.apply_gradients([(LARGE, variable)])),
    "assign": lambda: strategy.run(lambda: variable.assign(LARGE)),
}
error, how, *kinds = sys.argv[1:]
error = {"MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt}[error]
is_armed = False


def trace(frame, what, _):
    return local if "/mpistrategy/" in frame.f_code.co_filename else None


def local(frame, what, _):
    global is_armed
    if is_armed and what == "line":
        is_armed = False
        sys.settrace(None)
        raise error("planted")
    if what == "return" and frame.f_code.co_name in ("_agrees", "compare"):
        is_armed = True
    return local


for kind in kinds:
    with ms.MirroredStrategy(on_error=how) as strategy:
        arena = strategy.arena([LARGE])
        variable = ms.Variable(np.zeros(300_000), aggregation="SUM")
        sgd = ms.optimizers.SGD(0.1)
        call = partial(strategy.run, CALLS[kind]) if kind in declared.IN_STEPS else CALLS[kind]
        for _ in range(3):
            call()
        sys.settrace(trace if strategy.rank == 1 else None)
        for _ in range(2):
            try:
                call()
            except (error, ms.errors.RemoteError, ms.errors.ContextError) as caught:  # as a loop that skips a batch
                print(f"rank {strategy.rank}: {kind}: {type(caught).__name__}: {caught}", flush=True)
        sys.settrace(None)
        print(f"rank {strategy.rank} goes on", flush=True)
"""


@pytest.mark.one_rank
@pytest.mark.parametrize(("what", "nodes"), [("float16", 1), ("arena", 1), ("all_gather", 2)])
def test_an_error_after_the_agreement_ends_the_job_though_the_program_catches_it(
    launch: launching.Launch, tmp_path: Path, what: str, nodes: int
) -> None:
    """Where errors are contained, the next test has all calls."""
    program = launching.program(FAILS_AFTER_THE_AGREEMENT.replace("{helpers}", repr(launching.HELPERS)), tmp_path)
    nodes_of = {"MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    job = launch(2, [program, "MemoryError", "abort", what], timeout=60, env=nodes_of)
    assert job.returncode
    assert "goes on" not in job.stdout, job
    assert "[rank 1/2] MemoryError: planted" in job.stderr, job
    assert "the whole job ends here" in job.stderr, job


@pytest.mark.one_rank
@pytest.mark.slow
@pytest.mark.parametrize("error", ["MemoryError", "KeyboardInterrupt"])
def test_a_contained_error_after_the_agreement_reaches_the_others_in_their_next_call_at_the_latest(
    launch: launching.Launch, tmp_path: Path, error: str
) -> None:
    kinds = [*IN_STEPS, "float16", "broadcast", "arena", "barrier", "assign"]
    kinds += ["reduce", "gather", "reduce_to", "broadcast_to", "scatter", "apply"]
    kinds = kinds[error == "MemoryError" :: 2]  # a call of each kind fails in one of the two ways
    program = launching.program(FAILS_AFTER_THE_AGREEMENT.replace("{helpers}", repr(launching.HELPERS)), tmp_path)
    job = launch(2, [program, error, "raise", *kinds], timeout=100).check()
    for kind in kinds:
        assert f"rank 1: {kind}: {error}: planted" in job.stdout, job
        assert f"rank 0: {kind}: RemoteError: rank 1 failed in " in job.stdout, job


INTERRUPTED_AT_A_LINE = """
import linecache, sys
import numpy as np
import mpistrategy as ms

kind, line, error = sys.argv[1:]


def trace(frame, what, _):
    return local if "/mpistrategy/" in frame.f_code.co_filename else None


def local(frame, what, _):
    if what == "line" and line in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        sys.settrace(None)
        raise {"KeyboardInterrupt": KeyboardInterrupt, "MemoryError": MemoryError}[error]("planted")
    return local


with ms.MirroredStrategy(on_error="raise") as strategy:
    variable = ms.Variable(np.zeros(50_000), aggregation="SUM")
    ones = np.ones(50_000)
    call = {
        "all_gather": lambda: strategy.run(lambda: ms.get_replica_context().all_gather(ones, 0)),
        "assign": lambda: strategy.run(lambda: variable.assign(ones)),
        "variable": lambda: ms.Variable(ones),
    }[kind]
    call()
    sys.settrace(trace if strategy.rank == 1 else None)
    for _ in range(2):
        try:
            call()
        except (KeyboardInterrupt, MemoryError, ms.errors.RemoteError, ms.errors.ContextError) as caught:
            print(f"rank {strategy.rank}: {type(caught).__name__}: {caught}", flush=True)
"""


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("kind", "line", "error", "nodes"),
    [
        # the other rank is in this call of MPI
        ("all_gather", "self._comm.Iallgather, MPI.IN_PLACE", "KeyboardInterrupt", 1),
        # it waits for the message that was not started
        ("all_gather", "self._request.Start()", "KeyboardInterrupt", 2),
        # it has written the sum
        ("assign", "DENSE[self.method](storage, change)", "KeyboardInterrupt", 1),
        # the other rank is in MPI's broadcast on another node, and cannot leave it
        ("variable", "communicator.bcast(", "MemoryError", 2),
    ],
)
def test_no_rank_waits_for_one_that_was_interrupted(
    launch: launching.Launch, tmp_path: Path, kind: str, line: str, error: str, nodes: int
) -> None:
    if nodes > 1 and not launching.LIBRARY.startswith("MPICH"):
        pytest.skip("only MPICH pretends to run on several nodes")
    program = launching.program(INTERRUPTED_AT_A_LINE, tmp_path)
    words = [program, kind, line, error]
    job = launch(2, words, timeout=40, env={"MPIR_CVAR_NUM_CLIQUES": str(nodes)})
    assert f"rank 1: {error}: planted" in job.stdout, job
    if "bcast" in line:
        assert job.returncode == 1, job
        assert re.search(rf"waits in vain: rank 1 failed in .*: {error}: planted", job.stderr), job
    else:
        assert job.returncode == 0, job
        assert "rank 0: RemoteError: rank 1 failed in " in job.stdout, job
