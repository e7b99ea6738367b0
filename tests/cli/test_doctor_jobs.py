"""The doctor in real jobs with real faults; and from outside, in jobs that hang."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from mpi4py import MPI
from secrets_planted import PLANTED

import mpistrategy
from mpistrategy.cli import main
from mpistrategy.cli.doctor import node_view
from mpistrategy.cli.doctor.last_calls import NodeCalls
from mpistrategy.cli.doctor.node_view import View
from mpistrategy.cli.doctor.running_job import hangs, lines
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.watchdog.status_board import BYTES, ROW, RankStatus, StatusBoard

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


@pytest.mark.slow
def test_several_faults_at_once_and_no_secret(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "ompi.4194305").mkdir()
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "16")
    faults = {
        "MPI4PY_RC_THREAD_LEVEL": "single",
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(PACKAGE.parent),
    }
    job = launch(2, [*DOCTOR, "--json", "--ranks", "3"], env={**PLANTED, **threads, **faults}, cwd=tmp_path)
    told = findings(job)
    assert job.returncode == 1, job
    assert "2 ranks where 3 were asked for" in told["launch"][0]["found"]
    assert told["thread level"][0]["verdict"] == "bad"
    assert "OMP_NUM_THREADS=16" in told["cores"][0]["found"]
    assert told["cores"][0]["fix"].startswith("export OMP_NUM_THREADS=")
    output = job.stdout + job.stderr
    assert [name for name, value in PLANTED.items() if value in output] == [], job


@pytest.mark.slow
def test_unequal_versions(launch: Launch, tmp_path: Path) -> None:
    copied = tmp_path / "old" / "mpistrategy"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    front = copied / "__init__.py"
    front.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.9"', front.read_text()))
    job = launch(
        2,
        f"""
        import os, sys
        {MY_RANK}
        if rank == 1:
            os.environ["PYTHONPATH"] = {str(copied.parent)!r}
        os.execv(sys.executable, [sys.executable, "-m", "mpistrategy", "doctor"])
        """,
        env={"PYTHONPATH": str(PACKAGE.parent)},
        cwd=tmp_path,
    )
    assert job.returncode == 1, job
    assert re.search(
        r"BAD +versions +different versions of mpistrategy: \S+ on rank 0; 0\.0\.9 on rank 1.*\n +-> Give all",
        job.stdout,
    )
    assert "not tried: the ranks run different versions, or started MPI differently" in job.stdout, job


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
        from gpu_doubles import seen
        from mpistrategy.cli import main as cli
        if rank == 1:
            with open({str(tmp_path / "libmpi.so.99")!r}, "rb") as file:
                held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with seen("GPU-1"):
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
    [("import mpi4py.MPI, signal; signal.pause()", 15), ("import time; time.sleep(60)", 1)],
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
        assert re.search(r"no answer from rank 2 of 3 within \d+ s", job.stdout), job  # what the start has left of it
    else:
        told = re.search(r"mpistrategy doctor: waited 1 s .* in MPI_Init, to which all 3 ranks must come", job.stderr)
        assert told or "no answer from rank 2 of 3" in job.stdout, job


@pytest.mark.skipif(
    bool(os.geteuid())
    or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="not run: needs root and mount namespaces",
)
@one_rank
def test_a_tiny_shm() -> None:
    """What the ranks share has no place in /dev/shm, whose size is that of a container by default."""
    command = [*launching._mpiexec(), "-n", "2", sys.executable, *DOCTOR]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=3m tmpfs /dev/shm && exec "$@"', "sh", *command],
        env=launching.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "add up right" in done.stdout, done
    assert "Warning" not in done.stderr, done
    if launching.IS_OPEN_MPI:  # whose own messages lie there
        assert done.returncode == 1, done
        assert re.search(r"BAD +shared memory +3\.0 MiB are free in /dev/shm .* wants 16 MiB", done.stdout), done
    else:
        assert done.returncode == 0, done
        assert re.search(
            r"ok +shared memory +[\d.]+ [GM]iB are free \(.+ [GM]iB\) on \S+; the strategies of 2 ranks share",
            done.stdout,
        ), done


@one_rank
@pytest.mark.parametrize("place", [0, 1])
def test_programs_of_one_rank_each(place: int) -> None:
    """As the mpiexec of the other MPI starts them."""
    size, rank = ("PMI_SIZE", "PMI_RANK") if launching.IS_OPEN_MPI else ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    done = subprocess.run(
        [sys.executable, *DOCTOR],
        env=launching.environment() | {size: "2", rank: str(place)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if place:
        assert (done.returncode, done.stdout) == (0, ""), done
    else:
        assert done.returncode == 1, done
        assert "BAD   launch    2 programs of one rank each, not one job" in done.stdout, done
        assert "Launcher and library are of two MPIs" in done.stdout, done


@one_rank
def test_no_mpi_library() -> None:
    done = subprocess.run(
        [sys.executable, *DOCTOR],
        env=launching.environment() | {"MPI4PY_LIBMPI": "/opt/none/libmpi.so.12"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 0:
        pytest.skip("this mpi4py is built for one MPI and takes no other")
    assert done.returncode == 1, done
    assert "BAD   mpi  no MPI library" in done.stdout, done
    assert "MPI4PY_LIBMPI=/opt/none/libmpi.so.12: is it there" in done.stdout, done


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


def test_what_one_node_shows_is_not_said_of_the_job() -> None:
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


def test_a_status_board_is_found_in_a_copy_of_the_memory() -> None:
    def board_in(block: bytes) -> StatusBoard | None:
        return node_view.board_in(lambda start: block[start : start + ROW.itemsize], len(block))

    for ranks in (1, 2, 3, 4):
        for pages in (13, 517):
            block = np.zeros(ranks * pages * 4096, np.uint8)
            segments = tuple(block[rank * pages * 4096 :][:BYTES] for rank in range(ranks))
            for rank in range(ranks):
                mine = StatusBoard(SharedMemory(segments, rank))
                mine.introduce(5, 7)
                mine.write(RankStatus(10 + rank, 100 + rank, 3, time.monotonic(), 1.5, 600.0, f"in #7 on {rank}"))
            board = board_in(block.tobytes())
            assert board is not None
            assert [(each.rank, each.text) for each in board.read()] == [
                (10 + r, f"in #7 on {r}") for r in range(ranks)
            ]
    assert board_in(bytes(8192)) is board_in(bytes(10**6)) is None
