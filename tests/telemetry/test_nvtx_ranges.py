"""NVTX ranges, with a double of what makes them."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from replicas import SIZE, context

import mpistrategy as ms


class Ranges(ModuleType):
    """A double of the package nvtx and of cupy.cuda.nvtx: keeps what was pushed and popped."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.said: list[str] = []
        self.depth = 0
        self.RangePush, self.RangePop = self.push_range, self.pop_range

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


def plant(monkeypatch: pytest.MonkeyPatch, nvtx: ModuleType | None, cupys: ModuleType | None) -> None:
    """Let these modules be what there is: the package nvtx, and CuPy's."""
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None if cupys is None else ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", cupys)
    if cupys is not None:
        monkeypatch.setattr(sys.modules["cupy.cuda"], "nvtx", cupys, raising=False)


@pytest.mark.parametrize("source", ["the package nvtx", "cupy.cuda.nvtx"])
def test_ranges(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    ranges = Ranges()
    with monkeypatch.context() as patch:
        plant(patch, *((None, ranges) if "cupy" in source else (ranges, Ranges())))
        made = ms.telemetry.nvtx()
        made.start()
    assert made.source == source
    make_ranges(strategy)
    made.stop()
    make_ranges(strategy)
    if SIZE > 1:
        assert ranges.said == ["step step", "  load", "  ReplicaContext.all_reduce", "barrier"]
    assert ranges.depth == 0


def test_without_any_of_them_there_is_one_warning(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, None, None)
    with pytest.warns(ms.errors.FallbackWarning, match="no NVTX ranges") as warned, ms.telemetry.nvtx():
        make_ranges(strategy)
    assert len(warned) == 1
