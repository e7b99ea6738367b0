"""Job scripts: what is rendered, byte for byte; what is refused; and that a shell reads what was meant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_scripts import FILES, executable, script

from mpistrategy.cli import main
from mpistrategy.cli.slurm import sites
from mpistrategy.cli.slurm.keys import KEYS
from mpistrategy.cli.slurm.scripts import TEMPLATES, checked, keys_of
from mpistrategy.errors import OptionError

pytestmark = pytest.mark.one_rank

SRUN = "srun: error: node1: task 1: "
# What a path may be, with all that a shell would make something of.
PATHS = st.text(st.sampled_from("abz019_. -/'\"\\()&;|<>*?[]{}!#%^~äß"), min_size=1, max_size=20).filter(
    lambda text: text == text.strip() and not text.startswith(("-", "~"))
)
ARGUMENTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "slurm"
REQUEUE = ROOT / "mpistrategy" / "cli" / "requeue.py"


def text_of(template: str, file: str = "", **statement: Any) -> str:
    """Return what the command writes, for whom `file` is the script's name."""
    return script(template, statement, file)


def refusal(template: str, **statement: Any) -> str:
    with pytest.raises(OptionError) as caught:
        checked(template, statement)
    return str(caught.value)


def array_in(text: str, name: str) -> list[str]:
    """Return the array that a shell makes of the line ``name=(...)``, run in a folder that is empty."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name}=("))
    command = f"cd / && HOME=/home/you && {line} && printf '%s\\0' \"${{{name}[@]}}\""
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


# ------------------------------------------------------------------------------------------------ the files


def test_no_keys_change_nothing_but_the_name() -> None:
    for name, text in FILES.items():
        path = Path(name)
        if path.suffix == ".sbatch":
            assert script(path.stem) == text
        elif path.suffix == ".pbs":
            site = "\n#\n# Site pbs: any cluster with PBS Pro or OpenPBS\n\n"
            assert script(path.stem, {"site": "pbs"}).replace(site, "\n\n") == text


# ------------------------------------------------------------------------------------------------ what is rendered


def test_values_are_where_they_belong() -> None:
    text = text_of(
        "multi_node", account="m1234", partition="gpu", qos="debug", constraint="gpu&hbm80g", nodes=16, time="1:30:00",
        gpus_per_node=4, cpus_per_task=32, memory="0", exclusive=True, mpi="pmix", venv="~/my venv", extra="--nice=5",
        modules="gcc cuda/12", program="my train.py", arguments="--rate 0.1 'two words'", reservation="r1",
        output="o-%j",
    )  # fmt: skip
    for line in (
        "#SBATCH --account=m1234", "#SBATCH --partition=gpu", "#SBATCH --qos=debug",
        '#SBATCH --constraint="gpu&hbm80g"',
        "#SBATCH --nodes=16", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=32",
        "#SBATCH --mem=0", "#SBATCH --exclusive", "#SBATCH --time=1:30:00", "#SBATCH --nice=5",
        "module load gcc cuda/12",
        "#SBATCH --reservation=r1", "source \"$HOME\"/'my venv'/bin/activate", "#SBATCH --output=o-%j",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert array_in(text, "program") == ["my train.py", "--rate", "0.1", "two words"]
    assert "--cpu-bind=cores --mpi=pmix)" in text
    assert "--gpu-bind" not in text
    assert "##SBATCH" not in text


@pytest.mark.parametrize(
    ("mpiexec", "bound"),
    [("openmpi", " --bind-to core)"), ("mpich", " -bind-to core:"), ("intel", " I_MPI_PIN_DOMAIN=")],
)
def test_ranks_are_bound_to_cores(mpiexec: str, bound: str) -> None:
    assert bound in text_of("multi_node_mpirun", mpiexec=mpiexec)


@given(PATHS, st.lists(ARGUMENTS))
@settings(max_examples=40, deadline=None)
def test_words_come_out_of_the_shell_as_they_went_in(path: str, arguments: list[str]) -> None:
    text = text_of("single_node", program=path, arguments=arguments)
    assert array_in(text, "program") == [path, *arguments]


@given(st.sampled_from(sorted(KEYS)), st.text(max_size=30) | ARGUMENTS)
@settings(max_examples=150, deadline=None)
def test_no_text_makes_a_line_of_its_own(key: str, given_text: str) -> None:
    template = next(name for name in TEMPLATES if key in keys_of(name, sites.Site()))
    try:
        text = text_of(template, **{key: given_text})
    except OptionError:
        return
    usual = text_of(template)
    # Values that are not there by default bring lines of their own; what they hold brings none.
    assert abs(len(text.splitlines()) - len(usual.splitlines())) <= 3
    assert text.count("\n") == len(text.splitlines())
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stderr}\n{text}"


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("template", "statement", "what"),
    [
        (
            "multi_node", {"node": 2},
            "found the key 'node'; expected keys of the template multi_node: site, job_name, account",
        ),
        ("multi_node", {"array": "0-3"}, "Others have it: another template"),
        (
            "multi_node", {"gpus_per_node": 4, "tasks_per_node": 8},
            "as many ranks as GPUs: a rank drives one. Leave tasks_per_node out",
        ),
        ("multi_node", {"site": "perlmutter", "gpus_per_node": 8}, "expected at most 4 on perlmutter"),
        ("multi_node", {"site": "lumi", "gpus_per_node": 8}, "none that this library can use"),
        ("multi_node", {"site": "atlantis"}, "one of alps, aurora, frontier, jupiter, juwels, "),
        ("multi_node", {"site": "polaris", "qos": "debug"}, "found the key 'qos'"),
        ("multi_node", {"site": "tacc", "mpi": "pmix"}, "found the key 'mpi'"),
        ("multi_node", {"site": "tacc", "memory": "64G"}, "no such key: tacc refuses jobs that have it"),
        ("multi_node", {"time": "1:30"}, "expected H:MM:SS, as 2:00:00"),
        ("multi_node", {"extra": "-n4"}, "options such as --nice=10 or --contiguous"),
        ("multi_node", {"program": "$HOME/x.py"}, "Nothing is expanded but a leading ~/; write the whole path out."),
        ("multi_node", {"account": "a\nb"}, "one line of characters that can be seen"),
        ("single_node", {"output": "my logs/out.txt"}, "found output="),
        ("single_node", {"account": 'a" --x="'}, "found account="),
        ("multi_node", {"nodes": 0}, "found nodes=0; expected a whole number from 1 on"),
        ("multi_node", {"nodes": True}, "found nodes=True; expected a text"),
        ("multi_node", {"gpus_per_node": "a100:"}, "expected a number, or a type and a number such as a100:4"),
        ("multi_node", {"gpus_per_node": 65}, "expected at most 64 on a node"),
        ("multi_node", {"exclusive": "maybe"}, "expected one of true, false"),
        ("multi_node", {"arguments": "'open"}, "words as on a command line. No closing quotation."),
        ("multi_node", {"venv": "~other/venv"}, "Nothing is expanded but a leading ~/"),
        ("chain", {"site": "tacc"}, "expected one of single_node, multi_node, array"),
        ("requeue", {"time": "0:02:00", "signal_lead": 120}, "less than the time limit"),
        ("many", {}, "expected one of single_node, multi_node, multi_node_mpirun"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(template: str, statement: dict[str, Any], what: str) -> None:
    assert what in refusal(template, **statement)


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        ("name = 'x'", "found the key 'name'; expected keys out of summary (str), notes (list)"),
        ("gpus = '4'", "found the key 'gpus'; expected keys out of "),
        ("skip = ['nobody']", "an unknown key 'nobody'"),
        ("[defaults]\nnode = 1", "an unknown key 'node'"),
        ("[defaults]\nnodes = 0", "nodes=0"),
        ("summary =", "a file in TOML that can be read"),
    ],
)
def test_profiles_that_are_refused(tmp_path: Path, profile: str, what: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(profile)
    assert what in refusal("multi_node", site=str(path))


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'summary = "ours"\ngpus = 2\ndirectives = ["--licenses=scratch"]\nsetup = ["export A=1"]\n'
        'launch = ["export B=1", "launch=(srun)"]\n[defaults]\ngpus_per_node = 2\npartition = "all"\n'
    )
    lines = text_of("single_node", site=str(path), mpi="pmix", extra="--mem=1 --mem-bind=local").splitlines()
    for line in (
        "# Site mine: ours", "#SBATCH --licenses=scratch", "export A=1", "#SBATCH --partition=all",
        "#SBATCH --ntasks-per-node=2", "export B=1", "launch=(srun --mpi=pmix)", "#SBATCH --mem=1",
        "#SBATCH --mem-bind=local",
    ):  # fmt: skip
        assert line in lines


# ------------------------------------------------------------------------------------------------ the command


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main.main(["slurm", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command(capsys, "multi_node") == (0, text_of("multi_node", "FILE"), "")
    status, printed, _ = command(capsys, "multi_node", "nodes=8", "arguments=--rate 0.1", "time=1:00:00")
    assert (status, printed) == (0, text_of("multi_node", "FILE", nodes=8, arguments=["--rate", "0.1"], time="1:00:00"))
    evil = tmp_path / "a\ntouch b"
    assert command(capsys, "requeue", "-o", evil)[0] == 0
    assert "touch b" not in evil.read_text()


def test_files_are_overwritten_with_force_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, link = tmp_path / "a job.sbatch", tmp_path / "link"
    assert command(capsys, "single_node", "-o", path) == (0, "", "")
    link.symlink_to(path)
    status, _, told = command(capsys, "single_node", "time=0:05:00", "-o", path)
    assert (status, path.read_text()) == (2, text_of("single_node", "'a job.sbatch'"))
    assert "--force overwrites it." in told

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        status, _, told = command(capsys, "single_node", "time=0:05:00", "-o", link, "--force")
    assert (status, path.read_text()) == (2, text_of("single_node", "'a job.sbatch'"))
    assert "No space left on device" in told
    assert command(capsys, "single_node", "time=0:05:00", "-o", link, "--force")[0] == 0
    assert path.read_text() == text_of("single_node", "link", time="0:05:00")
    assert link.is_symlink()
    assert command(capsys, "single_node", "-o", tmp_path, "--force")[0] == 2


def test_all_files_are_written_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "slurm"
    assert command(capsys, "--all", folder)[0] == 0
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(FILES)
    (folder / "chain.sbatch").write_text("mine")
    (folder / "array.sbatch").unlink()
    assert command(capsys, "--all", folder)[0] == 2
    assert not (folder / "array.sbatch").exists()
    assert (folder / "chain.sbatch").read_text() == "mine"
    assert command(capsys, "--all", folder, "--force")[0] == 0
    assert (folder / "chain.sbatch").read_text() == FILES["chain.sbatch"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "found no template; expected a template, or --list, or --all FOLDER"),
        (["multi_node", "nodes"], "found nodes=''; expected one line of characters"),
        (["multi_node", "-o", "/there/is/none"], "No such file"),
        (["single_node", "task_per_node=4"], "Did you mean 'tasks_per_node'?"),
        (["multi-node"], "Did you mean 'multi_node'?"),
        (["single_node", "gpu_option=gpu-per-node"], "Did you mean 'gpus-per-node'?"),
    ],
)
def test_what_the_command_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], what: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    status, printed, told = command(capsys, *arguments)
    assert (status, printed) == (2, "")
    assert what in told


def test_select_gpu_gives_each_rank_its_own(tmp_path: Path) -> None:
    def gpu(**environment: str) -> tuple[int, str]:
        script = 'printf \'%s|\' "$CUDA_VISIBLE_DEVICES" "$@"'
        done = subprocess.run(
            [str(FOLDER / "select_gpu.sh"), "bash", "-c", script, "bash", "two words"],
            env={"PATH": "/usr/bin:/bin", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout or done.stderr

    assert gpu(SLURM_LOCALID="1", CUDA_VISIBLE_DEVICES="4,5,6") == (0, "5|two words|")
    assert gpu(SLURM_LOCALID="0", OMPI_COMM_WORLD_LOCAL_RANK="2", MPISTRATEGY_GPU_MAP="3,2,1,0") == (0, "1|two words|")
    assert gpu(MPI_LOCALRANKID="0", CUDA_VISIBLE_DEVICES="GPU-abc")[1] == "GPU-abc|two words|"
    assert gpu(CUDA_VISIBLE_DEVICES="0")[0] == 2
    assert "start fewer ranks" in gpu(SLURM_LOCALID="1", CUDA_VISIBLE_DEVICES="0")[1]
    assert gpu(SLURM_LOCALID="a[$(id)]", CUDA_VISIBLE_DEVICES="0")[0] == 2


# ------------------------------------------------------------------------------------- a shell runs it


@pytest.mark.parametrize(
    ("srun", "told", "status"),
    [
        ("rm -f $file", "the program is done", 0),
        ("true", "the program has not ended, whatever the launcher says; back to the queue", 75),
        ("echo stopped with status 75 >>$file; exit 75", "the program stopped with status 75; back to the queue", 75),
        ("exit 143", "the program stopped with status 143; back to the queue", 143),
        ("rm -f $file; exit 3", "the program failed with status 3; not requeued", 3),
        (
            "echo stopped >>$file; echo failed with X on rank 1: y >>$file; exit 143",
            "program failed with X on rank 1: y; not",
            143,
        ),
        ("echo failed with status 2 on rank 0 >>$file", "the program failed with status 2 on rank 0; not requeued", 1),
        (f"echo {SRUN}Out Of Memory >&2; exit 1", f"the program was ended: {SRUN}Out Of Memory; not requeued", 1),
        (f"echo {SRUN}Segmentation fault >&2; exit 143", "Segmentation fault; not requeued", 143),
        ("echo 'EXIT STRING: Bus error (signal 7)' >&2; exit 7", "Bus error (signal 7); not requeued", 7),
        ("echo 'KILLED BY SIGNAL: 9 (Killed)' >&2; exit 9", "SIGNAL: 9 (Killed); not requeued", 9),
        (f"echo {SRUN}Terminated >&2; exit 143", "the program stopped with status 143; back to the queue", 143),
        (
            f": >$file; echo {SRUN}Aborted >&2; exit 143",
            "stopped with status 143; back to the queue",
            143,
        ),  # in MPI_Init
        ("echo 'Killed by nobody' >&2; exit 143", "the program stopped with status 143; back to the queue", 143),
    ],
)
def test_the_end_of_a_job_that_may_be_requeued(tmp_path: Path, srun: str, told: str, status: int) -> None:
    """What the ranks have written decides, then what the launcher says of signals; its status does not."""
    file = ".mpistrategy-7.unfinished"
    for name, text in {
        "srun": f"[[ $* != *1\\ true ]] || exit 0\nfile={file}; echo begun >$file\n{srun}",
        "scontrol": 'echo "scontrol $*"',
        "python3": f'shift 3; exec {sys.executable} -I {REQUEUE} "$@"',  # it is quick
    }.items():
        executable(tmp_path / name, text)
    (tmp_path / "job").write_text(text_of("requeue"))
    log = tmp_path / "log"
    log.write_text(f"{SRUN}Out Of Memory\n")  # of the start before
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}
    environment["SLURM_JOB_NUM_NODES"] = "1"
    with log.open("a") as output:
        done = subprocess.run(["bash", "job"], cwd=tmp_path, env=environment, stdout=output, stderr=output, check=False)
    written = log.read_text()
    assert done.returncode == status, written
    assert told in written
    assert ("scontrol requeue 7" in written) == ("back to the queue" in told)
    assert not (tmp_path / file).exists()


def test_a_copy_beside_the_script_needs_no_package(tmp_path: Path) -> None:
    """Where a container holds the package, and the node that runs the script has another Python."""
    shutil.copy(REQUEUE, tmp_path)
    executable(tmp_path / "scontrol", 'echo "scontrol $*"')
    for restarts, launcher, told in (
        (9, "exit 75", "the program stopped with status 75; back to the queue\nscontrol requeue 7\n"),
        (9, "exit 3", "the program failed with status 3; not requeued\n"),
        (10, "exit 75", "not done after 10 restarts; not requeued\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-I", "requeue.py", "--", "bash", "-c", launcher],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == int(launcher.split()[1]), done
        assert done.stdout.endswith(told), done


def test_a_file_of_a_chain_that_was_killed(tmp_path: Path) -> None:
    """The next job of the chain removes what the one before left; both remove their own when they are ended by TERM."""
    for name, text in {
        "srun": "touch started; exec sleep 60",
        "sbatch": 'echo 9; echo "$@" >given',
        "scancel": "true",
    }.items():
        executable(tmp_path / name, text)
    (tmp_path / ".mpistrategy-7.unfinished").touch()
    (tmp_path / ".mpistrategy-6.unfinished").touch()
    script = FOLDER / "chain.sbatch"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "node1"}
    with subprocess.Popen(["bash", script, "2", "7"], cwd=tmp_path, env=environment, start_new_session=True) as job:
        end = time.monotonic() + 30
        while not (tmp_path / "started").exists() and time.monotonic() < end:
            time.sleep(0.01)
        job.terminate()
        assert job.wait(30) == -15
        os.killpg(job.pid, 9)  # srun, which goes on
    assert (tmp_path / "given").read_text().split()[-2:] == ["3", "8"]
    assert sorted(path.name for path in tmp_path.glob(".mpistrategy-*")) == [".mpistrategy-6.unfinished"]
