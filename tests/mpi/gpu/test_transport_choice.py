"""Which path arrays in GPU memory take: decisions over what the ranks have, and over what was tried."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import cupy_double
import numpy as np
import pytest
from replicas import RANK, SIZE, outcomes, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError, FallbackWarning, OptionError
from mpistrategy.mpi.gpu import cuda_trials
from mpistrategy.mpi.gpu.cuda_aware import NO, UNVERIFIED, YES, Answer
from mpistrategy.mpi.gpu.cuda_trials import Outcome
from mpistrategy.mpi.gpu.transports import setup
from mpistrategy.mpi.gpu.transports.choice import Abilities, choose
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.options import GPU_PATH, path_word

AWARE = {"verdict": "yes", "reason": "MPI says so"}
BARE = {"verdict": "no", "reason": "MPI has no CUDA"}
NCCL = {"nccl": 22105}
#: What the ranks have, what is asked for, the path, and a part of its reason.
TABLE = {
    "NCCL first": ([{**AWARE, **NCCL, "gpu": gpu} for gpu in "ab"], "auto", "nccl", "the fastest"),
    "MPI without NCCL": ([{**AWARE, "gpu": gpu} for gpu in "ab"], "auto", "mpi", "not nccl (CuPy has no NCCL"),
    "two ranks on one GPU": ([{**AWARE, **NCCL, "gpu": "a"}] * 2, "auto", "mpi", "on one GPU, which NCCL refuses"),
    "an MPI that does not": ([BARE, BARE], "auto", "staged", "MPI has no CUDA"),
    "one MPI that does not": ([AWARE, BARE], "auto", "staged", "rank 1"),
    "nobody has tried": ([{"reason": "not tried"}] * 2, "auto", "staged", "unverified, not tried"),
    "asked for": ([{**AWARE, **NCCL, "gpu": gpu} for gpu in "ab"], "staged", "staged", "as asked for"),
    "asked for in vain": ([BARE, BARE], "mpi", "staged", "mpi cannot be: no, MPI has no CUDA"),
    "NCCL on one GPU in vain": ([{**AWARE, **NCCL, "gpu": "a"}] * 2, "nccl", "mpi", "which NCCL refuses"),
    "another NCCL in vain": (
        [{**AWARE, **NCCL, "gpu": "a"}, {**AWARE, "gpu": "b", "nccl": 21805}], "nccl", "mpi", "different versions",
    ),
    "by MPI": ([{**AWARE, **NCCL, "gpu": gpu} for gpu in "ab"], "ring", "mpi", ""),
    "by MPI through the host": ([BARE, BARE], "ring", "staged", "MPI has no CUDA"),
    "alone": ([{}], "nccl", "alone", "one rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_path_of_ranks(name: str) -> None:
    ranks, word, path, reason = TABLE[name]
    choice = choose([Abilities(**each) for each in ranks], word)
    assert choice.name == path
    assert reason in choice.reason
    assert choice.is_second_best == ("vain" in name or (path == "staged" and word != "staged"))


@pytest.mark.parametrize("word", ["auto", "ring", "nccl", "mpi"])
def test_what_is_staged_unasked_is_told_the_cure(word: str) -> None:
    apart = [Abilities(f"GPU-{number}", 0, "unverified", "not tried") for number in range(2)]
    found = choose(apart, word)
    assert (found.name, found.is_second_best) == ("staged", True)
    assert "pip install nvidia-nccl-cu12" in found.reason
    assert "mpistrategy doctor once" in found.reason
    assert "export MPISTRATEGY_GPU_PATH=staged" in found.reason
    shared = choose([Abilities("GPU-0", 22105, "unverified", "not tried")] * 2, word)
    assert (shared.name, shared.is_second_best) == ("staged", True)
    assert "Let each rank drive a GPU of its own" in shared.reason
    assert "pip install" not in shared.reason


def test_nccl_and_pointers_for_mpi_are_never_used_together() -> None:
    ranks = [Abilities(gpu=gpu, nccl=22105, verdict="yes") for gpu in "ab"]
    assert choose(ranks, "ring", ["nccl"]).name == "staged"
    assert choose(ranks, "auto", ["mpi"]).name == "mpi"
    assert "block each other" in choose(ranks, "nccl", ["mpi"]).reason


def test_abilities_travel_as_text() -> None:
    mine = Abilities("GPU-1", 22105, "yes", 'it says "yes"')
    assert Abilities.read(mine.text()) == mine


@pytest.mark.parametrize(
    ("implementation", "variable", "word"),
    [("AUTO", "", "auto"), ("AUTO", "Staged", "staged"), ("RING", "nccl", "ring"), ("nccl", "staged", "nccl")],
)
def test_options_ask_before_the_variable(
    implementation: str, variable: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_PATH, variable)
    assert path_word(ms.CommunicationOptions(implementation=implementation)) == word


VERSION = "MPICH Version: 4.3.0 built with CUDA"


def test_a_yes_that_nobody_tried_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yes, no = Answer(YES, "it says so"), Answer(NO, "it says no")
    assert cuda_trials.verified(yes, VERSION, None).verdict == UNVERIFIED
    assert "mpistrategy doctor" in cuda_trials.verified(yes, VERSION, None).reason
    assert cuda_trials.verified(yes, VERSION, True) == yes
    assert cuda_trials.verified(no, VERSION, None) == no
    for outcome, verdict in [("right", YES), ("wrong", NO), ("died", NO)]:
        file = cuda_trials.save(VERSION, "one node", Outcome(outcome, "two ranks"))
        assert cuda_trials.verified(yes, VERSION, None).verdict == verdict
        between = cuda_trials.verified(yes, VERSION, None, nodes=2)
        assert between.verdict == (UNVERIFIED if outcome == "right" else NO)
        assert ("doctor once on several nodes" if outcome == "right" else "tried on one node") in between.reason
        assert cuda_trials.verified(yes, f"{VERSION}, another one", None).verdict == UNVERIFIED
    for spoiled in ("", "{", "[]", '{"format": 1, "library": "another", "outcome": "right", "reason": ""}'):
        file.write_text(spoiled)
        assert cuda_trials.load(VERSION, "one node") is None
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def reduce_one(options: ms.CommunicationOptions | None = None) -> Any:
    with cupy_double.installed() as cupy, ms.MirroredStrategy() as strategy:
        array = cupy.asarray(np.ones(3)) * 1
        found = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", array, options))
        assert found.get().tolist() == [SIZE] * 3
        return next(iter(device_paths(strategy.extended.communicator).by_name))


@pytest.mark.skipif(SIZE == 1, reason="one rank chooses nothing")
def test_one_rank_whose_mpi_does_not_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, "mpi")
    monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "0" if RANK == SIZE - 1 else "1")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert reduce_one() == "staged"
    assert [each.category for each in said] == ([FallbackWarning] if RANK == 0 else [])
    assert all(f"the user says so (rank {SIZE - 1})" in str(each.message) for each in said)


@pytest.mark.skipif(SIZE == 1, reason="one rank chooses nothing")
def test_different_words_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, "staged" if RANK == 0 else "auto")
    for one in outcomes(reduce_one):
        assert one.error is CollectiveMismatchError
    options = ms.CommunicationOptions(implementation="RING" if RANK == 0 else "AUTO")
    for one in outcomes(lambda: reduce_one(options)):
        assert one.error is CollectiveMismatchError


@pytest.mark.parametrize("variable", [GPU_PATH, "MPISTRATEGY_CUDA_AWARE"])
def test_a_malformed_variable_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    if SIZE == 1 and variable != GPU_PATH:
        pytest.skip("nobody asks on one rank")
    if RANK == SIZE - 1:
        monkeypatch.setenv(variable, "maybe")
    for one in outcomes(reduce_one):
        assert one.error is OptionError
        assert "'maybe'" in one.text
    monkeypatch.undo()
    with ms.MirroredStrategy() as strategy:
        assert still_works(strategy)


@pytest.mark.skipif(SIZE == 1, reason="one rank has no path to lose")
def test_a_rank_that_cannot_have_the_path_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, "staged")

    def out_of_memory(*args: Any) -> Any:
        raise MemoryError("no pinned memory")

    if RANK == 0:
        monkeypatch.setattr(setup, "StagedPath", out_of_memory)
    for one in outcomes(reduce_one):
        assert "no pinned memory" in one.text


def test_an_outcome_is_of_its_settings_and_speed_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in cuda_trials.settings():
        monkeypatch.delenv(name)
    yes = Answer(YES, "it says so")
    cuda_trials.save(VERSION, "one node", Outcome("right", "two ranks", 2e9, 1e9))
    assert cuda_trials.verified(yes, VERSION, None).is_yes
    monkeypatch.setenv("OMPI_MCA_orte_ess_num_procs", "2")  # the launcher's
    assert cuda_trials.verified(yes, VERSION, None).is_yes
    for name in ("UCX_TLS", "OMPI_MCA_pml", "MPICH_GPU_SUPPORT_ENABLED", "FI_PROVIDER"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            assert cuda_trials.verified(yes, VERSION, None).verdict == UNVERIFIED
    cuda_trials.save(VERSION, "one node", Outcome("right", "two ranks", 1e9, 2e9))
    slower = cuda_trials.verified(yes, VERSION, None)
    assert slower.verdict == NO
    assert "slower than the host" in slower.reason


@pytest.mark.skipif(SIZE == 1, reason="one rank chooses nothing")
@pytest.mark.filterwarnings("default:the path of arrays in GPU memory is staged")
def test_rank_0_warns_once_where_arrays_are_staged_and_nobody_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GPU_PATH, raising=False)
    with cupy_double.installed() as cupy, ms.MirroredStrategy() as strategy:
        with warnings.catch_warnings(record=True) as said:
            for size in (3, 4):
                value = cupy.asarray(np.ones(size))
                found = strategy.run(lambda value=value: ms.get_replica_context().all_reduce("SUM", value))
                assert found.get().tolist() == [SIZE] * size
        told = str(strategy.explain(value))
    assert [each.category for each in said] == ([FallbackWarning] if RANK == 0 else [])
    assert all("pip install nvidia-nccl-cu12" in str(each.message) for each in said)
    assert "(staged: not nccl (CuPy has no NCCL on " in told


@pytest.mark.parametrize("word", ["ipc", "ipc+mpi", "ipc+staged"])
def test_a_path_that_there_is_no_more_is_an_unknown_word(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, word)
    with pytest.raises(OptionError, match="expected 'auto' or 'mpi' or 'staged' or 'nccl'"):
        path_word(ms.CommunicationOptions())


def test_the_network_that_doctor_saw_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cuda_trials.network_of_nccl(VERSION) == ""
    cuda_trials.save(VERSION, "several nodes", Outcome("right", "two ranks", 1e9, 1e9, 42e9, "InfiniBand"))
    assert "over InfiniBand, 42.0 GB/s" in cuda_trials.network_of_nccl(VERSION)
