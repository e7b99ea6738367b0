"""staged_env.sbatch: what it leaves on the nodes' disks, and another user who is there first.

The script runs with stand-ins for srun and sbcast on one node: nothing of the other user's is run, nor taken for the
job's own folder.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from slurm_scripts import executable, script

pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.skipif(os.getuid() != 0, reason="not run: only root can play another user"),
]

OTHER = 65534
#: The other user hears of the folder's name when the job is about to make it, and is faster; later they swap `bin`.
SRUN = """
while [[ $1 == --* ]]; do shift; done
stage=${!#}
if [[ $* == *mkdir* && $ATTACK ]]; then
    case $ATTACK in
        folder) mkdir -m 777 "$stage" ;;
        link) ln -s "$THEIRS" "$stage" ;;
        file) echo mine >"$stage" ;;
    esac
    chown -h 65534:65534 "$stage"
    touch "$WORK/was_first"
elif [[ $* == *"mpistrategy run"* ]]; then
    stage=$4
    stat -c "the folder: %u %a" "$stage"
    if [[ $(stat -L -c %u "$stage") == 65534 ]]; then
        printf '#!/bin/bash\\ntouch "$WORK/executed"\\n' >"$stage/bin/python3"
    fi
fi
exec "$@"
"""
SBCAST = 'cp -- "${@: -2:1}" "${@: -1}"'
PYTHON = 'echo "runs $0: $*"'


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "local"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    (folder / "bin").mkdir(parents=True)
    for path in (folder, folder / "bin"):
        path.chmod(0o777)
        os.chown(path, OTHER, OTHER)
    return folder


def run(work: Path, local: Path, attack: str = "") -> subprocess.CompletedProcess[str]:
    executable(work / "tools" / "srun", SRUN)
    executable(work / "tools" / "sbcast", SBCAST)
    executable(work / "bin" / "python3", PYTHON)
    subprocess.run(["tar", "-C", work, "-czf", work / "environment.tar.gz", "bin"], check=True)
    (work / "job.sh").write_text(script("staged_env", {"local": str(local), "nodes": 1}))
    slurm = {"SLURMD_NODENAME": "here", "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
    ours = {"WORK": str(work), "ATTACK": attack, "THEIRS": str(work / "theirs")}
    return subprocess.run(
        ["bash", "job.sh"],
        cwd=work,
        env={**os.environ, **slurm, **ours, "PATH": f"{work / 'tools'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_folder_is_of_this_user_alone_and_gone_afterwards(tmp_path: Path, local: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(local)  # of root, and followed
    first, second = run(tmp_path, local), run(tmp_path, link)
    names = set()
    for done in (first, second):
        assert (done.returncode, "the folder: 0 700\n" in done.stdout) == (0, True), done
        told = done.stdout[done.stdout.index("runs ") :].splitlines()[0]
        assert told.endswith("-m mpistrategy run example.py")
        names.add(Path(told.split("/bin/python3")[0]).name)
    assert len(names) == 2  # nobody can make it beforehand
    assert list(local.iterdir()) == []


@pytest.mark.parametrize("attack", ["folder", "link", "file"])
def test_what_another_user_has_made_first_ends_the_job(tmp_path: Path, local: Path, theirs: Path, attack: str) -> None:
    done = run(tmp_path, local, attack)
    assert (tmp_path / "was_first").exists()
    assert not (tmp_path / "executed").exists(), "code of the other user has run"
    assert done.returncode != 0, done
    assert "File exists" in done.stderr
    assert "runs " not in done.stdout
    [found] = local.iterdir()  # theirs is left as it is
    assert found.lstat().st_uid == OTHER
    assert sum(1 for _ in theirs.rglob("*")) == 1


@pytest.mark.parametrize("how", ["theirs", "open to all", "open to a group", "their link", "not there"])
def test_a_folder_in_which_others_could_replace_it_ends_the_job(
    tmp_path: Path, local: Path, theirs: Path, how: str
) -> None:
    named = {"theirs": theirs, "not there": tmp_path / "none"}.get(how, local)
    if how.startswith("open"):
        local.chmod(0o777 if how == "open to all" else 0o775)
    elif how == "their link":
        named = tmp_path / "link"
        named.symlink_to(local)
        os.chown(named, OTHER, OTHER, follow_symlinks=False)
    done = run(tmp_path, named)
    assert done.returncode != 0, done
    assert ("no such folder" if how == "not there" else "other users can replace what is in it") in done.stderr
    assert str(named) in done.stderr
    assert "runs " not in done.stdout


def test_a_copy_without_a_lock_is_removed_and_nothing_else(tmp_path: Path, local: Path, theirs: Path) -> None:
    """What a killed job of this user has left goes; what a job still uses, and what only looks like it, stays."""
    names = {
        "left behind": "mpistrategy-stage-5-abcdefghij",
        "in use": "mpistrategy-stage-6-abcdefghij",
        "theirs": "mpistrategy-stage-7-abcdefghij",
        "a link": "mpistrategy-stage-8-abcdefghij",
        "another name": "mpistrategy-run-9-abcdefghij",
    }
    for what, name in names.items():
        if what == "a link":
            (local / name).symlink_to(theirs)
        else:
            (local / name / "bin").mkdir(parents=True)
    os.chown(local / names["theirs"], OTHER, OTHER)
    descriptor = os.open(local / names["in use"], os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        done = run(tmp_path, local)
    finally:
        os.close(descriptor)
    assert done.returncode == 0, done
    assert {path.name for path in local.iterdir()} == set(names.values()) - {names["left behind"]}
    assert done.stderr.count("of a killed job") == 1, done
    assert f"here: removed {local}/{names['left behind']} of a killed job" in done.stderr
