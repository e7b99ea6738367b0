"""What is learned of a cluster: from recorded answers of its commands, from commands that fail, and from a real Slurm.

The recorded answers of sinfo, scontrol and srun are those of the Slurm that the tests start; a machine of it has no
modules.  GOLDEN=update writes learned/profile.toml anew, as in test_golden.py.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_bed import SlurmBed
from slurm_user import MPI_TYPE, NEEDS_SLURM, User, started

from mpistrategy.cli import main
from mpistrategy.cli.slurm import asking, learn, sites
from mpistrategy.cli.slurm.asking import Answer, Answers
from mpistrategy.cli.slurm.render import render
from mpistrategy.cli.slurm.spec import JobSpec

pytestmark = pytest.mark.one_rank

LEARNED = Path(__file__).parent / "learned"
LIBRARY = "Open MPI v5.0.3\n/opt/openmpi/lib/libmpi.so.40\n\nInfiniBand\n"
COMMANDS = {"sinfo": "sinfo.txt", "scontrol": "scontrol.txt", "srun": "srun.txt", "bash": "module.txt"}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of commands that say what was recorded; it is the current one, and the only one of PATH."""
    for name, file in COMMANDS.items():
        answer(tmp_path / name, f"while read -r line; do echo \"$line\"; done <'{LEARNED / file}'")
    answer(tmp_path / "python", f"printf '{LIBRARY}'")
    monkeypatch.setattr(asking.sys, "executable", str(tmp_path / "python"))  # type: ignore[attr-defined]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_profile_is_learned_from_what_the_commands_say(stand_ins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["slurm", "--learn", "bed"]) == 0
    shown = capsys.readouterr()
    assert (shown.out.splitlines()[0][:9], shown.err) == ("bed.toml:", "")
    first, _, rest = (stand_ins / "bed.toml").read_text().partition("\n")
    golden = LEARNED / "profile.toml"
    if os.environ.get("GOLDEN") == "update":
        golden.write_text(rest)
    assert first.startswith(f"# The cluster bed, learned on {time.strftime('%Y-')}")
    assert rest == golden.read_text()
    text = render(JobSpec.of("multi_node", {"site": "./bed.toml"}))
    for line in ("#SBATCH --partition=test", "#SBATCH --gpus-per-node=2", "#SBATCH --cpus-per-task=2"):
        assert line in text.splitlines()
    assert "--cpu-bind=cores --mpi=pmix)" in text
    assert main.main(["slurm", "--learn", "bed"]) == 2
    assert "--force overwrites it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["scontrol", "srun", "bash", "python"])
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'slurm_load: down' >&2; exit 3", "status 3: slurm_load: down"),
        ("exit 0", "an empty answer"),
        ("sleep 60 & sleep 60", "no answer within 0.3 s"),
        ("", "there is no "),
    ],
)  # fmt: skip
def test_a_command_that_does_not_answer_is_named(stand_ins: Path, name: str, script: str, problem: str) -> None:
    answer(stand_ins / name, script.replace("sleep", "/bin/sleep"))
    if not script:
        (stand_ins / name).unlink()
    began = time.monotonic()
    answers = Answers.of_this_cluster(patience=0.3 if "sleep" in script else 30)
    assert time.monotonic() - began < 25
    assert len(answers.problems) == 1
    assert problem in answers.problems[0]
    text = learn.profile("bed", answers, "2026-11-25")
    (stand_ins / "bed.toml").write_text(text)
    assert f"# No answer from {answers.problems[0][:12]}" in text
    assert sites.load("./bed.toml").gpus == 2


@pytest.mark.parametrize("script", ["exit 1", "echo 'nothing to see'", "echo 'test*|down|1:00|2|4|1:4:1|gpu:2'"])
def test_without_a_partition_there_is_nothing_to_learn(
    stand_ins: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(stand_ins / "sinfo", script)
    assert main.main(["slurm", "--learn", "bed"]) == 2
    assert "nothing to learn: sinfo --noheader: " in capsys.readouterr().err
    assert not (stand_ins / "bed.toml").exists()


@pytest.mark.parametrize("name", ["", "../bed", "a b", "-x"])
def test_names_that_are_no_names(stand_ins: Path, name: str) -> None:
    assert main.main(["slurm", f"--learn={name}"]) == 2
    assert not list(stand_ins.glob("**/*.toml"))


SINFO = (
    "cpu*|up|2-00:00:00|900|256|8:16:2|(null)\n"
    "cpu*|up|2-00:00:00|4|256+|8:16:2|(null)\n"
    "gpu|up|20:00|64|128|2:32:2|gpu:a100:4(S:0-1),nvme:1\n"
    'evil";x|up|1:00|1|1|1:1:1|(null)\n'
)


def answers(**texts: str) -> Answers:
    every = {"sinfo": SINFO, "config": "", "kinds": "", "modules": "", "library": ""} | texts
    return Answers(**{name: Answer(name, text, "" if text else "there is none") for name, text in every.items()})


def learned(tmp_path: Path, **texts: str) -> tuple[str, sites.Site]:
    text = learn.profile("big", answers(**texts), "2026-11-25")
    (tmp_path / "big.toml").write_text(text)
    return text, sites.load(str(tmp_path / "big.toml"))


def test_hardware_threads_types_of_gpus_and_several_partitions(tmp_path: Path) -> None:
    text, site = learned(tmp_path)
    assert (site.cpus, site.threads_per_core, site.gpus, site.defaults["partition"]) == (256, 2, 0, "cpu")
    assert (site.defaults["tasks_per_node"], site.defaults["cpus_per_task"]) == (2, 128)
    assert "#   gpu              64 nodes of 128 CPUs and 4 GPUs, at most 20:00\n" in text
    assert "evil" not in text
    _, site = learned(
        tmp_path, sinfo=SINFO.replace("cpu*", "cpu").replace("gpu|", "gpu*|"), config="SelectType = select/cons_res\n"
    )
    assert (site.gpus, site.gpu_option, site.defaults["time"]) == (4, "gres", "00:20:00")
    assert (site.defaults["gpus_per_node"], site.defaults["cpus_per_task"]) == (4, 32)


@pytest.mark.parametrize(
    ("library", "kinds", "default", "told"),
    [
        ("MPICH 5.0.2", "none pmi2 pmix", "none", 'mpi = "pmi2"'),
        ("MPICH 5.0.2", "none pmi2 pmix", "pmi2", "# It speaks pmi2, which is srun's default."),
        (
            "Open MPI v5.0.3",
            "none pmi2",
            "pmi2",
            "it needs pmix; srun has none, pmi2; its default is pmi2. Take multi_node",
        ),
        ("CRAY MPICH version 8.1.30", "cray_shasta none", "none", 'mpi = "cray_shasta"'),
        ("Open MPI v5.0.3", "", "none", '# mpi = "pmix"'),
        ("", "pmix", "none", "the kind of PMI that your MPI needs"),
    ],
)
def test_the_kind_of_pmi(tmp_path: Path, library: str, kinds: str, default: str, told: str) -> None:
    text, site = learned(tmp_path, library=library, kinds=kinds, config=f"MpiDefault = {default}\n")
    assert told in text
    assert site.defaults.get("mpi") == (tomllib.loads(told)["mpi"] if told.startswith("mpi") else None)


def test_an_mpi_of_pip_and_accounts_are_pointed_out(tmp_path: Path) -> None:
    text, _ = learned(
        tmp_path,
        library="MPICH 5\n/venv/lib/libmpi.so.12\nown\n\n",
        config="AccountingStorageEnforce = associations,limits\n",
    )
    assert "pip has installed it, and between nodes it talks by TCP" in text
    assert '\n# requires = ["account"]\n' in text


@pytest.fixture
def bed() -> Iterator[SlurmBed]:
    yield from started(nodes=2, cpus=4, gpus=2)


class TestOnSlurm:
    pytestmark = NEEDS_SLURM

    def test_slurm_takes_the_scripts_of_a_learned_profile(self, bed: SlurmBed, tmp_path: Path) -> None:
        user = User(bed, tmp_path)
        done = user.command("--learn", "bed")
        assert done.returncode == 0, done
        assert f'\nmpi = "{MPI_TYPE}" # REVIEW' in (tmp_path / "bed.toml").read_text()
        for template, nodes in (("single_node", "node1"), ("multi_node", r"node[1-2]")):
            done = user.command(template, "site=./bed.toml", "--check")
            assert (done.returncode, f"on nodes {nodes} in partition test" in done.stderr) == (0, True), done
