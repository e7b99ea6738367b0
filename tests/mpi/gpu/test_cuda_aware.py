"""Does this MPI take GPU memory?  The word of the user, what the doctor has found, what a library says of itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import launching
import pytest

from mpistrategy.cli.doctor import cuda_trial
from mpistrategy.errors import OptionError
from mpistrategy.mpi.gpu import cuda_aware
from mpistrategy.mpi.gpu.cuda_aware import VARIABLE, Outcome, user_setting

pytestmark = pytest.mark.one_rank
VERSION = "MPICH Version: 4.3.0\nbuilt with CUDA"
LIBRARY = (VERSION, "/opt/mpich/lib/libmpi.so.12")
RIGHT, WRONG = Outcome("right", "two ranks"), Outcome("wrong", "other numbers")
SLOWER = Outcome("slower", "two ranks")


def test_the_word_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, word in {"": None, "1": True, "0": False, "OFF": False, "yes": True}.items():
        monkeypatch.setenv(VARIABLE, text)
        assert user_setting() is word
    for text in ("ja", "2", " 1", "auto", "cuda"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(OptionError, match=rf"{VARIABLE}: found '{text}'; expected 1, on, true or yes; or 0"):
            user_setting()


# ------------------------------------------------------------------------------------- what the doctor has found


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in cuda_aware.settings():
        monkeypatch.delenv(name)
    monkeypatch.setattr(cuda_aware, "identity", lambda: LIBRARY)
    return tmp_path / "mpistrategy"


@pytest.mark.parametrize(
    ("near", "far", "on_one", "on_two"),
    [
        (None, None, "not tried with these settings yet", "not tried with these settings yet on several nodes"),
        (RIGHT, None, "", "not tried with these settings yet on several nodes"),
        (None, RIGHT, "not tried with these settings yet", ""),
        (RIGHT, RIGHT, "", ""),
        (WRONG, RIGHT, "other numbers", "other numbers"),
        (RIGHT, WRONG, "", "other numbers"),
        (SLOWER, RIGHT, "slower than the host", ""),
        (RIGHT, SLOWER, "", "slower than the host"),
    ],
)
def test_the_outcome_of_the_doctors_trial_decides(
    cache: Path, near: Outcome | None, far: Outcome | None, on_one: str, on_two: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if near is not None:
        cuda_aware.save("one node", near)
    if far is not None:
        cuda_aware.save("several nodes", far)
    for nodes, words in ((1, on_one), (2, on_two)):
        found = cuda_aware.obstacle(nodes)
        assert bool(found) is bool(words)
        assert words in found
    monkeypatch.setenv(VARIABLE, "1")
    assert cuda_aware.obstacle(2) == "", "the user has the last word"
    monkeypatch.setenv(VARIABLE, "0")
    assert VARIABLE in cuda_aware.obstacle(1)


def test_an_outcome_is_of_its_library_and_settings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cuda_aware.save("one node", RIGHT)
    assert cuda_aware.load("one node") == RIGHT
    assert [each.name for each in cache.iterdir()] == [file.name]
    monkeypatch.setenv("OMPI_MCA_orte_ess_num_procs", "2")  # the launcher's
    assert cuda_aware.load("one node") == RIGHT
    for name in ("UCX_TLS", "OMPI_MCA_pml", "MPICH_GPU_SUPPORT_ENABLED", "FI_PROVIDER", "MV2_USE_CUDA"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            assert cuda_aware.load("one node") is None
    for other in ((f"{VERSION}, another one", LIBRARY[1]), (VERSION, "/opt/without-cuda/lib/libmpi.so.12")):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_aware, "identity", lambda other=other: other)
            assert cuda_aware.load("one node") is None
    for spoiled in ("", "{", "[]", "3", '{"outcome": "right"}', '{"outcome": "fine", "reason": ""}'):
        file.write_text(spoiled)
        assert cuda_aware.load("one node") is None


# ------------------------------------------------------------------------------------- what a library says

OLD, NEW = "int MPIX_Query_cuda_support(void)", "int MPIX_GPU_query_support(int kind, int *flag)"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="not run: no gcc on this machine")
@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("libmpi.so.40", f"{OLD} {{ return 1; }}", True),
        ("libmpi.so.40", f"{OLD} {{ return 1; }} char opal_cuda_support = 1;", True),
        ("libmpi.so.40", f"{OLD} {{ return 1; }} char opal_cuda_support = 0;", False),  # it is switched off
        ("libmpi.so.40", f"{OLD} {{ return 0; }}", False),
        ("libmpich.so.12", f"{OLD} {{ for (;;); }} {NEW} {{ *flag = kind == 0; return 0; }}", True),
        ("libmpich.so.12", f"{NEW} {{ *flag = 1; return 17; }}", False),
        ("libmpi_cray.so.12", f"{NEW} {{ *flag = 0; return 0; }}", False),
        ("libmpi.so.12", "int MPI_Init(void) { return 0; }", False),
        ("libother.so.1", f"{OLD} {{ return 1; }}", False),
    ],
)
def test_a_library_is_asked(tmp_path: Path, name: str, source: str, says: bool) -> None:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name)]
    subprocess.run(command, input=source, text=True, check=True)
    assert cuda_trial.says_yes([str(tmp_path / name)]) is says


@pytest.mark.each_mpi
def test_this_mpi_is_found_and_asked() -> None:
    version, *files = cuda_aware.identity()
    assert version == launching.LIBRARY
    assert any(map(cuda_aware.is_mpi, files))
    assert cuda_trial.says_yes(files) in (True, False)


@pytest.mark.parametrize(
    ("version", "environment", "says", "refused"),
    [
        ("MPICH Version: 5.0.2", {}, True, ""),
        ("MPICH Version: 5.0.2", {}, False, "MPICH 5.0.2 does not say that it supports CUDA"),
        ("MPICH Version: 4.0.1", {VARIABLE: "1"}, False, ""),
        ("MPICH Version: 4.0.1", {VARIABLE: "0"}, True, "the user says so"),
        ("MPICH Version: 4.0.1", {VARIABLE: "maybe"}, True, f"{VARIABLE}: found 'maybe'"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29", {}, True, "MPICH_GPU_SUPPORT_ENABLED=1 only"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, ""),
        ("MVAPICH2 Version      :\t2.3.7", {}, True, "MV2_USE_CUDA=1 only"),
        ("MVAPICH2 Version      :\t2.3.7", {"MV2_USE_CUDA": "1"}, True, ""),
        ("MVAPICH Version:      4.0", {"MV2_USE_CUDA": "1"}, True, "MVP_USE_CUDA=1 only"),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", {}, False, "I_MPI_OFFLOAD=1 only"),
    ],
)
def test_what_keeps_the_doctor_from_trying(
    version: str, environment: dict[str, str], says: bool, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, *cuda_trial.SWITCHES.values()):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda_aware, "identity", lambda: (version,))
    monkeypatch.setattr(cuda_trial, "says_yes", lambda files: says)
    found = cuda_trial.obstacle()
    assert refused in found
    assert bool(found) is bool(refused)
