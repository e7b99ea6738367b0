"""Which path arrays in GPU memory take: decisions over what the ranks have, and over what was tried."""

from __future__ import annotations

import warnings
from typing import Any

import gpu_here
import numpy as np
import pytest
from replicas import RANK, SIZE, all_raise, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError, FallbackWarning, OptionError
from mpistrategy.mpi.gpu.transports import nccl
from mpistrategy.mpi.gpu.transports.choice import Abilities, candidates, in_words, obstacles
from mpistrategy.mpi.interface.gpu_transport import chosen_path
from mpistrategy.options import GPU_PATH, path_word

BARE = {"against_mpi": "MPI has no CUDA"}
NCCL = {"nccl": 22105}
#: What the ranks have, what is asked for, the path, and a part of its reason.
TABLE = {
    "NCCL first": ([{**NCCL, "gpu": gpu} for gpu in "ab"], "auto", "nccl", "the fastest"),
    "MPI without NCCL": ([{"gpu": gpu} for gpu in "ab"], "auto", "mpi", "not nccl (CuPy has no NCCL"),
    "two ranks on one GPU": ([{**NCCL, "gpu": "a"}] * 2, "auto", "mpi", "ranks 0, 1 on one GPU, which NCCL refuses"),
    "an MPI that does not": ([BARE, BARE], "auto", "staged", "MPI has no CUDA"),
    "one MPI that does not": ([{}, BARE], "auto", "staged", "MPI has no CUDA (rank 1)"),
    "asked for": ([{**NCCL, "gpu": gpu} for gpu in "ab"], "staged", "staged", "as asked for"),
    "asked for in vain": ([BARE, BARE], "mpi", "staged", "not mpi (MPI has no CUDA (ranks 0, 1))"),
    "NCCL on one GPU in vain": ([{**NCCL, "gpu": "a"}] * 2, "nccl", "mpi", "which NCCL refuses"),
    "another NCCL in vain": (
        [{**NCCL, "gpu": "a"}, {"gpu": "b", "nccl": 21805}], "nccl", "mpi", "different versions",
    ),
    "a patch of NCCL": ([{"nccl": 23203, "gpu": "a"}, {"nccl": 23207, "gpu": "b"}], "auto", "nccl", "the fastest"),
    "by MPI": ([{**NCCL, "gpu": gpu} for gpu in "ab"], "ring", "mpi", ""),
    "by MPI through the host": ([BARE, BARE], "ring", "staged", "MPI has no CUDA"),
}  # fmt: skip


def chosen(ranks: list[Abilities], word: str) -> tuple[str, str, bool]:
    """Return the path that can be, why, and whether to warn."""
    against = obstacles(ranks)
    name = next(each for each in candidates(word) if not against[each])
    return name, *in_words(name, word, against, ranks)


@pytest.mark.parametrize("name", TABLE)
def test_the_path_of_ranks(name: str) -> None:
    ranks, word, path, reason = TABLE[name]
    found, why, is_second_best = chosen([Abilities(**each) for each in ranks], word)
    assert found == path
    assert reason in why
    assert is_second_best == ("vain" in name or (path == "staged" and word != "staged"))


@pytest.mark.parametrize("word", ["auto", "ring", "nccl", "mpi"])
def test_what_is_staged_unasked_is_told_the_cure(word: str) -> None:
    name, why, is_second_best = chosen([Abilities(f"GPU-{number}", 0, "not tried") for number in range(2)], word)
    assert (name, is_second_best) == ("staged", True)
    assert "pip install nvidia-nccl-cu12" in why
    assert "mpistrategy doctor once" in why
    assert "export MPISTRATEGY_GPU_PATH=staged" in why
    name, why, is_second_best = chosen([Abilities("GPU-0", 22105, "not tried")] * 2, word)
    assert (name, is_second_best) == ("staged", True)
    assert "Let each rank drive a GPU of its own" in why
    assert "pip install" not in why


@pytest.mark.parametrize(
    ("implementation", "variable", "word"),
    [("AUTO", "", "auto"), ("AUTO", "Staged", "staged"), ("RING", "nccl", "ring"), ("nccl", "staged", "nccl")],
)
def test_options_ask_before_the_variable(
    implementation: str, variable: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_PATH, variable)
    assert path_word(ms.CommunicationOptions(implementation=implementation)) == word


def reduce_one(options: ms.CommunicationOptions | None = None) -> Any:
    cupy = gpu_here.cupy_or_skip()
    with gpu_here.strategy() as strategy:
        array = cupy.asarray(np.ones(3))
        found = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", array, options))
        assert found.get().tolist() == [SIZE] * 3
        return chosen_path(strategy.extended.communicator)


@gpu_here.needs_gpu
@pytest.mark.skipif(SIZE == 1, reason="one rank chooses nothing")
def test_different_words_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, "staged" if RANK == 0 else "auto")
    all_raise(CollectiveMismatchError, reduce_one)
    options = ms.CommunicationOptions(implementation="RING" if RANK == 0 else "AUTO")
    all_raise(CollectiveMismatchError, lambda: reduce_one(options))


@gpu_here.needs_gpu
@pytest.mark.parametrize("variable", [GPU_PATH, "MPISTRATEGY_CUDA_AWARE"])
def test_a_malformed_variable_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    if SIZE == 1 and variable != GPU_PATH:
        pytest.skip("nobody asks on one rank")
    if RANK == SIZE - 1:
        monkeypatch.setenv(variable, "maybe")
    all_raise(OptionError, reduce_one, words=["'maybe'"])
    monkeypatch.undo()
    with ms.MirroredStrategy() as strategy:
        assert still_works(strategy)


@gpu_here.needs_gpu
@pytest.mark.skipif(SIZE == 1, reason="one rank chooses nothing")
@pytest.mark.filterwarnings("default:the path of arrays in GPU memory is staged")
def test_rank_0_warns_once_where_arrays_are_staged_and_nobody_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GPU_PATH, raising=False)
    monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "0")
    monkeypatch.setattr(nccl, "version", lambda: 0)
    cupy = gpu_here.cupy_or_skip()
    with gpu_here.strategy() as strategy:
        with warnings.catch_warnings(record=True) as said:
            for size in (3, 4):
                value = cupy.asarray(np.ones(size))
                found = strategy.run(lambda value=value: ms.get_replica_context().all_reduce("SUM", value))
                assert found.get().tolist() == [SIZE] * size
        told = str(strategy.explain(value))
    assert [each.category for each in said] == ([FallbackWarning] if RANK == 0 else [])
    assert all("pip install nvidia-nccl-cu12" in str(each.message) for each in said)
    assert "(staged: not nccl (CuPy has no NCCL on " in told
