"""Job scripts: what is rendered, byte for byte; what is refused; and that a shell reads what was meant."""

from __future__ import annotations

import ast
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import slurm_bed
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_scripts import FILES, ON_PBS, script
from slurm_statements import ARGUMENTS, PATHS, WRONG, bad, good

from mpistrategy.cli import main
from mpistrategy.cli.slurm import sites, values
from mpistrategy.cli.slurm.keys import KEYS
from mpistrategy.cli.slurm.scripts import TEMPLATES, checked, keys_of
from mpistrategy.errors import OptionError

pytestmark = pytest.mark.one_rank

SRUN = "srun: error: node1: task 1: "
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "slurm"
SCRIPTS = [name for name in FILES if not name.endswith(".py")]
JOBS = [name for name in SCRIPTS if name != "select_gpu.sh"]


def text_of(template: str, **statement: Any) -> str:
    return script(template, statement)


def written_to(file: str, template: str, **statement: Any) -> str:
    """Return what the command writes, for whom `file` is the script's name."""
    return script(template, statement, file)


def refusal(template: str, **statement: Any) -> str:
    with pytest.raises(OptionError) as caught:
        checked(template, statement)
    return str(caught.value)


def check_shell(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stderr}\n{text}"


def array_in(text: str, name: str) -> list[str]:
    """Return the array that a shell makes of the line ``name=(...)``, run in a folder that is empty."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name}=("))
    command = f"cd / && HOME=/home/you && {line} && printf '%s\\0' \"${{{name}[@]}}\""
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


# ------------------------------------------------------------------------------------------------ the files


def test_there_is_a_file_for_each_template() -> None:
    companions = {"example.py", "select_gpu.sh"}
    assert {f"{name}.sbatch" for name in TEMPLATES} | {f"pbs/{name}.pbs" for name in ON_PBS} | companions == set(FILES)
    assert len(sites.names()) == 15


def test_no_keys_change_nothing_but_the_name() -> None:
    for name, text in FILES.items():
        path = Path(name)
        if path.suffix == ".sbatch":
            assert script(path.stem) == text
        elif path.suffix == ".pbs":
            site = "\n#\n# Site pbs: any cluster with PBS Pro or OpenPBS\n\n"
            assert script(path.stem, {"site": "pbs"}).replace(site, "\n\n") == text


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_clean(name: str) -> None:
    text = FILES[name]
    check_shell(text)
    assert text.startswith("#!/bin/bash\n")
    assert all(len(line) <= 120 and line == line.rstrip() for line in text.splitlines())
    assert text.isascii()


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends_with_the_status_of_its_program(name: str) -> None:
    ends = ('exit "$status"', '"${launch[@]}" python3 -m mpistrategy run "${program[@]}"')
    assert FILES[name].rstrip().endswith(ends)
    assert 'python3" -m mpistrategy run' in FILES[name] or "python3 -m mpistrategy run" in FILES[name]


@pytest.mark.parametrize("name", [name for name in JOBS if name.endswith(".sbatch")])
def test_ranks_see_all_gpus_and_one_failure_ends_the_step(name: str) -> None:
    text = FILES[name]
    assert "--gpus-per-task" not in text
    assert name == "multi_node_mpirun.sbatch" or "srun --kill-on-bad-exit=1" in text
    assert "#SBATCH --ntasks-per-node=" in text
    launch = next(line for line in text.splitlines() if line.startswith("launch=("))
    assert "--mpi=" not in launch


@pytest.mark.parametrize("name", ["single_node", "multi_node", "requeue", "chain", "array"])
def test_three_lines_are_marked_for_editing(name: str) -> None:
    assert [line[:8] for line in FILES[f"{name}.sbatch"].splitlines() if line.startswith("# EDIT")] == [
        "# EDIT 1", "# EDIT 2", "# EDIT 3",
    ]  # fmt: skip


def test_tacc_is_asked_for_no_gpu_and_pbs_has_its_lines_together() -> None:
    for site in ("tacc", "lonestar6", "stampede3"):
        text = text_of("multi_node", site=site)
        assert not any(word in text for word in ("--gres", "gpus-per", "--export", "cpus-per-task", "--mem"))
    for name in JOBS:
        if name.endswith(".pbs"):
            lines = FILES[name].partition("# EDIT 1")[2].splitlines()[1:]
            together = [line.startswith(("#PBS", "##PBS")) for line in lines]
            assert together[0]
            assert together == sorted(together, reverse=True), name
            assert "SLURM" not in FILES[name], name
    assert "#PBS -l walltime=30:00:00" in text_of("multi_node", site="polaris", time="1-06")


@pytest.mark.parametrize("name", ["frontier", "lumi"])
def test_sites_with_gpus_of_amd_are_for_cpus_and_say_so(name: str) -> None:
    text = text_of("multi_node", site=name)
    assert "# CPU only: the GPUs of " in text
    assert "which this library does not use" in text
    assert not any("gpus" in line or "gres" in line for line in text.splitlines() if "SBATCH" in line)
    assert "found gpus_per_node=1; expected at most 0" in refusal("multi_node", site=name, gpus_per_node=1)


@pytest.mark.parametrize("name", sites.names())
def test_a_site_renders_all_its_templates(name: str) -> None:
    site = sites.load(name)
    assert site.summary
    for template in site.templates or TEMPLATES:
        check_shell(text_of(template, site=name, account="m1"))
    assert not set(tomllib.loads((sites.FOLDER / f"{name}.toml").read_text()).get("defaults", {})) - set(KEYS)
    if site.requires:
        assert f"# {name} wants: {', '.join(site.requires)}.\n" in text_of("multi_node", site=name, account="m1")


@pytest.mark.parametrize("name", [name for name in sites.names() if name != "pbs"])
def test_a_site_names_the_pages_and_the_day_that_it_was_held_against(name: str) -> None:
    site = sites.load(name)
    assert date.fromisoformat(site.checked) <= date.today()
    assert site.pages
    assert all(re.fullmatch(r'https://\S+ ".+"', page) for page in site.pages)
    text = text_of("single_node", site=name)
    assert f"held on {site.checked} against copies of these pages:\n#   {site.pages[0].split()[0]}\n" in text


def test_cray_sites_say_how_a_wheel_finds_cray_mpich() -> None:
    for name in ("alps", "frontier", "lumi", "perlmutter", "polaris"):
        text = text_of("multi_node", site=name)
        wheel = text[text.index("# module load cray-mpich-abi\n") :]
        assert wheel.splitlines()[1] == '# export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:${LD_LIBRARY_PATH-}"'
        assert ("libmpi_gtl_cuda.so" in text) == (name not in ("frontier", "lumi"))
        assert "add --mpi=pmi2" not in text, "the MPI that srun then starts talks by TCP"
    assert "\nexport MPICH_GPU_SUPPORT_ENABLED=0\n" in text_of("multi_node", site="alps")
    assert "--system-site-packages" in text_of("multi_node", site="lumi")


def test_polaris_uses_its_modules_its_launcher_and_a_queue_that_takes_two_nodes() -> None:
    text = text_of("multi_node", site="polaris")
    assert "\nmodule use /soft/modulefiles\nmodule load conda\n" in text
    assert "\ntasks_per_node=4 " in text
    assert "\ncpus_per_task=8 " in text
    assert 'launch=(mpiexec -n "$ranks" --ppn "$tasks_per_node" --depth="$cpus_per_task" --cpu-bind=depth)' in text
    assert "#PBS -q debug\n" in text
    assert text.index("-m mpistrategy doctor") < text.index("-m mpistrategy run")


def test_what_a_site_says_stays_out_of_the_way_of_other_keys(tmp_path: Path) -> None:
    assert "launch=(mpirun" in text_of("multi_node_mpirun", site="perlmutter"), "not srun"
    polaris = text_of("multi_node", site="polaris", venv="~/v")
    assert polaris.index("module load conda") < polaris.index("bin/activate"), "the venv's Python comes first"
    assert "found mpiexec=pals; expected PALS under PBS alone, and no bind_to=" in refusal(
        "multi_node", site="polaris", bind_to="none"
    )
    (tmp_path / "mine.toml").write_text('launch = ["export A=1", "launch=(srun)"]\n')
    text = text_of("single_node", site=str(tmp_path / "mine.toml"), mpi="pmix", extra="--mem=1 --mem-bind=local")
    assert "\nexport A=1\nlaunch=(srun --mpi=pmix)\n" in text
    assert "\n#SBATCH --mem=1\n#SBATCH --mem-bind=local\n" in text
    (tmp_path / "mine.toml").write_text('batch = "lsf"\n')
    assert "found batch='lsf'; expected slurm or pbs" in refusal("single_node", site=str(tmp_path / "mine.toml"))


def test_threads_are_counted_by_cores_where_a_site_counts_hardware_threads() -> None:
    line = next(line for line in text_of("single_node", site="juwels").splitlines() if "OMP_NUM_THREADS" in line)
    for cpus, threads in ((24, "12"), (1, "1"), (3, "2")):
        command = f"SLURM_CPUS_PER_TASK={cpus}; {line.partition('#')[0]}; echo $OMP_NUM_THREADS"
        done = subprocess.run(["bash", "-uc", command], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == threads


def test_the_companion_program_is_python() -> None:
    assert "CheckpointManager" in {
        node.attr for node in ast.walk(ast.parse(FILES["example.py"])) if isinstance(node, ast.Attribute)
    }


# ------------------------------------------------------------------------------------------------ what is rendered


def test_values_are_where_they_belong() -> None:
    text = text_of(
        "multi_node", account="m1234", partition="gpu", qos="debug", constraint="gpu&hbm80g", nodes="16", time="90",
        gpus_per_node=4, cpus_per_task=32, memory="0", exclusive=True, mpi="pmix", venv="~/my venv", extra="--nice=5",
        modules="gcc cuda/12", program="my train.py", arguments="--rate 0.1 'two words'", reservation="r1",
        output="o-%j",
    )  # fmt: skip
    for line in (
        "#SBATCH --account=m1234", "#SBATCH --partition=gpu", "#SBATCH --qos=debug",
        '#SBATCH --constraint="gpu&hbm80g"',
        "#SBATCH --nodes=16", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=32",
        "#SBATCH --mem=0", "#SBATCH --exclusive", "#SBATCH --time=01:30:00", "#SBATCH --nice=5",
        "module load gcc cuda/12",
        "#SBATCH --reservation=r1", "source \"$HOME\"/'my venv'/bin/activate", "#SBATCH --output=o-%j",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert array_in(text, "program") == ["my train.py", "--rate", "0.1", "two words"]
    assert "--cpu-bind=cores --mpi=pmix)" in text
    assert "--gpu-bind" not in text
    assert "##SBATCH" not in text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (90, "01:30:00"), ("1", "00:01:00"), ("1440", "24:00:00"), ("2:00:00", "02:00:00"),
        ("48:00:00", "48:00:00"),
        ("1-0", "24:00:00"), ("1-02:03", "26:03:00"), ("1-02:03:04", "26:03:04"), ("366-00", "8784:00:00"),
    ],
)  # fmt: skip
def test_times_are_written_in_one_way(written: object, meant: str) -> None:
    assert values.time(written, "time") == meant
    assert values.time(f"00:00:{values.in_seconds('00:00:59')}", "time") == "00:00:59"


@given(good())
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_good_statements_give_scripts_that_a_shell_reads(case: tuple[str, dict[str, Any]]) -> None:
    template, statement = case
    text = text_of(template, **statement)
    assert text == text_of(template, **dict(reversed(statement.items())))  # whatever the order
    check_shell(text)
    program = str(statement.get("program", "example.py"))
    wanted = [program, *statement.get("arguments", [])]
    assert array_in(text, "program")[: len(wanted)] == wanted
    assert all(line.startswith(("#", "##")) for line in text.partition("# EDIT 2")[0].splitlines() if line)


@given(st.sampled_from(["program", "venv", "image", "archive"]), PATHS)
@settings(max_examples=40, deadline=None)
def test_a_path_comes_out_of_the_shell_as_it_went_in(key: str, path: str) -> None:
    words = subprocess.run(["bash", "-c", f"printf %s {values.path(path, key)}"], capture_output=True, check=True)
    assert words.stdout.decode() == path


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
    check_shell(text)


# ------------------------------------------------------------------------------------------------ what is refused


@given(bad())
@settings(max_examples=200, deadline=None)
def test_bad_statements_are_refused(case: tuple[str, dict[str, Any]]) -> None:
    template, statement = case
    with pytest.raises(OptionError) as caught:
        checked(template, statement)
    text = str(caught.value)
    assert text.startswith("mpistrategy slurm")
    assert "found" in text
    assert "expected" in text
    assert text.isprintable()


def test_every_key_is_tried_with_wrong_values() -> None:
    assert set(WRONG) == {*KEYS, "site"}


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ({"node": 2}, "found the key 'node'; expected keys of the template multi_node: site, job_name, account"),
        ({"array": "0-3"}, "Others have it: another template"),
        (
            {"gpus_per_node": 4, "tasks_per_node": 8},
            "as many ranks as GPUs: a rank drives one. Leave tasks_per_node out",
        ),
        ({"site": "perlmutter", "gpus_per_node": 8}, "found gpus_per_node=8; expected at most 4 on perlmutter"),
        ({"site": "lumi", "gpus_per_node": 8}, "none that this library can use"),
        (
            {"site": "atlantis"},
            "one of alps, aurora, frontier, jupiter, juwels, leonardo, levante, lonestar6, lumi, pbs, perlmutter, ",
        ),
        ({"site": "polaris", "qos": "debug"}, "found the key 'qos'"),
        ({"site": "tacc", "mpi": "pmix"}, "found the key 'mpi'"),
        ({"site": "tacc", "memory": "64G"}, "found memory=; expected no such key: tacc refuses jobs that have it"),
        ({"time": "1:30"}, "Slurm takes two numbers for minutes and seconds; write H:MM:SS."),
        ({"extra": "-n4"}, "options such as --nice=10 or --contiguous"),
        ({"program": "$HOME/x.py"}, "Nothing is expanded but a leading ~/; write the whole path out."),
        ({"account": "a\nb"}, r"Take '\n' out."),
    ],
)
def test_refusals_say_what_to_do(statement: dict[str, Any], what: str) -> None:
    assert what in refusal("multi_node", **statement)


def test_templates_that_a_site_does_not_have_and_leads_that_are_too_long() -> None:
    assert "expected one of single_node, multi_node, array" in refusal("chain", site="tacc")
    assert "less than the time limit" in refusal("requeue", time=2, signal_lead=120)
    assert "expected one of single_node, multi_node, multi_node_mpirun" in refusal("many")


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        ("name = 'x'", "found the key 'name'; expected keys out of summary (str), notes (list)"),
        ("gpus = '4'", "found the key 'gpus'; expected keys out of "),
        ("requires = ['nobody']", "an unknown key 'nobody'"),
        ('setup = ["a\\nb"]', "Take '\\n' out"),
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
        '[defaults]\ngpus_per_node = 2\npartition = "all"\n'
    )
    lines = text_of("single_node", site=str(path)).splitlines()
    assert {"# Site mine: ours", "#SBATCH --licenses=scratch", "export A=1", "#SBATCH --partition=all"} <= set(lines)
    assert "#SBATCH --ntasks-per-node=2" in lines


#: What may stand in a profile, or in a job's file, and a word of what is said of it.
NO_TOML: dict[str, tuple[Callable[[Path], object], str]] = {
    "a deep one": (lambda path: path.write_text("x = " + "[" * 10_000), "nested too deeply"),
    "a long one": (lambda path: path.write_text("x = " + "[" * 100_000), "more than"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a key of many parts": (lambda path: path.write_text("a." * 8_000 + "a = 1"), "a"),
    "a number of many digits": (lambda path: path.write_text("nodes = " + "9" * 10_000), "digits"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_TOML)
@pytest.mark.slow
def test_files_that_were_made_up_to_harm(capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str) -> None:
    make, word = NO_TOML[what]
    make(tmp_path / "x.toml")
    began = time.process_time()  # on a busy machine, too
    for arguments in ([f"site={tmp_path / 'x.toml'}"], ["--from", tmp_path / "x.toml"]):
        status, _, told = command(capsys, "single_node", *arguments)
        assert (status, word in told) == (2, True), told[:500]
    assert time.process_time() - began < 3


def test_a_profile_may_be_named_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('summary = "ours"\n')
    (tmp_path / "x.toml").symlink_to("mine.toml")
    assert sites.load(str(tmp_path / "x.toml")).summary == "ours"


# ------------------------------------------------------------------------------------------------ the command


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main.main(["slurm", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command(capsys, "multi_node") == (0, written_to("FILE", "multi_node"), "")
    source = tmp_path / "job.toml"
    source.write_text('nodes = 4\narguments = ["--rate", "0.1"]\ntime = "1:00:00"\n')
    status, printed, _ = command(capsys, "multi_node", "nodes=8", "--from", source)
    assert (status, printed) == (0, written_to("FILE", "multi_node", nodes=8, arguments=["--rate", "0.1"], time=60))


def test_files_are_overwritten_with_force_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a job.sbatch"
    assert command(capsys, "single_node", "-o", path) == (0, "", "")
    status, _, told = command(capsys, "single_node", "nodes=1", "-o", path)
    assert status == 2
    assert "found the key 'nodes'" in told
    status, _, told = command(capsys, "single_node", "time=5", "-o", path)
    assert (status, path.read_text()) == (2, written_to("'a job.sbatch'", "single_node"))
    assert "--force overwrites it." in told
    assert command(capsys, "single_node", "time=5", "-o", path, "--force")[0] == 0
    assert path.read_text() == written_to("'a job.sbatch'", "single_node", time=5)


def test_a_disk_that_is_full_leaves_the_script_that_was_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, link = tmp_path / "job.sbatch", tmp_path / "link"
    path.write_text("mine")
    path.chmod(0o750)
    link.symlink_to(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        status, _, told = command(capsys, "single_node", "-o", link, "--force")
    assert (status, path.read_text(), sorted(tmp_path.iterdir())) == (2, "mine", [path, link])
    assert "No space left on device" in told
    assert command(capsys, "single_node", "-o", link, "--force")[0] == 0
    assert (path.read_text(), path.stat().st_mode & 0o777) == (written_to("link", "single_node"), 0o750)
    assert link.is_symlink()
    assert command(capsys, "single_node", "-o", "/dev/null", "--force")[0] == 0
    assert Path("/dev/null").is_char_device()
    assert command(capsys, "single_node", "-o", tmp_path, "--force")[0] == 2
    done = subprocess.run(
        [sys.executable, "-B", "-m", "mpistrategy", "slurm", "single_node", "-o", str(tmp_path / "new")],
        preexec_fn=_may_write_no_file, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "File too large" in done.stderr, (tmp_path / "new").exists()) == (2, True, False), done


def _may_write_no_file() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


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


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, _ = command(capsys, "--list")
    assert status == 0
    assert all(f"  {name} " in printed for name in (*TEMPLATES, *KEYS, *sites.names()))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "name a template, or --list, or --all FOLDER"),
        (["multi_node", "nodes"], "found 'nodes'; expected each key once, as KEY=VALUE"),
        (["multi_node", "nodes=1", "nodes=2"], "found 'nodes' twice"),
        (["multi_node", "--from", "/there/is/none.toml"], "No such file"),
        (["multi_node", "-o", "/there/is/none"], "No such file"),
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


def test_where_there_can_be_no_slurm_the_tests_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*slurm_bed.PROGRAMS, "true"):
        (tmp_path / name).symlink_to("/bin/true")
    (tmp_path / "unshare").unlink()
    monkeypatch.setattr(slurm_bed, "SEARCH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_bed.why_not().startswith("no unshare on this machine (Debian: apt-get install")
    (tmp_path / "unshare").symlink_to("/bin/false")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert slurm_bed.why_not() == "starting a Slurm for tests needs root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert slurm_bed.why_not() == "this machine allows no namespaces"
    (tmp_path / "unshare").unlink()
    (tmp_path / "unshare").symlink_to("/bin/true")
    assert slurm_bed.why_not() == ""


def test_the_command_starts_no_mpi() -> None:
    code = "import sys, mpistrategy.cli.main as c; c.main(['slurm', '--list']); sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# ------------------------------------------------------------------------------------- a shell runs it


@pytest.mark.parametrize(
    ("srun", "told", "status"),
    [
        ("rm -f $file", "the program is done", 0),
        ("true", "the program has not ended, whatever the launcher says; back to the queue", 75),
        ("echo stopped with status 75 >>$file; exit 75", "the program stopped with status 75; back to the queue", 75),
        ("exit 143", "the program stopped with status 143; back to the queue", 143),
        ("exit 14", "the program stopped with status 14; back to the queue", 14),
        ("rm -f $file; exit 3", "the program failed with status 3; not requeued", 3),
        (
            "echo stopped >>$file; echo failed with X on rank 1: y >>$file; exit 143",
            "program failed with X on rank 1: y; not",
            143,
        ),
        ("echo failed with status 2 on rank 0 >>$file", "the program failed with status 2 on rank 0; not requeued", 1),
        (f"echo {SRUN}Out Of Memory >&2; exit 1", f"the program was ended: {SRUN}Out Of Memory; not requeued", 1),
        (f"echo {SRUN}Segmentation fault >&2; exit 143", "Segmentation fault; not requeued", 143),
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
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
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
    shutil.copy(ROOT / "mpistrategy" / "cli" / "requeue.py", tmp_path)
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    for launcher, status, told in (("exit 75", 75, "back to the queue\nscontrol requeue 7\n"), ("exit 3", 3, "")):
        words = ["--", "bash", "-c", launcher]
        done = subprocess.run(
            [sys.executable, "-I", "requeue.py", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == status, done
        assert done.stdout.decode().endswith(told), done
    assert b"the program failed with status 3; not requeued" in done.stderr


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


def test_a_word_for_the_batch_system_brings_no_other_words() -> None:
    for key, given_text in (
        ("output", "my logs/out.txt"),
        ("constraint", "a b"),
        ("account", 'a" --x="'),
        ("mpi", "a b"),
    ):
        assert f"found {key}=" in refusal("single_node", **{key: given_text})
    text = text_of("single_node", mpi="pmi2;id", modules="gcc;id")
    assert "--mpi='pmi2;id')" in text
    assert "module load 'gcc;id'" in text


def test_pbs_directives_with_an_output_and_resources() -> None:
    text = text_of("single_node", site="pbs", output="logs/out.txt", constraint="gpu_type=a100:arch=linux")
    assert "\n#PBS -o logs/out.txt\n" in text
    assert re.search(r"(?m)^#PBS -l select=1:\S+:gpu_type=a100:arch=linux$", text)


def test_a_script_speaks_of_itself_by_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["slurm", "requeue", "-o", str(tmp_path / "my job.sh")]) == 0
    text = (tmp_path / "my job.sh").read_text()
    assert "\n#     sbatch 'my job.sh'  " in text
    assert main.main(["slurm", "requeue"]) == 0
    shown = capsys.readouterr().out
    assert "\n#     sbatch FILE  " in shown
    for said in (text, shown):
        assert "requeue.sbatch" not in said
        assert "beside this file" not in said
    evil = tmp_path / "a\ntouch b"
    assert main.main(["slurm", "requeue", "-o", str(evil)]) == 0
    assert "touch b" not in evil.read_text()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("single_node", "task_per_node=4"), "tasks_per_node"),
        (("multi-node",), "multi_node"),
        (("single_node", "gpu_option=gpu-per-node"), "gpus-per-node"),
    ],
)
def test_the_nearest_name_is_told(words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["slurm", *words]) != 0
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err
