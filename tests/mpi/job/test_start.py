"""The start of MPI: a rank that waits there for one that does not come says so, and ends the job."""

from __future__ import annotations

import re

import launching
import pytest

pytestmark = [pytest.mark.each_mpi, pytest.mark.one_rank]

ABSENT = """
import os, signal, sys
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
if rank == 1:
    {absent}
{start}
"""
STARTS = {
    "MirroredStrategy": "import mpistrategy as ms\nms.MirroredStrategy()",
    "mpistrategy run": "from mpistrategy.cli import main\nsys.exit(main.main(['run', '-c', 'pass']))",
}


@pytest.mark.parametrize(
    ("where", "absent", "nodes"),
    [
        ("MirroredStrategy", "signal.pause()", 1),
        ("mpistrategy run", "os.kill(os.getpid(), signal.SIGSTOP)", 2),
    ],
)
def test_who_waits_for_a_rank_that_does_not_come_ends_the_job_in_words(
    launch: launching.Launch, where: str, absent: str, nodes: int
) -> None:
    env = {"MPISTRATEGY_TIMEOUT_SECONDS": "2", "MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    job = launch(3, ABSENT.format(absent=absent, start=STARTS[where]), env=env, timeout=20)
    assert job.returncode != 0, job
    words = rf"\[rank (\d)/3\] {where}: waited 2 s \(MPI\w+\) in MPI_Init, to which all 3 ranks must come\. "
    assert re.findall(words, job.stderr) == ["0"], job
    assert re.search(r'File "\S+program_\w+\.py", line \d+ in <module>', job.stderr), job


IN_TIME = """
import time
import mpistrategy as ms
strategy = ms.MirroredStrategy()
time.sleep(7)
strategy.barrier()
"""


@pytest.mark.slow
def test_a_job_whose_ranks_all_come_goes_on_after_that_time(launch: launching.Launch) -> None:
    job = launch(2, IN_TIME, env={"MPISTRATEGY_TIMEOUT_SECONDS": "6"}, timeout=40).check()
    assert job.stderr.strip() == "", job
