"""What every template is on every cluster: byte for byte, clean for shellcheck, and taken by Slurm.

The scripts of no cluster are the files of slurm/ and slurm/pbs/. Of those of a cluster golden/ keeps what differs
from them, each part once, with the templates that have it.  After a change that was meant, this writes them anew:

    GOLDEN=update python -m pytest --with-mpi tests/cli/slurm/test_golden.py
"""

from __future__ import annotations

import concurrent.futures
import difflib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_bed import SlurmBed
from slurm_user import NEEDS_SLURM, started

from mpistrategy.cli.slurm import sites
from mpistrategy.cli.slurm.keys import ON_PBS, TEMPLATES
from mpistrategy.cli.slurm.render import render
from mpistrategy.cli.slurm.spec import JobSpec

pytestmark = pytest.mark.one_rank

GOLDEN = Path(__file__).parent / "golden"
SITES = [name for name in sites.names() if name != "pbs"]


def templates_of(name: str) -> tuple[str, ...]:
    return sites.load(name).templates or tuple(TEMPLATES)


def script(template: str, site: str | None) -> str:
    return render(JobSpec.of(template, {"site": site} if site else {}))


def differences(template: str, site: str) -> list[str]:
    """Return the parts in which the script is another than the one for no cluster: lines without, and lines with it."""
    is_pbs = sites.load(site).batch == "pbs"
    usual, suffix = script(template, "pbs" if is_pbs else None), "pbs" if is_pbs else "sbatch"
    its_own = script(template, site).replace(f"{site}.{suffix}", f"{template}.{suffix}")
    lines = difflib.unified_diff(usual.splitlines(), its_own.splitlines(), n=0, lineterm="")
    parts = "\n".join("@@" if line.startswith("@@") else line for line in lines).split("@@\n")
    return [part.strip("\n") for part in parts[1:]]


def golden(site: str) -> str:
    parts: dict[str, list[str]] = {}
    for template in templates_of(site):
        for part in differences(template, site):
            parts.setdefault(part, []).append(template)
    everywhere = list(templates_of(site))
    named = {part: "all" if names == everywhere else ", ".join(names) for part, names in parts.items()}
    return "\n\n".join(f"== {names}\n{part}" for part, names in named.items()) + "\n"


ALL = {f"{site}-{template}": script(template, site) for site in SITES for template in templates_of(site)}
ALL |= {f"none-{template}": script(template, None) for template in TEMPLATES}
ALL |= {f"pbs-{template}": script(template, "pbs") for template in ON_PBS}


@pytest.mark.parametrize("site", SITES)
def test_the_scripts_of_a_cluster(site: str) -> None:
    path = GOLDEN / f"{site}.txt"
    if os.environ.get("GOLDEN") == "update":
        path.write_text(golden(site), encoding="utf-8")
    assert golden(site) == path.read_text(encoding="utf-8"), "if it is meant: see the top of this file"


def test_there_are_no_other_golden_files() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(SITES)


def at_once(commands: dict[str, list[str]], **options: object) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run commands, some at a time; return what became of each."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        run = lambda command: subprocess.run(command, capture_output=True, text=True, check=False, **options)  # noqa: E731
        return dict(zip(commands, pool.map(run, commands.values()), strict=True))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="not run: no shellcheck on this machine")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    # One script of those that differ in comments only.
    different = {"\n".join(line for line in text.splitlines() if line[:1] != "#"): name for name, text in ALL.items()}
    names = sorted(different.values())
    for name in names:
        (tmp_path / name).write_text(ALL[name])
    parts = [names[first :: os.cpu_count()] for first in range(os.cpu_count() or 1)]
    done = at_once({str(number): ["shellcheck", *part] for number, part in enumerate(parts)}, cwd=tmp_path)
    assert [each.stdout for each in done.values()] == [""] * len(parts)


PARTITIONS = sorted(
    {str(sites.load(site).defaults["partition"]) for site in SITES if "partition" in sites.load(site).defaults}
)


@pytest.fixture(scope="module")
def paper() -> Iterator[SlurmBed]:
    yield from started(nodes=8, cpus=288, gpus=4, paper=True, partitions=PARTITIONS)


class TestOnPaper:
    pytestmark = NEEDS_SLURM

    def test_slurm_takes_every_script(self, paper: SlurmBed) -> None:
        there = {name: text for name, text in ALL.items() if "#SBATCH" in text}
        refused = {}
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            ask = lambda text: paper.run("sbatch", "--test-only", input=text)  # noqa: E731
            for name, done in zip(there, pool.map(ask, there.values()), strict=True):
                if done.returncode or "to start at" not in done.stderr:
                    refused[name] = done.stderr
        assert refused == {}
        assert len(there) > 80
