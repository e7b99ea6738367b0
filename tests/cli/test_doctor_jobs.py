"""The doctor in real jobs with real faults; and from outside, in jobs that hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import launching
import pytest
from mpi4py import MPI

import mpistrategy
from mpistrategy.cli import main
from mpistrategy.cli.doctor.last_calls import NodeCalls
from mpistrategy.cli.doctor.node_view import View
from mpistrategy.cli.doctor.running_job import hangs, lines
from mpistrategy.mpi.watchdog.status_board import RankStatus

Launch = Callable[..., launching.Finished]
DOCTOR = ["-m", "mpistrategy", "doctor"]
PACKAGE = Path(mpistrategy.__file__).parent
one_rank = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts processes: runs in the session on 1 rank")

MY_RANK = 'rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)'


def findings(job: launching.Finished) -> dict[str, list[dict[str, Any]]]:
    """Return what the doctor said as JSON, by check."""
    told: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(job.stdout)["findings"]:
        told.setdefault(each["check"], []).append(each)
    return told


@pytest.mark.each_mpi
def test_a_job_that_is_well(launch: Launch) -> None:
    job = launch(2, DOCTOR)
    assert job.returncode == 0, job
    assert job.stdout.splitlines()[0] == "mpistrategy doctor: 2 ranks on 1 node", job
    assert job.stdout.count("mpistrategy doctor:") == 1, job
    assert re.search(r"^ok +sums +2 ranks meet and add up right$", job.stdout, re.M), job
    assert re.search(r"^ok +gpus +none|gpus ", job.stdout, re.M), job
    assert "BAD" not in job.stdout, job
    assert job.stderr == "", job


CUPY = """
import numpy as np
from types import SimpleNamespace


class ndarray(np.ndarray):
    def set(self, other): self[...] = other
    def get(self, out): out[...] = self


asarray = lambda a: np.array(a).view(ndarray)
zeros_like = np.zeros_like
asnumpy = lambda a: np.asarray(a) + (a.size > 2**20)
stream = SimpleNamespace(synchronize=lambda: None)
cuda = SimpleNamespace(
    Device=lambda n: SimpleNamespace(use=lambda: None), get_current_stream=lambda: stream,
    runtime=SimpleNamespace(getDeviceCount=lambda: 1),
)
"""


@pytest.mark.slow
def test_gpus_that_are_shared_an_mpi_that_takes_their_memory_and_two_mpis(launch: Launch, tmp_path: Path) -> None:
    """The word of the user says that MPI takes GPU memory; two ranks try it, with a CuPy that errs."""
    (tmp_path / "cupy.py").write_text(CUPY)
    (tmp_path / "cupyx.py").write_text("from numpy import empty as empty_pinned")
    (tmp_path / "libmpi.so.99").write_bytes(bytes(4096))
    source = f"""
        import mmap, os, sys
        {MY_RANK}
        sys.path[:0] = {launching.HELPERS!r}
        from gpu_here import visible
        from mpistrategy.cli import main as cli
        if rank == 1:
            with open({str(tmp_path / "libmpi.so.99")!r}, "rb") as file:
                held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with visible("GPU-1"):
            raise SystemExit(cli.main(["doctor", "--json"]))
        """
    path = os.pathsep.join((str(tmp_path), str(PACKAGE.parent)))
    job = launch(2, source, env={"PYTHONPATH": path, "MPISTRATEGY_CUDA_AWARE": "1", "XDG_CACHE_HOME": str(tmp_path)})
    told = findings(job)
    assert job.returncode == 1, job
    assert "ranks 0, 1" in told["gpus"][0]["found"]
    assert told["gpus"][0]["verdict"] == told["cuda-aware"][0]["verdict"] == told["mpi"][0]["verdict"] == "bad"
    assert "came back wrong" in told["cuda-aware"][0]["found"], job
    assert "gives GPU memory to MPI. If this ends here: export MPISTRATEGY_CUDA_AWARE=0" in job.stderr, job
    assert told["cuda-aware"][0]["fix"].startswith("export MPISTRATEGY_CUDA_AWARE=0")
    [kept] = (tmp_path / "mpistrategy").glob("*-gpu*")
    assert json.loads(kept.read_text())["outcome"] == "wrong"
    assert "libmpi.so.99" in told["mpi"][0]["found"]
    assert told["mpi"][0]["ranks"] == [1]


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("stuck", "seconds"),
    [("import mpi4py.MPI, signal; signal.pause()", 10), ("import time; time.sleep(60)", 1)],
    ids=["later", "before MPI"],
)
def test_a_rank_that_does_not_come_is_named_or_the_doctor_ends_all_the_same(
    launch: Launch, stuck: str, seconds: int
) -> None:
    job = launch(
        3,
        f"""
        import os, sys
        {MY_RANK}
        if rank == 2:
            {stuck}
        from mpistrategy.cli import main as cli
        sys.exit(cli.main(["doctor", "--timeout", "{seconds}"]))
        """,
        timeout=60,
    )
    assert job.returncode != 0, job
    assert job.seconds < 40, job
    if "MPI" in stuck:
        # Of a busy machine, the start leaves little of the time, and another rank is late, too.
        assert re.search(r"no answer from ranks? (1, )?2 of 3 within \d+ s", job.stdout), job
    else:
        told = re.search(r"mpistrategy doctor: waited 1 s .* in MPI_Init, to which all 3 ranks must come", job.stderr)
        assert told or "2 of 3 within" in job.stdout, job


# ------------------------------------------------------------------------------------------------ a job that hangs


HANGING = """
import os, signal, sys
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()


def step():
    return ms.get_replica_context().all_reduce("SUM", np.ones(3))


def shuffle():
    open("stuck", "w").write(str(os.getpid()))
    signal.pause()


for _ in range(5):
    strategy.run(step)
if strategy.replica_id_in_sync_group == 1:
    shuffle()
strategy.run(step)
"""


@one_rank
@pytest.mark.slow
def test_a_job_that_hangs_is_read_from_outside(tmp_path: Path) -> None:
    program = launching.program(HANGING, tmp_path)
    command = [*launching._mpiexec(), "-n", "3", sys.executable, "-m", "mpistrategy", "run", str(program)]
    environment = launching.environment() | {"MPISTRATEGY_TIMEOUT_SECONDS": "20"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as job:
        try:
            done = _ask_until_it_hangs(tmp_path)
        finally:
            stuck = tmp_path / "stuck"
            if stuck.exists():
                os.kill(int(stuck.read_text()), signal.SIGKILL)  # its launcher ends the others
            job.terminate()
            job.wait(20)
    if "cannot be read" in done.stderr:
        pytest.skip(f"not run: {done.stderr}")
    assert done.returncode == 1, done
    assert re.search(r"rank 1 +in no collective: at \S+ in shuffle; its last was #\d+ Rep", done.stdout), done
    assert len(re.findall(r"rank [02] +in #\d+ ReplicaContext.all_reduce SUM float64\[3\]", done.stdout)) == 2
    assert "2 of 3 ranks wait; not come: rank 1." in done.stdout, done
    assert f"kill -QUIT {stuck.read_text()}" in done.stdout, done
    assert re.search(r"ends by itself, with a roll call, \d+ s from now \(timeout 20 s\)", done.stdout), done


def _ask_until_it_hangs(folder: Path) -> subprocess.CompletedProcess[str]:
    end = time.monotonic() + 40
    while True:
        stuck = folder / "stuck"
        if stuck.exists() and stuck.read_text():
            done = subprocess.run(
                [sys.executable, *DOCTOR, "--pid", stuck.read_text()],
                env=launching.environment(),
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            if done.returncode == 1 or "cannot be read" in done.stderr or time.monotonic() > end:
                return done
        assert time.monotonic() < end, "the job does not start"
        time.sleep(0.2)


def seen(rank: int, age: float = 1.0, **others: Any) -> RankStatus:
    told = {"process": 70, "signal": 0, "waited": 30.0, "limit": 600.0, "text": f"in #7 at x.py:{rank}", **others}
    return RankStatus(rank, beat=time.monotonic() - age, **told)


def told(ranks: list[RankStatus], job: str = "") -> list[str]:
    """Return what the doctor prints of a job whose title is "job 17"."""
    return lines("job 17", View(ranks), job)


def test_the_report_of_a_hung_job() -> None:
    stuck = seen(1, waited=0.0, text="in no collective: at data.py:3", process=71, signal=3, host="node2")
    ranks = [seen(0, host="node1"), stuck, seen(2, host="node2")]
    shown = told(ranks, job="17")
    assert shown[0] == "job 17: 3 ranks heard of, in the memory that its ranks share on 2 nodes"
    assert shown[2] == "  rank 1    in no collective: at data.py:3"
    assert shown[4:6] == ["2 of 3 ranks wait; not come: rank 1.", shown[5]]
    assert shown[6] == "     srun --jobid=17 --overlap --nodes=1 --ntasks=1 -w node2 kill -QUIT 71"
    assert re.search(r" 56[89] s from now", shown[7])
    assert told(ranks)[6] == "     ssh node2 kill -QUIT 71"
    assert told([replace(each, host=os.uname().nodename) for each in ranks])[6] == "     kill -QUIT 71"
    assert hangs(ranks)
    assert not hangs([seen(0, waited=0.2, age=0.5), seen(1, waited=0.0)])
    assert "All 2 ranks wait" in "\n".join(told([seen(0), seen(1)]))
    silent = told([seen(0), seen(1, silent="its process 7 is stopped (SIGSTOP, SIGTSTP)")])
    assert "does not answer" in silent[2]
    assert "is stopped" in silent[2]
    assert silent[3] == "1 of 2 ranks wait; no answer: rank 1."
    shown = lines("the job", View([seen(0), seen(2)], [NodeCalls(7, 3, 2, {})]))
    assert shown[5] == "Of these ranks alone: 1 rank of the job are on nodes that were not looked at."


@one_rank
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--job", "999999"], "job 999999: not seen: squeue"),
        (["--job", "999999"], "if it has ended because a collective was late, its roll call is "),
        (["--pid", "1"], "the job of process 1: not seen: its processes here have no strategy"),
    ],
)
def test_jobs_of_which_nothing_is_known(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", *arguments]) == 2
    assert told in capsys.readouterr().err
