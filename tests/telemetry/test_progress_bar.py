"""Progress: a bar of tqdm's on rank 0 at a terminal, nothing elsewhere, a line now and then if asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest
from replicas import RANK, outcomes

import mpistrategy as ms

Clock = Callable[[float], None]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of the test's own: ``clock(seconds)`` moves it on."""
    now = [1000.0]
    monkeypatch.setattr(pytest.importorskip("tqdm.std"), "time", lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


def go_through(clock: Clock, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, **options: float) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    seen = []
    for number in ms.telemetry.progress(range(4), title="train", **options):  # type: ignore[arg-type]
        seen.append(number)
        clock(30.0)
    assert seen == [0, 1, 2, 3]


def test_a_bar_at_a_terminal_on_rank_0_only(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    go_through(clock, True, monkeypatch)
    last = capsys.readouterr().err.split("\r")[-1]
    assert (last.startswith("train: 100%") and "4/4" in last and last.endswith("\n")) if RANK == 0 else not last


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


@pytest.mark.parametrize("without", ["tqdm", "a terminal"])
def test_without_tqdm_or_a_terminal_the_loop_runs_without_a_bar(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Captured, without: str
) -> None:
    if without == "tqdm":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    go_through(clock, without == "tqdm", monkeypatch)
    assert capsys.readouterr().err == ""


def test_lines_now_and_then_if_asked_for(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    go_through(clock, False, monkeypatch, every_seconds=60)
    lines = capsys.readouterr().err.replace("\r", "").split("\n")
    assert sorted({*lines} - {""}) == ([] if RANK else ["train: 2/4 01:00 30.00s/it", "train: 4/4 02:00 30.00s/it"])


def test_an_error_in_a_loop_that_counts_by_hand_leaves_the_last_line(clock: Clock, capsys: Captured) -> None:
    bar = ms.telemetry.progress(title="rows", every_seconds=30)
    clock(40.0)
    bar.update(1000)
    with pytest.raises(ZeroDivisionError), bar:
        bar.update(1 // 0)
    assert ("rows: 1000/? 00:40 25.00it/s\n" in capsys.readouterr().err) == (RANK == 0)
    assert bar.count == 1000


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        ((3,), {}, ms.errors.OptionTypeError),
        ((), {"total": -1}, ms.errors.OptionError),
        ((), {"total": "many"}, ms.errors.OptionError),
        (([],), {"every_seconds": 0}, ms.errors.OptionError),
    ],
)
def test_what_is_refused(args: tuple[object, ...], options: dict[str, object], error: type[Exception]) -> None:
    assert {each.error for each in outcomes(lambda: ms.telemetry.progress(*args, **options))} == {error}  # type: ignore[arg-type]
