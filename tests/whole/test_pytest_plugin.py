"""pytest's capture keeps no report back: the roll call, what ended the job, and the tests that had failed before."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pytest
import pytest_mpistrategy
from launching import Finished
from replicas import long_lane

import mpistrategy as ms
from mpistrategy.mpi.watchdog import reports

pytestmark = pytest.mark.one_rank

Launch = Callable[..., Finished]
TIMEOUT = 4  # on a busy machine ranks start a second or two apart
CAPTURES = {"by default": [], "sys": ["--capture=sys"], "tee-sys": ["--capture=tee-sys"], "off": ["-s"]}

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
@pytest.mark.parametrize(
    "capture", ["by default", *(pytest.param(name, marks=long_lane) for name in list(CAPTURES)[1:])]
)
def test_a_late_collective_shows_the_roll_call_and_what_had_failed(
    launch: Launch, tmp_path: Path, capture: str
) -> None:
    done = session(launch, tmp_path, LATE, *CAPTURES[capture])
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
@pytest.mark.parametrize("capture", ["by default", "sys"])
def test_what_ends_the_job_in_a_test_is_shown(launch: Launch, tmp_path: Path, capture: str) -> None:
    done = session(launch, tmp_path, THREAD, *CAPTURES[capture])
    assert done.returncode not in (0, 124), done
    said = lines_of(done.stderr, 1)
    assert "IndexError: list index out of range" in said, done
    assert "IndexError was not caught in thread" in said
    assert "the whole job ends here" in said
    assert "AssertionError: what rank 1 asserts" in said


@pytest.mark.slow
def test_a_session_that_ends_by_itself_is_as_ever(launch: Launch, tmp_path: Path) -> None:
    text = "\n\ndef test_fails():\n    print('a word of the test')\n    assert strategy.reduce('SUM', 1) == 3\n"
    done = session(launch, tmp_path, text, "-q")
    assert done.returncode == 1, done
    assert done.stdout.count("AssertionError") + done.stdout.count("assert 2 == 3") >= 2
    assert "failed on this rank before" not in done.stderr
    assert "a word of the test" in done.stdout


QUIET = """
import sys

def test_quiet():
    assert not {"numpy", "mpi4py", "mpistrategy"} & set(sys.modules)
    import pytest_mpistrategy
    assert (pytest_mpistrategy.reports is not None) == SEVERAL
"""


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.slow
def test_it_imports_nothing_and_says_nothing(tmp_path: Path, several: bool, variable: str) -> None:
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


def test_a_session_without_stderr(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def closed(descriptor: int) -> int:
        raise OSError(errno.EBADF, "it is closed")

    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(pytest_mpistrategy, "reports", None)
    monkeypatch.setattr(os, "dup", closed)
    pytest_mpistrategy.pytest_addoption(request.config.pluginmanager)
    assert pytest_mpistrategy.reports is None


def test_the_package_is_not_rewritten(request: pytest.FixtureRequest) -> None:
    """pytest rewrites the assertions of a package with a plugin, and warns of one that was imported before."""
    assert "PYTEST_DONT_REWRITE" in (ms.__doc__ or "")
    marked = request.config.pluginmanager.rewrite_hook._must_rewrite
    marked.add("mpistrategy")  # as in an installation that is not editable
    pytest_mpistrategy.pytest_addoption(request.config.pluginmanager)
    assert "mpistrategy" not in marked
    assert "pytest_timeout" in marked


def test_a_forked_child_reports_to_its_own_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = pytest_mpistrategy.Reports()
    monkeypatch.setattr(pytest_mpistrategy, "reports", told)
    read, write = os.pipe()
    os.dup2(write, told.stderr)
    reports.write_at_once("one\n")
    reports.write_at_once("")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    reports.write_at_once("two\n")
    os.close(write)
    os.close(told.stderr)
    with open(read, "rb") as found:
        assert (found.read(), capfd.readouterr().err) == (b"\none\n", "two\n")


def test_of_many_failures_the_first_are_kept_and_shown_once() -> None:
    told = pytest_mpistrategy.Reports()
    os.close(told.stderr)
    for number in range(5):
        text = "\n".join(f"line {line} of {number}" for line in range(100))
        told.pytest_runtest_logreport(pytest.CollectReport(f"test_{number}.py", "failed", text, []))
    shown = told.failed_tests()
    assert "test_2.py failed on this rank before (collect):\n... (40 lines)\nline 40 of 2\n" in shown
    assert "test_3.py" not in shown
    assert shown.endswith("line 99 of 2\nand 2 more failed on this rank")
    told.pytest_unconfigure()
    assert told.failed_tests() == ""
