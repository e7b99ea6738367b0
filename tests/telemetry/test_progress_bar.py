"""Progress: a bar of tqdm's on rank 0 at a terminal, nothing elsewhere, a line now and then if asked for."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
from replicas import RANK, all_raise

import mpistrategy as ms

Clock = Callable[[float], None]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of the test's own: ``clock(seconds)`` moves it on."""
    now = [1000.0]
    monkeypatch.setattr(pytest.importorskip("tqdm.std"), "time", lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


@pytest.mark.parametrize(
    ("at_terminal", "has_tqdm", "every_seconds", "shown"),
    [
        (True, True, None, r"(?s).*\rtrain: 100%.* 4/4 .*\n"),
        (True, False, None, ""),
        (False, True, None, ""),
        (False, True, 60, r"(\s*train: 2/4 01:00 30\.00s/it)+(\s*train: 4/4 02:00 30\.00s/it)+\s*"),
    ],
)
def test_what_is_shown_on_rank_0_only(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    at_terminal: bool,
    has_tqdm: bool,
    every_seconds: float | None,
    shown: str,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: at_terminal)
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    seen = []
    for number in ms.telemetry.progress(range(4), title="train", every_seconds=every_seconds):
        seen.append(number)
        clock(30.0)
    assert seen == [0, 1, 2, 3]
    assert re.fullmatch("" if RANK else shown, capsys.readouterr().err)


def test_log_lines_do_not_run_into_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logger = logging.getLogger("mpistrategy.tests.bar")
    logger.propagate = False
    handler = ms.telemetry.setup_logging(logger=logger, ranks="all", format="%(message)s")
    with ms.telemetry.progress(total=3, title="train") as bar:
        bar.update()
        logger.info("a line")
    logger.removeHandler(handler)
    lines = capsys.readouterr().err.split("\n")
    assert any(line.rpartition("\r")[2].rpartition("] ")[2] == "a line" for line in lines)


def test_an_error_in_a_loop_that_counts_by_hand_leaves_the_last_line(clock: Clock, capsys: Captured) -> None:
    bar = ms.telemetry.progress(title="rows", every_seconds=30)
    clock(40.0)
    bar.update(1000)
    with pytest.raises(ZeroDivisionError), bar:
        bar.update(1 // 0)
    assert ("rows: 1000/? 00:40 25.00it/s\n" in capsys.readouterr().err) == (RANK == 0)
    assert bar.count == 1000


def test_what_cannot_be_gone_through_is_refused() -> None:
    endless = ms.OneDeviceStrategy("CPU:0").distribute_dataset(iter([np.ones(1)]))
    assert [*ms.telemetry.progress(endless)] == [1.0]
    all_raise(ms.errors.OptionTypeError, lambda: ms.telemetry.progress(3))  # type: ignore[arg-type]
