"""The recorded TensorFlow cases with all tensors in GPU memory."""

from __future__ import annotations

from collections import Counter

import gpu_here
import pytest
from conformance import on_device
from conformance.cases import load_cases
from conformance.replay import Ranks, replay
from replicas import ALL, RANK, SIZE

#: The short lane replays every so many cases.
EVERY = 1 if ALL or gpu_here.IS_GPU else 16


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:the path of arrays in GPU memory is")  # NCCL wants a GPU for each rank
@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")  # some programs make variables so
@pytest.mark.skipif(SIZE > 2, reason="1 and 2 ranks are what a machine with one GPU is asked for")
@pytest.mark.skipif(not gpu_here.IS_HERE, reason="needs CuPy and a GPU, or its stand-in")
def test_recorded_cases_hold_in_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "MODE", "cupy")
    cases = [case for case in load_cases() if case["num_replicas"] == SIZE][::EVERY]
    results = replay(cases, Ranks(strategies={}))  # those of other tests are on CPUs
    if RANK == 0:
        counts = Counter(result.verdict for result in results)
        print(f"conformance in GPU memory: {dict(counts)}")
        wrong = [result for result in results if result.verdict in ("failed", "unsupported")]
        assert not wrong, "\n".join(f"{result.case_id}: {'; '.join(result.details)}" for result in wrong)
        assert counts["passed"] > len(results) / 2
