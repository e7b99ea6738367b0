"""The package as users get it: an sdist, a wheel made of it, installed where no checkout is, and used from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import launching
import pytest

import mpistrategy as ms

pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(launching.IS_OPEN_MPI, reason="the wheel is the same for every MPI"),
]

ROOT = Path(ms.__file__).resolve().parents[1]
BUILD = "import sys; sys.path.insert(0, sys.argv[1]); from hatchling.build import build_sdist; build_sdist(sys.argv[2])"


def ran(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command without what the tests have in their environment; return what it printed."""
    environment = launching.environment()
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """The files, the folder of the commands of a virtual environment with the wheel in it, and a folder to work in."""

    sdist: Path
    wheel: Path
    bin: Path
    folder: Path

    def run(self, command: str, *arguments: str) -> str:
        """Run a command of the environment in the folder; return what it printed."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return ran(self.bin / command, *arguments, cwd=self.folder, PATH=path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    environment, work = folder / "environment", tmp_path_factory.mktemp("work")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")
    ran(*pip, "install", "hatchling", "--target", folder / "hatchling", cwd=work)
    ran(sys.executable, "-c", BUILD, folder / "hatchling", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    built = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    ran(*pip, "wheel", sdist, *built, cwd=work, PYTHONPATH=str(folder / "hatchling"))
    (wheel,) = folder.glob("*.whl")
    ran(sys.executable, "-m", "venv", "--without-pip", environment, cwd=work)
    ran(*pip, "--python", environment / "bin" / "python", "install", "--no-deps", wheel, cwd=work)
    # What it needs is taken from here: tests/whole/test_readme.py installs it all in a fresh clone. The folder comes
    # last on the path, and finders of editable packages in it are not started.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    (environment / "bin" / "mpiexec").symlink_to(Path(sys.executable).parent / "mpiexec")
    return Installed(sdist, wheel, environment / "bin", work)


def test_it_is_imported_from_where_it_was_installed(installed: Installed) -> None:
    told = installed.run("python", "-c", "import mpistrategy as ms; print(ms.__file__, ms.__version__)").split()
    assert Path(told[0]).is_relative_to(installed.bin.parent / "lib")
    assert told[1] == ms.__version__
    assert installed.run("mpistrategy", "--version") == f"mpistrategy {ms.__version__}\n"
    assert f"-{ms.__version__}-" in installed.wheel.name


def test_all_files_of_the_package_travel_along_and_no_others(installed: Installed) -> None:
    package = ROOT / "mpistrategy"
    there = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "plugins" not in path.parts
    }
    scripts = [path for path in (ROOT / "slurm").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    there |= {f"mpistrategy/cli/slurm/scripts/{path.relative_to(ROOT / 'slurm').as_posix()}" for path in scripts}
    with zipfile.ZipFile(installed.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert there - names == set()
    assert {name for name in names - there if not name.startswith("pytest_mpistrategy")} == set()


def test_the_sdist_is_what_the_wheel_is_made_of(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops == {"mpistrategy", "slurm", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}


def test_recipes_ask_for_the_same_packages() -> None:
    """Those of conda-forge and Spack: the version, and the bounds of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    conda, spack = ((ROOT / "scripts" / "packaging" / name).read_text() for name in ("recipe.yaml", "package.py"))
    compile(spack, "package.py", "exec")
    of_conda = re.findall(r"^ +- (\w+) >=([\d.]+)$", conda, re.MULTILINE)
    of_spack = re.findall(r'depends_on\("py-(\w+)@([\d.]+):"', spack)
    for found in (of_conda, of_spack):
        assert sorted(f"{name}>={bound}" for name, bound in found) == sorted(wanted)
    oldest = project["project"]["requires-python"].removeprefix(">=")
    assert f'version: "{ms.__version__}"\n  python_min: "{oldest}"' in conda
    assert f'depends_on("python@{oldest}:"' in spack
    assert f'version("{ms.__version__}"' in spack
    assert project["project"]["optional-dependencies"]["cuda12"] == ["cupy-cuda12x>=13.4,<15"]
    assert "- cupy >=13.4,<15\n" in conda
    assert 'f"py-cupy@13.4:14 ' in spack


def test_the_guide(installed: Installed) -> None:
    assert "tutorial" in installed.run("mpistrategy", "guide", "--list")
    assert "mpiexec" in installed.run("mpistrategy", "guide", "tutorial")


def test_a_job_script_is_written_and_its_example_runs(installed: Installed) -> None:
    installed.run("mpistrategy", "slurm", "multi_node", "nodes=2", "site=perlmutter", "account=me", "-o", "job.sbatch")
    script = (installed.folder / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in script
    subprocess.run(["bash", "-n", installed.folder / "job.sbatch"], check=True)
    installed.run("mpistrategy", "slurm", "--all", "slurm")
    assert (installed.folder / "slurm" / "pbs" / "requeue.pbs").is_file()
