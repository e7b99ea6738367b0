"""What the ranks of many nodes read and write to hear that one of them is busy, or that a collective is late."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pretended import LIMIT, PretendedJob

from mpistrategy import own_files
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.flight_recorder import LENGTH
from mpistrategy.mpi.watchdog import alarm, reports, run_directory
from mpistrategy.mpi.watchdog.status_board import BYTES

pytestmark = pytest.mark.one_rank


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[int, int], PretendedJob]]:
    with ExitStack() as stack:

        def make(nodes: int, local: int) -> PretendedJob:
            made = PretendedJob(tmp_path / f"run-{nodes}", nodes, local)
            stack.enter_context(made.clock())
            return made

        yield make


@pytest.mark.parametrize("local", [1, 4])
def test_a_busy_node_excuses_the_others(job: Callable[[int, int], PretendedJob], local: int) -> None:
    ranks = job(4, local)
    ranks.busy_until = ranks.now + 500
    ranks.hear()
    assert all(all(ranks.tick(10)) for _ in range(50))
    assert len([*ranks.path.iterdir()]) == 1, "one file says it for all"
    assert all(all(ranks.tick(1)) for _ in range(int(LIMIT) - 10)), "their limit begins when it is over"
    assert not any([ranks.tick(10), ranks.tick(10)][-1])


def test_a_rank_that_nobody_excuses_is_late(job: Callable[[int, int], PretendedJob]) -> None:
    ranks = job(2, 3)
    assert not any(ranks.tick(1))


def test_a_file_system_that_hangs_keeps_nobody(
    job: Callable[[int, int], PretendedJob], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = job(2, 1)
    first, _ = ranks.groups
    over = threading.Event()
    monkeypatch.setattr(os, "listdir", lambda path: over.wait(60))
    monkeypatch.setattr(own_files, "make_folder", lambda path: over.wait(60))
    monkeypatch.setattr(run_directory, "FILE_SECONDS", 0.1)
    monkeypatch.setattr(alarm, "_NODES_SECONDS", 0.1)
    monkeypatch.setattr(reports, "_captured", lambda: None)  # else it writes past pytest
    try:
        first.look_at_nodes(1_000)
        assert not first.is_excused(10_000, 0.5)
        ranks.beat()
        alarm.call_the_roll([first], "[rank 0] ")
        told = capfd.readouterr().err
        assert "roll call: a collective is late" in told, "a node that can read no other's files calls the roll"
        assert "last collectives are above" in told
        assert "record of rank 0: " in told
    finally:
        over.set()


@pytest.mark.parametrize("nodes", [4, 64])
def test_the_first_node_that_raises_the_alarm_calls_the_roll(
    job: Callable[[int, int], PretendedJob], nodes: int
) -> None:
    ranks = job(nodes, 2)
    ranks.busy_until = ranks.now + 2 * LIMIT
    ranks.tick(1)
    assert ranks.path.exists()
    ranks.raise_alarm(2)
    speakers = ranks.groups[::2]
    assert all(each.directory.read("roll-call.txt") for each in speakers)
    files = sorted(path.name for path in ranks.path.iterdir())
    assert files == sorted(["roll-call.txt", *(f"error-{node}.json" for node in range(nodes))])
    told = json.loads((ranks.path / "error-2.json").read_text())
    assert len(told["ranks"]) == 2 * nodes
    assert (told["unknown"], told["text"]) == ([], (ranks.path / "roll-call.txt").read_text())
    assert told["records"]["5"] == ["the stacks of 5", "line"]
    assert json.loads((ranks.path / "error-1.json").read_text())["records"]["3"] == ["the stacks of 3", "line"]


def test_a_call_that_is_being_written_is_not_shown(job: Callable[[int, int], PretendedJob]) -> None:
    """A rank may be stopped in the middle of it, and another processor may show its parts in another order."""
    ranks = job(1, 2)
    ranks.beat()
    first, second = ranks.groups
    for _ in range(LENGTH + 5):
        with Call(first.guard, "a call", anywhere=True):
            pass
    record, number = first.guard.record, LENGTH + 6
    record.before[number % LENGTH] = number
    record.times[number % LENGTH] = 1e9
    assert [*second.board.read()[0].calls] == [*range(7, LENGTH + 6)]
    record.after[number % LENGTH] = number
    assert [*second.board.read()[0].calls.items()][-1] == (number, 1e9)


def test_a_node_that_goes_on_with_work_without_an_end_is_waited_for(job: Callable[[int, int], PretendedJob]) -> None:
    """As in a save: every second it says that it is busy until now."""
    ranks = job(2, 1)
    for seconds in range(2 * int(LIMIT)):
        ranks.busy_until = ranks.now + 1
        assert all(ranks.tick(1)) or seconds < LIMIT / 10 + 5
        assert seconds > LIMIT / 10 - 5 or not ranks.path.exists(), "a short save is not told"
        assert not ranks.path.exists() or len([*ranks.path.iterdir()]) == 1


def test_a_long_record_keeps_its_beginning_and_its_end(job: Callable[[int, int], PretendedJob]) -> None:
    ranks = job(1, 1)
    (alone,) = ranks.groups
    ranks.beat()
    alone.board.write_record(f"first\n{'x' * BYTES}\nlast")
    record = alone.board.read()[0].record.splitlines()
    assert (record[0], record[-1]) == ("first", "last")
    assert "... (cut)" in record
