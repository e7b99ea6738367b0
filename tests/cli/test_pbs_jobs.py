"""Job scripts for PBS, run by a shell with a stand-in: the variables of PBS, and commands that note their arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import launching
import pytest
from slurm_scripts import executable, script

pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.slow,
    pytest.mark.skipif(
        not launching.LIBRARY.startswith(("Open MPI", "MPICH")), reason="not run: tried with MPICH and Open MPI only"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("example.py", "--steps", "40", "--pause", "0.1", "--save-every", "10")


def pbs_job(tmp_path: Path, template: str, **statement: Any) -> tuple[int, str]:
    """Run a script as PBS would, on this machine as two nodes of one rank; return its status and what it wrote."""
    for name in ("qsub", "qdel", "qrerun"):
        executable(tmp_path / name, f'echo "{name} $*" >>{tmp_path}/told\necho 8.server')
    executable(tmp_path / "qstat", "echo '    run_count = 3'")
    (tmp_path / "told").touch()
    shutil.copy(ROOT / "slurm" / "example.py", tmp_path)
    (tmp_path / "nodes").write_text("localhost\n")
    kind = "openmpi" if launching.IS_OPEN_MPI else "mpich"
    whole = {"site": "pbs", "mpiexec": kind, "nodes": 1, "tasks_per_node": 2, **statement}
    text = (
        script(template, whole)
        .replace(":PE=$cpus_per_task", "")
        .replace('-bind-to core:"$cpus_per_task"', "-bind-to none")
    )
    (tmp_path / "job").write_text(text.replace("--bind-to core", "--bind-to none"))  # the tests share the machine
    environment = launching.environment() | {
        "PATH": os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT), "PBS_JOBID": "7.server", "PBS_O_WORKDIR": str(tmp_path), "PBS_ARRAY_INDEX": "2",
        "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBNAME": "mpistrategy", "PBS_ARRAY_ID": "7[].server",
    }  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            ["bash", str(tmp_path / "job")], cwd="/", env=environment, stdout=log, stderr=log, check=False, timeout=100
        )
    return done.returncode, (tmp_path / "log").read_text()


@pytest.mark.parametrize("template", [pytest.param("multi_node", marks=pytest.mark.each_mpi), "array", "chain"])
def test_a_job_under_pbs(tmp_path: Path, template: str) -> None:
    status, written = pbs_job(tmp_path, template, arguments=["--steps", "10"])
    assert (status, "example.py on 2 ranks: made all 10 steps" in written) == (0, True), written
    if template == "chain":
        submitted, taken_back = (tmp_path / "told").read_text().splitlines()
        assert submitted.startswith("qsub -W depend=afterany:7.server -v CHAIN_LINK=2,CHAIN_BEFORE=7.server ")
        assert taken_back == "qdel 8.server"
        assert "the program is done; the chain ends here" in written
    else:
        assert "job 7.server: the program ended with status 0" in written


@pytest.mark.each_mpi
def test_a_job_under_pbs_is_told_before_its_time_is_up(tmp_path: Path) -> None:
    """By its own clock, since PBS sends no signal; then it goes on, and is done."""
    slow = {"arguments": [*STEPS[1:], "--steps", "600"], "time": "0:01:00", "signal_lead": 55}
    status, written = pbs_job(tmp_path, "requeue", **slow)
    assert (status != 0, "the time is nearly up" in written) == (True, True), written
    assert f"the program stopped with status {status}; back to the queue" in written
    assert "restart 2 of 10" in written
    assert (tmp_path / "told").read_text() == "qrerun 7.server\n"
    done, written = pbs_job(tmp_path, "requeue", arguments=[*STEPS[1:]])
    # On a busy machine it is told before it has begun, and saves nothing.
    assert (done, "goes on after step" in written) == (0, status == 75), written
    assert "the program is done" in written
