"""What a killed job leaves, the next start of the same job removes: that, and nothing else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import launching
import pytest

from mpistrategy.mpi.watchdog import earlier_runs
from mpistrategy.mpi.watchdog.earlier_runs import Run, name_of_this_run, remove_in

pytestmark = pytest.mark.one_rank
Launch = Callable[..., launching.Finished]

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
TELL = "from mpistrategy.mpi.watchdog.earlier_runs import name_of_this_run; print(name_of_this_run())"


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)


def name_here(monkeypatch: pytest.MonkeyPatch, job: str = "", step: str = "", restart: str = "") -> str:
    """Return the name of a run directory of this process, in a Slurm job."""
    for name, value in zip(SLURM, (job, step, restart), strict=True):
        monkeypatch.setenv(name, value)
    return name_of_this_run()


def name_of_ended(job: str = "", step: str = "", restart: str = "") -> str:
    """Return the name of a run directory of a process that has ended."""
    given = dict(zip(SLURM, (job, step, restart), strict=True))
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        env={**launching.environment(), **given, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def made(folder: Path, name: str, *files: str) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    for file in files or ("node-0.json", "alarm", "node-1.json.77.new"):
        (path / file).write_text(f"what {file} says\n")
    return path


def elsewhere(name: str) -> str:
    """Return a name that was given on another machine."""
    return f"{name[:-20]}{'0' * 8}{name[-12:]}"


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = name_here(monkeypatch)
    assert Run.named(plain) == Run("", 0, plain[-20:-12], plain[-12:-4])
    assert name_here(monkeypatch) != plain, "each strategy has its own"
    assert name_here(monkeypatch, "17", "0").startswith("mpistrategy-run-17-0-")
    again = name_here(monkeypatch, "17", "0", "2")
    assert again.startswith("mpistrategy-run-17-0-r2-")
    assert Run.named(again) == Run("17", 2, plain[-20:-12], plain[-12:-4])
    assert Run.named(name_here(monkeypatch, "17", restart="1")) == Run("17", 1, plain[-20:-12], plain[-12:-4])
    assert Run.named(name_here(monkeypatch, "../../etc", "x", "-1")) == Run("", 0, plain[-20:-12], plain[-12:-4])
    for other in ("mpistrategy-run-17-0-5bc19f20", "mpistrategy-run-", "mpistrategy-run-17-0-" + "g" * 20, "x"):
        assert Run.named(other) is None
    ended = Run.named(name_of_ended())
    assert ended is not None
    assert (ended.machine, ended.process == plain[-12:-4]) == (plain[-20:-12], False)


def test_only_what_is_certainly_dead_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dead, dead_of_17, dead_of_18 = name_of_ended(), name_of_ended("17", "0", "1"), name_of_ended("18", "0")
    here = name_here(monkeypatch)
    step_beside = name_here(monkeypatch, "17", "1", "1")
    earlier, earlier_elsewhere = name_here(monkeypatch, "17", "0"), elsewhere(name_here(monkeypatch, "17", "3"))
    later = elsewhere(name_here(monkeypatch, "17", "4", "2"))
    everything = [
        dead, dead_of_17, dead_of_18, here, elsewhere(dead), elsewhere(dead_of_17), step_beside, earlier,
        earlier_elsewhere, later,
    ]  # fmt: skip
    for name in everything:
        made(tmp_path, name)
    remove_in(str(tmp_path), name_here(monkeypatch, "17", "5", "1"))
    gone = {dead_of_17, earlier, earlier_elsewhere}  # of this restart and certainly dead, and of the one before
    assert set(os.listdir(tmp_path)) == set(everything) - gone
    remove_in(str(tmp_path), name_here(monkeypatch))
    assert set(os.listdir(tmp_path)) == set(everything) - gone - {dead}


def test_what_is_not_ours_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [name_of_ended() for _ in range(4)]
    mixed = made(tmp_path, names[0], "node-0.json", "notes.txt", "rank-x.txt")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "node-0.json").write_text("kept")
    (tmp_path / names[1]).symlink_to(tmp_path / "precious")
    (tmp_path / names[2]).write_text("a file")
    old = made(tmp_path, "mpistrategy-run-5bc19f20")
    expected = {names[0], names[1], names[2], "precious", old.name}
    if os.geteuid() == 0:
        theirs = made(tmp_path, names[3])
        os.chown(theirs, 65534, 65534)
        expected.add(names[3])
    remove_in(str(tmp_path), name_here(monkeypatch))
    assert set(os.listdir(tmp_path)) == expected
    assert sorted(os.listdir(mixed)) == ["notes.txt", "rank-x.txt"]
    assert (tmp_path / "precious" / "node-0.json").read_text() == "kept"


def test_the_last_reports_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = made(tmp_path, name_of_ended(), "roll-call.txt", "error-7.json", "rank-0.txt", "busy-1-1764023423")
    second = made(tmp_path, name_of_ended(), "node-10.json", "node-9.json", "roll-call.txt", "error-0.json")
    empty = made(tmp_path, name_of_ended(), "node-0.json")
    for path, when in ((first, 1), (second, 2), (empty, 3)):
        os.utime(path, (when, when))
    remove_in(str(tmp_path), name_here(monkeypatch))
    assert os.listdir(tmp_path) == ["mpistrategy-last-report.txt"]
    kept = tmp_path / "mpistrategy-last-report.txt"
    text = kept.read_text()
    words = (
        f"What {second.name} held",
        "what roll-call.txt says",
        "what error-0.json says",
        "== node-9.json",
        "what node-10.json says",
    )
    more = f"What {first.name} held", "what error-7.json says"
    places = [text.index(each) for each in (*words, *more)]
    assert places == sorted(places), "the newest is the first"
    assert empty.name not in text
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert f"ended with a report: {kept}" in capsys.readouterr().err
    made(tmp_path, name_of_ended("17"), "error-0.json")
    remove_in(str(tmp_path), name_here(monkeypatch, "17", "", "1"))
    assert sorted(os.listdir(tmp_path)) == ["mpistrategy-last-report-17.txt", "mpistrategy-last-report.txt"]


def test_a_long_report_is_kept_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = made(tmp_path, name_of_ended(), "roll-call.txt")
    (path / "error-0.json").write_text("a line\n" * 2**18)
    remove_in(str(tmp_path), name_here(monkeypatch))
    text = (tmp_path / "mpistrategy-last-report.txt").read_text()
    assert "what roll-call.txt says" in text
    assert 2**19 < len(text) < 2**21


def test_a_report_that_cannot_be_kept_stays_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told, empty = made(tmp_path, name_of_ended(), "roll-call.txt"), made(tmp_path, name_of_ended())
    (tmp_path / "mpistrategy-last-report.txt").mkdir()
    remove_in(str(tmp_path), name_here(monkeypatch))
    assert os.listdir(told) == ["roll-call.txt"]
    assert not empty.exists()


def test_a_folder_that_cannot_be_read_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISTRATEGY_RUN_DIR", "/none/at/all")
    monkeypatch.setattr(earlier_runs, "_done", [])
    earlier_runs.remove_left_ones()


# ------------------------------------------------------------------------------------------------ jobs

KILLED = """
import os, signal, sys
import mpistrategy as ms
from mpistrategy.mpi.watchdog import watchdog

strategy = ms.MirroredStrategy()
directory = watchdog.in_this_process().group_of(strategy.extended.communicator.guard).directory
assert directory.write(f"node-{strategy.replica_id_in_sync_group}.json", "{}")
if strategy.replica_id_in_sync_group == 0:
    print(os.path.basename(directory.path), flush=True)
strategy.barrier("written")
if sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""
HANGS = """
import time
import mpistrategy as ms

strategy = ms.MirroredStrategy()
if strategy.replica_id_in_sync_group == 1:
    time.sleep(60)
strategy.barrier("late")
"""
WELL = "import mpistrategy as ms\nms.MirroredStrategy().barrier('x')\n"


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("mpistrategy-*"))


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}], ids=["no batch system", "Slurm"])
def test_a_job_that_was_killed(launch: Launch, tmp_path: Path, job: Mapping[str, str]) -> None:
    program, again = launching.program(KILLED, tmp_path), {"SLURM_RESTART_COUNT": "1"} if job else {}
    beside = made(tmp_path, "mpistrategy-run-18-0-" + "0" * 20)
    killed = launch(2, [program, "kill"], env=job, cwd=tmp_path)
    assert killed.returncode != 0
    assert left_in(tmp_path) == sorted([killed.stdout.split()[0], beside.name]), killed
    launch(2, WELL, env={**job, **again}, cwd=tmp_path).check()
    assert left_in(tmp_path) == [beside.name]
    launch(2, [program], env={**job, **again}, cwd=tmp_path).check()
    assert left_in(tmp_path) == [beside.name], "a job that ends well leaves nothing"


@pytest.mark.each_mpi
def test_a_job_that_ended_with_a_roll_call(launch: Launch, tmp_path: Path) -> None:
    late = launch(2, HANGS, env={"MPISTRATEGY_TIMEOUT_SECONDS": "2"}, cwd=tmp_path)
    assert late.returncode != 0
    (left,) = left_in(tmp_path)
    assert f"{left}/*.json" in late.stderr
    launch(2, WELL, cwd=tmp_path).check()
    assert left_in(tmp_path) == ["mpistrategy-last-report.txt"]
    report = (tmp_path / "mpistrategy-last-report.txt").read_text()
    assert left in report
    assert "roll call: a collective is late" in report
    assert "time.sleep(60)" in report, "the stack of the rank that did not come"


def test_a_file_of_a_chain_that_was_killed(tmp_path: Path) -> None:
    """The next job of the chain removes what the one before left; both remove their own when they are ended by TERM."""
    for name, text in {
        "srun": "touch started; exec sleep 60",
        "sbatch": 'echo 9; echo "$@" >given',
        "scancel": "true",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".mpistrategy-7.unfinished").touch()
    (tmp_path / ".mpistrategy-6.unfinished").touch()
    script = Path(__file__).parents[3] / "slurm" / "chain.sbatch"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "node1"}
    with subprocess.Popen(["bash", script, "2", "7"], cwd=tmp_path, env=environment, start_new_session=True) as job:
        end = launching.time.monotonic() + 30
        while not (tmp_path / "started").exists() and launching.time.monotonic() < end:
            launching.time.sleep(0.01)
        job.terminate()
        assert job.wait(30) == -15
        os.killpg(job.pid, 9)  # srun, which goes on
    assert (tmp_path / "given").read_text().split()[-2:] == ["3", "8"]
    assert sorted(path.name for path in tmp_path.glob(".mpistrategy-*")) == [".mpistrategy-6.unfinished"]
