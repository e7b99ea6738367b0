"""The scripts of every cluster, run by a shell: stand-ins of its launcher and of `module` note what they are asked."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from slurm_scripts import executable

from mpistrategy.cli.slurm import sites
from mpistrategy.cli.slurm.scripts import checked, written

pytestmark = pytest.mark.one_rank

#: How ranks are started on each cluster, and how many threads each has.
STARTED = {
    "alps": ("srun --kill-on-bad-exit=1 --cpus-per-task=72 --cpu-bind=cores", 72),
    "aurora": ("mpiexec -n 24 --ppn 12 --depth=8 --cpu-bind=depth", 8),
    "frontier": ("srun --kill-on-bad-exit=1 --cpus-per-task=7 --cpu-bind=cores", 7),
    "jupiter": ("srun --kill-on-bad-exit=1 --cpus-per-task=72", 72),
    "juwels": ("srun --kill-on-bad-exit=1 --cpus-per-task=24", 12),
    "leonardo": ("srun --kill-on-bad-exit=1 --cpus-per-task=8 --cpu-bind=cores", 8),
    "levante": ("srun --kill-on-bad-exit=1 --cpus-per-task=16 --cpu-bind=cores", 16),
    "lonestar6": ("ibrun", 42),
    "lumi": ("srun --kill-on-bad-exit=1 --cpus-per-task=16 --cpu-bind=cores", 16),
    "perlmutter": ("srun --kill-on-bad-exit=1 --cpus-per-task=32 --cpu-bind=cores", 16),
    "polaris": ("mpiexec -n 8 --ppn 4 --depth=8 --cpu-bind=depth", 8),
    "snellius": ("srun --kill-on-bad-exit=1 --cpus-per-task=18 --cpu-bind=cores", 18),
    "stampede3": ("ibrun", 6),
    "tacc": ("ibrun", 72),
}
MODULES = {
    "polaris": ["use /soft/modulefiles", "load conda"],
    "lumi": ["load LUMI cray-python"],
    "juwels": ["load GCC ParaStationMPI mpi4py"],
}


def run(folder: Path, template: str = "multi_node", **statement: Any) -> tuple[int, list[str]]:
    """Run a script on two nodes that are not there; return its status and what the stand-ins noted."""
    profile, given = checked(template, statement | {"arguments": ["--rate", "two words"]})
    (folder / "job").write_text(written(template, profile, given))
    for name in ("srun", "ibrun", "mpiexec", "mpirun", "module"):
        executable(folder / name, f'echo "{name} $* ($OMP_NUM_THREADS threads)" >>{folder}/noted')
    (folder / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    is_pbs = profile.batch == "pbs"
    told = {"PBS_JOBID": "7.server", "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(folder / "nodes")}
    if not is_pbs:
        told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
        told["SLURM_NTASKS_PER_NODE"] = given.get("tasks_per_node", "2")
        if "cpus_per_task" not in profile.skip:  # Slurm sets it for jobs that ask for it
            told["SLURM_CPUS_PER_TASK"] = given.get("cpus_per_task", "1")
    environment = told | {"PATH": f"{folder}{os.pathsep}/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(["bash", str(folder / "job")], env=environment, cwd=folder, capture_output=True, check=False)
    assert done.stderr == b"", done
    return done.returncode, (folder / "noted").read_text().splitlines()


@pytest.mark.parametrize("site", [name for name in sites.names() if name != "pbs"])
def test_ranks_are_started_as_the_cluster_wants_it_and_doctor_first(tmp_path: Path, site: str) -> None:
    status, noted = run(tmp_path, site=site)
    launch, threads = STARTED[site]
    ranks = 2 * int(checked("multi_node", {"site": site})[1]["tasks_per_node"])
    started = [line for line in noted if not line.startswith("module ")]
    assert status == 0
    assert started == [
        f"{launch} python3 -m mpistrategy doctor --ranks {ranks} --timeout 120 ({threads} threads)",
        f"{launch} python3 -m mpistrategy run example.py --rate two words ({threads} threads)",
    ]
    asked = [re.sub(r"^module | \( threads\)$", "", line) for line in noted if line.startswith("module ")]
    assert asked == MODULES.get(site, [f"load {' '.join(m)}" for m in [sites.load(site).defaults.get("modules")] if m])


@pytest.mark.parametrize(
    ("template", "statement", "started"),
    [
        ("apptainer", {}, "apptainer exec image.sif"),
        (
            "apptainer",
            {"image": "my image.sif", "gpus_per_node": 2, "mounts": "/data:/d"},
            "apptainer exec --nv --bind /data:/d my image.sif",
        ),
        ("pyxis", {}, "--container-image=./image.sqsh --container-mounts={0}:{0} --container-workdir={0}"),
        (
            "pyxis",
            {"image": "x.sqsh", "mounts": ["/a:/b", "/c:/d"]},
            "--container-image=./x.sqsh --container-mounts=/a:/b,/c:/d",
        ),
    ],
)
def test_containers(tmp_path: Path, template: str, statement: dict[str, Any], started: str) -> None:
    status, noted = run(tmp_path, template, **statement)
    srun = "srun --kill-on-bad-exit=1 --cpus-per-task=1 --cpu-bind=cores"
    program = "python3 -m mpistrategy run example.py --rate two words (1 threads)"
    assert (status, noted) == (0, [f"{srun} {started.format(tmp_path)} {program}"])
