"""The difference of two clocks, from bounds alone; and NVTX ranges with a double of what makes them."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from replicas import SIZE, context

import mpistrategy as ms
from mpistrategy.telemetry import nvtx_ranges
from mpistrategy.telemetry.tracing.clocks import fit

SECOND = 1e9


def bounds(count: int, offset: float, drift: float, seconds: float, seed: int) -> np.ndarray[Any, Any]:
    """Return what so many collectives would tell of a clock: its difference, and some time below and above."""
    random = np.random.default_rng(seed)
    times = 1e15 + np.sort(random.random(count)) * seconds * SECOND
    true = offset + drift * (times - 1e15)
    below, above = random.exponential(20e3, (2, count)) + 2e3
    return np.stack([times, true - below, true + above], axis=1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("count", "drift"), [(1, 0.0), (2, 0.0), (40, 0.0), (1000, 0.0), (1000, 2e-5), (4000, -7e-4)])
def test_a_clock_is_found_within_its_uncertainty(count: int, drift: float, seed: int) -> None:
    rows = bounds(count, 3e12, drift, 30, seed)
    clock = fit(rows)
    assert clock.uncertainty >= 0
    errors = clock.common(rows[:, 0]) - rows[:, 0] - (rows[:, 1] + rows[:, 2]) / 2
    assert (np.abs(errors) <= (rows[:, 2] - rows[:, 1]) / 2 + 1).all(), "a bound is broken"
    true = 3e12 + drift * (rows[:, 0] - 1e15)
    if count >= 1000:
        assert np.abs(clock.common(rows[:, 0]) - rows[:, 0] - true).max() < 5e3
    if drift == 0:
        assert abs(clock.drift) * 30 * SECOND < 100e3


def test_one_meeting_says_nothing_about_a_drift() -> None:
    assert fit(bounds(1, 5.0, 0.0, 1, 0)).drift == 0


def test_a_clock_that_was_set_meanwhile_is_told() -> None:
    rows = bounds(200, 1e6, 0.0, 10, 1)
    rows[100:, 1:] += 50e6
    assert fit(rows).uncertainty < -10e6


# ------------------------------------------------------------------------------------- NVTX


class Ranges:
    """A double: keeps what was pushed and popped."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.depth = 0

    def push(self, text: str) -> None:
        self.said.append("  " * self.depth + text)
        self.depth += 1

    def pop(self) -> None:
        self.depth -= 1


def make_ranges(strategy: ms.Strategy) -> None:
    def step() -> None:
        with ms.telemetry.span("load"):
            pass
        context().all_reduce("SUM", np.ones(3, np.float32))

    strategy.run(step)
    strategy.barrier()


EXPECTED = ["step step", "  load", "  ReplicaContext.all_reduce", "barrier"]


def test_ranges_by_cupy_where_it_is_imported(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    nvtx = SimpleNamespace(RangePush=ranges.push, RangePop=ranges.pop, available=True)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nvtx=nvtx)))
    with ms.telemetry.nvtx() as made:
        make_ranges(strategy)
        assert made.source == "cupy.cuda.nvtx"
    make_ranges(strategy)
    if SIZE > 1:
        assert ranges.said == EXPECTED
    assert ranges.depth == 0


def test_ranges_by_cudas_library(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, names = Ranges(), []

    class Push:
        def __call__(self, text: bytes) -> None:
            ranges.push(text.decode())

    def library(name: str) -> Any:
        names.append(name)
        return SimpleNamespace(nvtxRangePushA=Push(), nvtxRangePop=ranges.pop)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delitem(sys.modules, "nvtx", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", library)
    with ms.telemetry.nvtx():
        make_ranges(strategy)
    assert names == ["libnvToolsExt.so.1"]
    assert ranges.said[:2] == EXPECTED[:2]
    assert ranges.depth == 0


def test_without_any_of_them_there_is_one_warning(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx_ranges, "find", lambda: None)
    with ms.telemetry.nvtx(), pytest.warns(ms.errors.FallbackWarning, match="no NVTX ranges") as warned:
        make_ranges(strategy)
    assert len(warned) == 1
