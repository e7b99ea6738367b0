"""What every template is on every cluster: clean for shellcheck, and taken by Slurm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import replicas
from slurm_bed import SlurmBed
from slurm_scripts import ON_PBS, script

from mpistrategy.cli.slurm import sites
from mpistrategy.cli.slurm.scripts import TEMPLATES

pytestmark = pytest.mark.one_rank

SITES = [name for name in sites.names() if name != "pbs"]
KEYS = {"job_name": "j", "account": "a", "partition": "test", "memory": "60G", "exclusive": True, "mail_user": "me"}
KEYS |= {"mail_type": "END", "output": "log/%j", "modules": "gcc mpi/5", "venv": "~/v", "time": "30:00:00"}
#: The templates, and the statement.
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{f"sites/{site}": (sites.load(site).templates or tuple(TEMPLATES), {"site": site}) for site in SITES},
    **{f"statements/pbs-{mpi}": (ON_PBS, {"site": "pbs", "mpiexec": mpi}) for mpi in ("mpich", "intel", "pals")},
    **{f"statements/mpirun-{mpi}": (("multi_node_mpirun",), {"mpiexec": mpi}) for mpi in ("mpich", "intel")},
    "statements/pbs-keys": (ON_PBS, {"site": "pbs", "gpus_per_node": 4, **KEYS, "output": "log/j.out"}),
    "statements/keys": (
        ("single_node", "multi_node", "requeue", "chain", "array"),
        {"gpus_per_node": 4, "gpu_option": "gres", "mpi": "pmix", **KEYS},
    ),
}


def every_script() -> dict[str, str]:
    asked = {f"{case.replace('/', '-')}-{name}": (name, said) for case, (some, said) in CASES.items() for name in some}
    asked |= {f"none-{template}": (template, {}) for template in TEMPLATES}
    asked |= {f"pbs-{template}": (template, {"site": "pbs"}) for template in ON_PBS}
    return {name: script(template, said) for name, (template, said) in asked.items()}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="not run: no shellcheck on this machine")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    """The templates; and with MPISTRATEGY_TEST_ALL=1 what they are on each cluster."""
    tried = {
        name: text
        for name, text in every_script().items()
        if replicas.ALL or name.startswith(("none-", "pbs-", "keys-"))
    }
    for name, text in tried.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(["shellcheck", *tried], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


@replicas.long_lane
def test_slurm_takes_every_script(bed: SlurmBed) -> None:
    scripts, refused = every_script(), {}
    for name, text in scripts.items():
        # Partitions are those of a cluster.
        asked = "".join(line for line in text.splitlines(keepends=True) if "--partition=" not in line)
        done = bed.run("sbatch", "--test-only", input=asked)
        if "#SBATCH" in text and (done.returncode or "to start at" not in done.stderr):
            refused[name] = done.stderr
    assert refused == {}
    assert len(scripts) > 90
