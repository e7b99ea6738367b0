"""Progress: a bar on rank 0 at a terminal, nothing elsewhere, a line now and then if asked for."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from replicas import RANK, outcomes

import mpistrategy as ms
from mpistrategy.telemetry import progress_bar, terminal
from mpistrategy.testing import run_replicas


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock of the test's own: ``clock(seconds)`` moves it on."""
    now = [1000.0]
    monkeypatch.delenv(progress_bar.VARIABLE, raising=False)
    monkeypatch.setattr(progress_bar, "monotonic", lambda: now[0])

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
        text = written()
    if RANK:
        assert text == ""
        return
    states = text.split("\r\x1b[K")
    assert states[0] == ""
    assert states[1].startswith("train: 1/4 (25 %), 30 s each, 1:30 left [#")
    assert states[-1].startswith("train: 4/4 (100 %), 30 s each, took 2:00 [#")
    assert states[-1].endswith("#]\n")


def test_nothing_where_there_is_no_terminal(clock: Callable[[float], None]) -> None:
    with stderr(is_terminal=False) as written:
        assert go_through(clock) == [0, 1, 2, 3]
        assert written() == ""


def test_lines_now_and_then_if_asked_for(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "train: 2/4 (50 %), 30 s each, 1:00 left\ntrain: 4/4 (100 %), 30 s each, took 2:00\n"
    with stderr(is_terminal=False) as written:
        go_through(clock, every_seconds=60)
        assert sorted(set(written().splitlines())) == ([] if RANK else expected.splitlines())
        monkeypatch.setenv(progress_bar.VARIABLE, "off")
        before = written()
        go_through(clock, every_seconds=60)
        assert written() == before


def test_counting_by_hand_and_without_a_total(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_bar.VARIABLE, "bar")
    with stderr(is_terminal=False) as written, ms.telemetry.progress(title="rows") as bar:
        clock(2.0)
        bar.update(1000)
        bar.close()
        assert written() == ("" if RANK else "\r\x1b[Krows: 1000, 500/s, 0:02\r\x1b[Krows: 1000, 500/s, 0:02\n")


def test_log_lines_do_not_run_into_the_bar(clock: Callable[[float], None]) -> None:
    with stderr(is_terminal=True) as written:
        terminal.show_bar("half [##..]")
        terminal.say("a line\n", sys.stderr)
        terminal.end_bar("all [####]")
        assert written() == "\r\x1b[Khalf [##..]\r\x1b[Ka line\nhalf [##..]\r\x1b[Kall [####]\n"


def test_simulated_replicas_share_one_bar(clock: Callable[[float], None]) -> None:
    with stderr(is_terminal=True) as written:
        run_replicas(lambda: list(ms.telemetry.progress(range(2))), 3)
        assert written().count("\n") == 1


def test_an_error_in_the_loop_leaves_the_bar_behind(clock: Callable[[float], None]) -> None:
    def loop() -> None:
        with ms.telemetry.progress(total=3) as bar:
            clock(1.0)
            bar.update(1 // 0)

    with stderr(is_terminal=True) as written:
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


def test_an_unknown_word_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_bar.VARIABLE, "loud")
    assert {each.error for each in outcomes(lambda: ms.telemetry.progress([]))} == {ms.errors.OptionError}
