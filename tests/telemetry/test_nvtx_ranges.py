"""NVTX ranges, with a double of what makes them."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from replicas import SIZE, context

import mpistrategy as ms


class Ranges(ModuleType):
    """A double of the package nvtx: keeps what was pushed and popped."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.said: list[str] = []
        self.depth = 0

    def push_range(self, text: str) -> None:
        self.said.append("  " * self.depth + text)
        self.depth += 1

    def pop_range(self) -> None:
        self.depth -= 1


def make_ranges(strategy: ms.Strategy) -> None:
    def step() -> None:
        with ms.telemetry.span("load"):
            pass
        context().all_reduce("SUM", np.ones(3, np.float32))

    strategy.run(step)
    strategy.barrier()


def test_ranges(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setitem(sys.modules, "nvtx", ranges)
    made = ms.telemetry.nvtx()
    assert made.source == ""
    made.start()
    assert made.source == "the package nvtx"
    make_ranges(strategy)
    made.stop()
    make_ranges(strategy)
    if SIZE > 1:
        assert ranges.said == ["step step", "  load", "  ReplicaContext.all_reduce", "barrier"]
    assert ranges.depth == 0


def test_without_the_package_there_is_one_warning(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.warns(ms.errors.FallbackWarning, match="no NVTX ranges") as warned, ms.telemetry.nvtx():
        make_ranges(strategy)
    assert len(warned) == 1
