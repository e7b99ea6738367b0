"""Progress: a bar of tqdm's on rank 0 at a terminal, nothing elsewhere, a line now and then if asked for."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from replicas import RANK, outcomes

import mpistrategy as ms


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock of the test's own: ``clock(seconds)`` moves it on."""
    now = [1000.0]
    monkeypatch.setattr(pytest.importorskip("tqdm.std"), "time", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


class Stderr(io.StringIO):
    """A terminal, or none."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@contextmanager
def stderr(is_terminal: bool) -> Iterator[Callable[[], str]]:
    """Give the program another stderr; yield what returns what was written."""
    before, sys.stderr = sys.stderr, Stderr(is_terminal)
    try:
        yield sys.stderr.getvalue
    finally:
        sys.stderr = before


def go_through(clock: Callable[[float], None], **options: float) -> list[int]:
    seen = []
    for number in ms.telemetry.progress(range(4), title="train", **options):  # type: ignore[arg-type]
        seen.append(number)
        clock(30.0)
    return seen


def test_a_bar_at_a_terminal_on_rank_0_only(clock: Callable[[float], None]) -> None:
    with stderr(is_terminal=True) as written:
        assert go_through(clock) == [0, 1, 2, 3]
        last = written().split("\r")[-1]
    assert (last.startswith("train: 100%") and "4/4" in last and last.endswith("\n")) if RANK == 0 else not last


def test_log_lines_do_not_run_into_the_bar() -> None:
    logger = logging.getLogger("mpistrategy.tests.bar")
    logger.propagate = False
    handler = ms.telemetry.setup_logging(logger=logger, ranks="all", format="%(message)s")
    with stderr(is_terminal=True) as written:
        with ms.telemetry.progress(total=3, title="train") as bar:
            bar.update()
            logger.info("a line")
        lines = written().split("\n")
    logger.removeHandler(handler)
    assert any(line.rpartition("\r")[2].rpartition("] ")[2] == "a line" for line in lines)


@pytest.mark.parametrize("without", ["tqdm", "a terminal"])
def test_without_tqdm_or_a_terminal_the_loop_runs_without_a_bar(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "tqdm":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with stderr(is_terminal=without == "tqdm") as written:
        assert go_through(clock) == [0, 1, 2, 3]
        assert written() == ""


def test_lines_now_and_then_if_asked_for(clock: Callable[[float], None]) -> None:
    with stderr(is_terminal=False) as written:
        go_through(clock, every_seconds=60)
        lines = written().replace("\r", "").split("\n")
        assert sorted({*lines} - {""}) == ([] if RANK else ["train: 2/4 01:00 30.00s/it", "train: 4/4 02:00 30.00s/it"])


def test_counting_by_hand_and_without_a_total(clock: Callable[[float], None]) -> None:
    with stderr(is_terminal=False) as written:
        with ms.telemetry.progress(title="rows", every_seconds=30) as bar:
            clock(40.0)
            bar.update(1000)
        assert ("rows: 1000/? 00:40 25.00it/s\n" in written()) == (RANK == 0)
    assert bar.count == 1000


def test_an_error_in_the_loop_leaves_the_bar_behind(clock: Callable[[float], None]) -> None:
    def loop() -> None:
        with ms.telemetry.progress(total=3, every_seconds=1.0) as bar:
            clock(1.0)
            bar.update()
            bar.update(1 // 0)

    with stderr(is_terminal=False) as written:
        with pytest.raises(ZeroDivisionError):
            loop()
        assert written().endswith("\n") or RANK


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
