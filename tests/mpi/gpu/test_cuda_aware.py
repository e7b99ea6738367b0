"""Is this MPI CUDA-aware?  The ladder for every MPI and switch, what this one says, and the weakest of all ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import launching
import pytest

from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.gpu import loaded_mpi
from mpistrategy.mpi.gpu.cuda_aware import NO, UNVERIFIED, VARIABLE, YES, Answer, Evidence, decide, said, weakest

pytestmark = pytest.mark.one_rank

# ------------------------------------------------------------------------------------- the decision

#: What MPI_Get_library_version says.
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.12 (ANL base 3.4a2)\nMPI BUILD INFO : Mon Nov 13 2023\n"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n"
OLD_MPICH = "MPICH Version:\t4.0.1\nMPICH Release date:\tTue Feb 22 16:37:51 CST 2022\n"
OPEN_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022"
OPEN_5 = "Open MPI v5.0.11, package: Open MPI root@x Distribution, ident: 5.0.11, repo rev: v5.0.11"
OPEN_6 = "Open MPI v6.0.0, package: Open MPI root@x Distribution, ident: 6.0.0"
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS\n"
MVAPICH2 = "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date :\tWed March 02 22:00:00 EST 2022\n"
MVAPICH = "MVAPICH Version:      4.0\nMVAPICH Release date: 02/17/2025\n"
SPECTRUM = "IBM Spectrum MPI, package: IBM Spectrum MPI, ident: 10.4.0.3rtm4, repo rev: IBM_SPECTRUM_MPI"
PARASTATION = "ParaStation MPI 5.9.2-1\n"

GTL = ["libmpi_gnu_123.so.12.0.0", "libmpi_gtl_cuda.so.0.0.0"]
OFFLOAD = {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda"}

# name: what the library says of itself, the rest of the evidence, the verdict, a part of the reason
LADDER: dict[str, tuple[str, dict[str, object], str, str]] = {
    "the wheel of MPICH": (
        MPICH,
        {"standard": (5, 0), "queried": False, "memory_kinds": "mpi,system"},
        NO,
        "MPICH 5.0.2 says that it has no CUDA",
    ),
    "MPICH with CUDA": (MPICH, {"standard": (5, 0), "queried": True}, YES, "built with CUDA"),
    "MPICH 4.0 with CUDA": (OLD_MPICH, {"standard": (4, 0), "queried": True}, YES, "MPICH 4.0.1"),
    "an old MPICH without the function": (OLD_MPICH, {}, UNVERIFIED, "nothing in MPICH 4.0.1 tells"),
    "MPICH by its memory kinds": (MPICH, {"standard": (4, 1), "memory_kinds": "mpi,system,cuda:device"}, YES, "kind"),
    "kinds of pinned memory only": (MPICH, {"standard": (4, 1), "memory_kinds": "mpi,cuda:host"}, UNVERIFIED, ""),
    "kinds that contradict the function": (
        MPICH,
        {"standard": (4, 1), "queried": False, "memory_kinds": "mpi,cuda"},
        UNVERIFIED,
        "no CUDA, and that it has memory",
    ),
    "kinds without CUDA prove nothing": (
        OPEN_6,
        {"standard": (4, 1), "queried": True, "memory_kinds": "mpi,system"},
        YES,
        "built with CUDA",
    ),
    "the wheel of Open MPI": (OPEN_5, {"queried": False, "switched_on": False}, NO, "Open MPI v5.0.11"),
    "Open MPI 5 gives back the kinds that somebody asked for": (OPEN_5, {"memory_kinds": "mpi,cuda"}, UNVERIFIED, ""),
    "Open MPI 5 with CUDA": (OPEN_5, {"queried": True, "switched_on": True}, YES, "built with CUDA"),
    "Open MPI 5 with CUDA, no switch seen": (OPEN_5, {"queried": True}, YES, "built with CUDA"),
    "Open MPI 5 of conda-forge": (OPEN_5, {"queried": True, "switched_on": False}, NO, "switched off"),
    "Open MPI 6 by its memory kinds": (OPEN_6, {"standard": (4, 1), "memory_kinds": "mpi,cuda"}, YES, "kind cuda"),
    "Open MPI 4 with CUDA": (OPEN_4, {"queried": True, "switched_on": True}, YES, "Open MPI v4.1.4"),
    "Open MPI 4 with CUDA, switched off": (OPEN_4, {"queried": True, "switched_on": False}, NO, "opal_cuda_support"),
    "Open MPI 4 with CUDA, no switch seen": (OPEN_4, {"queried": True}, UNVERIFIED, "cannot be seen"),
    "Open MPI 4 of Debian": (OPEN_4, {"queried": False, "switched_on": False}, NO, "no CUDA"),
    "the wheel of Intel MPI": (INTEL, {"queried": False, "memory_kinds": "mpi,system"}, NO, "with I_MPI_OFFLOAD=1"),
    "Intel MPI, switched on": (INTEL, {"queried": True, "environment": OFFLOAD}, YES, "I_MPI_OFFLOAD_MODE=cuda"),
    "Intel MPI, switched on, and says no": (INTEL, {"queried": False, "environment": OFFLOAD}, UNVERIFIED, "but"),
    "Intel MPI for Intel's GPUs": (
        INTEL,
        {"queried": False, "environment": {"I_MPI_OFFLOAD": "1"}},
        NO,
        "I_MPI_OFFLOAD_MODE=cuda only",
    ),
    "Cray MPICH, switched on": (
        CRAY,
        {"queried": True, "environment": {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "mapped": GTL},
        YES,
        "libmpi_gtl_cuda is loaded",
    ),
    "an old Cray MPICH, switched on": (
        CRAY,
        {"environment": {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "mapped": GTL},
        YES,
        "MPICH_GPU_SUPPORT_ENABLED=1 is set",
    ),
    "Cray MPICH, switched off": (CRAY, {"mapped": GTL}, NO, "CRAY MPICH"),
    "Cray MPICH, switched off in words": (
        CRAY,
        {"environment": {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "mapped": GTL},
        NO,
        "MPICH_GPU_SUPPORT_ENABLED=1 only",
    ),
    "Cray MPICH without its library for GPUs": (
        CRAY,
        {"queried": True, "environment": {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "mapped": GTL[:1]},
        UNVERIFIED,
        "libmpi_gtl_cuda is not loaded",
    ),
    "Cray MPICH with the library for AMD's GPUs": (
        CRAY,
        {"environment": {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "mapped": ["libmpi_gtl_hsa.so.0"]},
        UNVERIFIED,
        "not loaded",
    ),
    "MVAPICH2-GDR, switched on": (MVAPICH2, {"queried": True, "environment": {"MV2_USE_CUDA": "1"}}, YES, "MV2_USE"),
    "MVAPICH2-GDR, switched off": (MVAPICH2, {"queried": True}, UNVERIFIED, "MV2_USE_CUDA=1 is not set"),
    "MVAPICH2 that may be built without": (
        MVAPICH2,
        {"environment": {"MV2_USE_CUDA": "1"}},
        UNVERIFIED,
        "nothing tells whether MVAPICH2",
    ),
    "MVAPICH2 without CUDA": (
        MVAPICH2,
        {"queried": False, "environment": {"MV2_USE_CUDA": "1"}},
        UNVERIFIED,
        "no CUDA",
    ),
    "MVAPICH 4, switched on": (MVAPICH, {"queried": True, "environment": {"MVP_USE_CUDA": "1"}}, YES, "MVP_USE_CUDA"),
    "MVAPICH 4 with the variable of MVAPICH2": (MVAPICH, {"environment": {"MV2_USE_CUDA": "1"}}, NO, "MVP_USE_CUDA"),
    "Spectrum MPI with -gpu": (
        SPECTRUM,
        {"queried": True, "environment": {"OMPI_MCA_pml_pami_enable_cuda": "1"}},
        YES,
        "IBM Spectrum MPI",
    ),
    "Spectrum MPI without -gpu": (SPECTRUM, {"queried": True}, UNVERIFIED, "is not set"),
    "Spectrum MPI, nothing known": (SPECTRUM, {}, NO, "OMPI_MCA_pml_pami_enable_cuda=1 only"),
    "ParaStation with PSP_CUDA=1": (PARASTATION, {"queried": True}, YES, "ParaStation"),
    "ParaStation without": (PARASTATION, {"queried": False, "environment": {"PSP_CUDA": "0"}}, NO, "no CUDA"),
    "the variable of another MPI": (
        MPICH,
        {"environment": {"MPICH_GPU_SUPPORT_ENABLED": "1", "MV2_USE_CUDA": "1"} | OFFLOAD, "mapped": GTL},
        UNVERIFIED,
        "nothing in MPICH",
    ),
    "MPICH built by Intel's compiler": (
        MPICH + "MPICH CC: icx\nMPICH configure: --prefix=/opt/intel(r) mpi --with-spectrum\n",
        {"queried": True, "environment": OFFLOAD},
        YES,
        "MPICH 5.0.2 says",
    ),
    "Spectrum MPI, if it begins with another name": (
        "Open MPI v10.4.0, package: IBM Spectrum MPI",
        {"queried": True},
        UNVERIFIED,
        "pml_pami_enable_cuda=1 is not set",
    ),
    "an MPI that nobody knows": ("", {}, UNVERIFIED, "nothing in unknown tells"),
}


@pytest.mark.parametrize("name", LADDER)
def test_the_ladder(name: str) -> None:
    version, known, verdict, reason = LADDER[name]
    evidence = Evidence(version, **known)  # type: ignore[arg-type]
    answer = decide(evidence)
    assert answer.verdict == verdict, answer
    assert reason in answer.reason, answer
    assert answer.is_yes is (verdict == YES)
    assert Answer.read(answer.text()) == answer
    for word in (True, False):  # which has the last word
        assert decide(evidence, word) == Answer(YES if word else NO, "the user says so")


def test_the_word_of_the_user() -> None:
    assert said(None, {}) is None
    assert said(None, {VARIABLE: ""}) is None
    assert said(None, {VARIABLE: "1"}) is True
    assert said(None, {VARIABLE: "0"}) is said(None, {VARIABLE: "OFF"}) is False
    assert said(None, {VARIABLE: "yes"}) is True
    assert said(False, {VARIABLE: "1"}) is False, "the argument comes first"
    for text in ("ja", "2", " 1", "auto", "cuda"):
        with pytest.raises(OptionError, match=rf"{VARIABLE}: found '{text}'; expected 1, on, true or yes; or 0"):
            said(None, {VARIABLE: text})
    for given in (1, "1", "yes"):
        with pytest.raises(OptionTypeError, match="True, False, or None"):
            said(given, {})


@pytest.mark.parametrize(
    ("verdicts", "verdict", "reason"),
    [
        ([YES, YES], YES, "r"),
        ([YES, UNVERIFIED, YES], UNVERIFIED, "r (rank 1)"),
        ([NO, YES, UNVERIFIED, NO], NO, "r (ranks 0, 3)"),
        ([UNVERIFIED] * 3, UNVERIFIED, "r"),
        ([NO], NO, "r"),
    ],
)
def test_the_weakest_answer_wins(verdicts: list[str], verdict: str, reason: str) -> None:
    assert weakest([Answer(each, "r") for each in verdicts]) == Answer(verdict, reason)


def test_all_reasons_of_the_weakest_are_told() -> None:
    answers = [Answer(NO, "a"), Answer(NO, "b"), Answer(YES, "c"), Answer(NO, "a")]
    assert weakest(answers) == Answer(NO, "a (ranks 0, 3); b (rank 1)")


# ------------------------------------------------------------------------------------- the functions of a library


def library(folder: Path, name: str, source: str) -> str:
    """Return the path of a shared library made of C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / f"{name}.c").write_text(source)
    path = folder / name
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / f"{name}.c"], check=True, timeout=60)
    return str(path)


def test_functions_and_switches_of_libraries(tmp_path: Path) -> None:
    old = library(tmp_path, "libmpi.so.40", "int MPIX_Query_cuda_support(void) { return 1; }")
    newer = library(
        tmp_path,
        "libmpi_nvidia.so.12",
        "#include <stdlib.h>\n"
        "int MPIX_Query_cuda_support(void) { abort(); }\n"
        "int MPIX_GPU_query_support(int kind, int *flag) { *flag = kind == 0; return 0; }",
    )
    failing = library(tmp_path, "libmpich.so.12", "int MPIX_GPU_query_support(int k, int *f) { *f = 1; return 17; }")
    no = library(tmp_path, "libmpi_cray.so.12", "int MPIX_GPU_query_support(int k, int *f) { *f = 0; return 0; }")
    silent = library(tmp_path, "libmpi.so.12", "int MPI_Init(void) { return 0; }")
    other = library(tmp_path, "libother.so.1", "int MPIX_Query_cuda_support(void) { return 1; }")
    assert loaded_mpi.queried([silent, old]) is True
    assert loaded_mpi.queried([newer]) is True
    assert loaded_mpi.queried([old, newer]) is True
    assert loaded_mpi.queried([no]) is loaded_mpi.queried([failing]) is False
    for nothing in ([silent], [other], [], [str(tmp_path / "libmpi.so.99")]):
        assert loaded_mpi.queried(nothing) is None
    on = library(tmp_path, "libopen-pal.so.40", "char opal_cuda_support = 1;")
    off = library(tmp_path, "libopen-pal.so.80", "char opal_cuda_support = 0;")
    without = library(tmp_path, "libopen-pal.so.90", "int nothing;")
    assert loaded_mpi.switched_on([without, on]) is True
    assert loaded_mpi.switched_on([off]) is False
    assert loaded_mpi.switched_on([without, old]) is None


# ------------------------------------------------------------------------------------- this MPI


@pytest.mark.mpi
def test_the_evidence_about_this_mpi() -> None:
    found = loaded_mpi.evidence()
    assert found.version == launching.LIBRARY
    assert any(file.startswith("libmpi") for file in found.mapped)
    if found.version.startswith(("Open MPI", "MPICH")):
        assert found.queried is not None, "it has a function, and it was found"
    if launching.IS_OPEN_MPI:
        assert found.switched_on is not None
