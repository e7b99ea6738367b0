"""NVTX ranges, with a double of what makes them."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from replicas import SIZE, context

import mpistrategy as ms


def make_ranges(strategy: ms.Strategy) -> None:
    def step() -> None:
        with ms.telemetry.span("load"):
            pass
        context().all_reduce("SUM", np.ones(3, np.float32))

    strategy.run(step)
    strategy.barrier()


def test_ranges(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(
        sys.modules, "nvtx", SimpleNamespace(push_range=said.append, pop_range=partial(said.append, ""))
    )
    with ms.telemetry.nvtx() as made:
        assert made.source == "the package nvtx"
        make_ranges(strategy)
    make_ranges(strategy)
    if SIZE > 1:
        assert said == ["step step", "load", "", "ReplicaContext.all_reduce", "", "", "barrier", ""]
    assert made.source == ""


def test_without_the_package_there_is_one_warning(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.warns(ms.errors.FallbackWarning, match="no NVTX ranges") as warned, ms.telemetry.nvtx():
        make_ranges(strategy)
    assert len(warned) == 1
