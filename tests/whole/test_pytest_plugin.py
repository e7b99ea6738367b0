"""pytest's capture keeps no report back: the roll call, what ended the job, and the tests that had failed before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pytest
import pytest_mpistrategy
from launching import Finished

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

Launch = Callable[..., Finished]
TIMEOUT = 4  # on a busy machine ranks start a second or two apart

HEAD = """
import sys, threading
import pytest
import mpistrategy as ms

strategy = ms.MirroredStrategy()
rank = strategy.replica_id_in_sync_group
"""
LATE = """

def test_passes():
    print("a word of the test")
    assert strategy.reduce("SUM", 1) == 2


def test_fails_on_one_rank():
    assert rank == 0, "what rank 1 asserts"


def test_differs():
    strategy.reduce("SUM" if rank == 0 else "MEAN", 1.0)


def test_is_late():
    if rank == 1:
        threading.Event().wait()
    strategy.reduce("SUM", 1.0)
"""
THREAD = """

def test_fails_on_one_rank():
    assert rank == 0, "what rank 1 asserts"


def test_thread():
    if rank == 1:
        thread = threading.Thread(target=lambda: [][0])
        thread.start()
        thread.join()
    threading.Event().wait()
"""


def session(launch: Launch, folder: Path, text: str, *options: str) -> Finished:
    (folder / "test_it.py").write_text(HEAD + text)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--color=no", *options, "test_it.py"]
    return launch(2, command, cwd=folder, env={"MPISTRATEGY_TIMEOUT_SECONDS": str(TIMEOUT)}, timeout=90)


def lines_of(text: str, rank: int) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith(f"[rank {rank}/2] "))


@pytest.mark.slow
def test_a_late_collective_shows_the_roll_call_and_what_had_failed(launch: Launch, tmp_path: Path) -> None:
    done = session(launch, tmp_path, LATE)
    assert done.returncode == 124, done
    roll_call = lines_of(done.stderr, 0)
    assert "roll call: a collective is late" in roll_call, done
    assert "not come: rank 1" in roll_call
    for rank in (0, 1):
        said = lines_of(done.stderr, rank)
        assert "test_it.py::test_differs failed on this rank before (call):" in said, done
        assert "CollectiveMismatchError: the ranks do not make the same call; they differ in: op" in said
    assert "test_it.py::test_fails_on_one_rank failed on this rank before" in lines_of(done.stderr, 1)
    assert "AssertionError: what rank 1 asserts" in lines_of(done.stderr, 1)
    assert "what rank 1 asserts" not in lines_of(done.stderr, 0)


@pytest.mark.each_mpi
def test_what_ends_the_job_in_a_test_is_shown(launch: Launch, tmp_path: Path) -> None:
    done = session(launch, tmp_path, THREAD, "--capture=sys")
    assert done.returncode not in (0, 124), done
    said = lines_of(done.stderr, 1)
    assert "IndexError: list index out of range" in said, done
    assert "IndexError was not caught in thread" in said
    assert "the whole job ends here" in said
    assert "AssertionError: what rank 1 asserts" in said


QUIET = """
import sys

def test_quiet():
    assert not {"numpy", "mpi4py", "mpistrategy"} & set(sys.modules)
    import pytest_mpistrategy
    assert (pytest_mpistrategy.reports is not None) == SEVERAL
"""


@pytest.mark.parametrize(("variable", "several"), [("PMI_SIZE", False), ("OMPI_COMM_WORLD_SIZE", True)])
@pytest.mark.slow
def test_it_imports_nothing_and_says_nothing(tmp_path: Path, variable: str, several: bool) -> None:
    (tmp_path / "test_quiet.py").write_text(QUIET.replace("SEVERAL", str(several)))
    environment = {name: v for name, v in os.environ.items() if not name.startswith(launching.LAUNCHER_PREFIXES)}
    # Other packages' plugins import what they like (jaxtyping: NumPy): only this one is loaded, by its entry point.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mpistrategy", "test_quiet.py"],
        cwd=tmp_path,
        env={**environment, variable: "2" if several else "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    assert done.stdout.startswith(".")
    assert done.stderr == ""


def test_the_package_is_not_rewritten(request: pytest.FixtureRequest) -> None:
    """pytest rewrites the assertions of a package with a plugin, and warns of one that was imported before."""
    assert "PYTEST_DONT_REWRITE" in (ms.__doc__ or "")
    marked = request.config.pluginmanager.rewrite_hook._must_rewrite
    marked.add("mpistrategy")  # as in an installation that is not editable
    pytest_mpistrategy.pytest_addoption(request.config.pluginmanager)
    assert "mpistrategy" not in marked
    assert "pytest_timeout" in marked
