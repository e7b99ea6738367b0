"""What the ranks of many nodes read and write to hear that one of them is busy, or that a collective is late."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pretended import LIMIT, PretendedJob

from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.flight_recorder import LENGTH
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog.status_board import BYTES, WELL, RankStatus

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
@pytest.mark.slow
def test_a_node_that_is_busy_is_asked_after_growing_pauses_by_one_rank_of_a_node(
    job: Callable[[int, int], PretendedJob], local: int
) -> None:
    done = []
    for nodes in (4, 16):
        ranks = job(nodes, local)
        ranks.busy_until = ranks.now + 5_000
        assert all(all(ranks.tick(1)) for _ in range(1_000))
        assert ranks.done["names"] <= nodes * (12 + 1_000 / (LIMIT / 10)), "pauses grow to a tenth of the limit"
        assert ranks.done["read"] == 0, "nobody opens a file a node"
        assert ranks.done["write"] <= nodes * (3 + 1_000 / 60)
        done.append(sum(ranks.done.values()))
    assert done[1] <= 5.5 * done[0], "in proportion to the nodes that wait"


def test_a_node_that_is_done_early_is_found_out(job: Callable[[int, int], PretendedJob]) -> None:
    ranks = job(3, 2)
    ranks.busy_until = ranks.now + 50_000
    assert all(all(ranks.tick(1)) for _ in range(300))
    ranks.busy_until = ranks.now - LIMIT
    late = next(seconds for seconds in range(1_000) if not all(ranks.tick(1)))
    assert late <= 2 * LIMIT / 10 + 2


def test_a_rank_that_nobody_excuses_is_late_when_its_node_has_looked(job: Callable[[int, int], PretendedJob]) -> None:
    ranks = job(2, 3)
    for _ in range(2):
        excused = ranks.tick(1)
    assert not any(excused)
    assert ranks.done["names"] <= 6


def test_a_node_whose_reader_has_stopped_is_served_by_the_next_rank(job: Callable[[int, int], PretendedJob]) -> None:
    ranks = job(2, 3)
    ranks.beat()
    ranks.groups[0].board.write(RankStatus(0, 7000, WELL, ranks.now - 60, 0.0, 0.0, LIMIT, 0, "stopped"))
    assert not ranks.groups[1].is_excused(ranks.now, LIMIT)
    assert not ranks.groups[2].is_excused(ranks.now, LIMIT)
    assert ranks.done["names"] == 1


@pytest.mark.parametrize("nodes", [4, 64])
def test_the_first_node_that_raises_the_alarm_calls_the_roll_and_reads_each_file_once(
    job: Callable[[int, int], PretendedJob], nodes: int
) -> None:
    ranks = job(nodes, 2)
    ranks.busy_until = ranks.now + 1
    ranks.tick(1)
    ranks.done.clear()
    ranks.raise_alarm(2)
    assert ranks.done["read"] <= 4 * nodes, "who calls, whether it is there, and each file once"
    assert ranks.done["write"] <= 2 * nodes + 2
    speakers = ranks.groups[::2]
    assert all(each.is_published() for each in speakers)
    assert not any(each.calls_the_roll() for each in speakers)
    files = sorted(path.name for path in ranks.path.iterdir())
    assert len(files) <= nodes + 1
    assert "node-2.json" not in files
    told = json.loads((ranks.path / "error-4.json").read_text())
    assert len(told["ranks"]) == 2 * nodes
    assert told["records"]["5"] == ["the stacks of 5", "line"]
    assert json.loads((ranks.path / "node-1.json").read_text())["records"]["3"] == ["the stacks of 3", "line"]


def test_a_long_record_keeps_its_beginning_and_its_end(job: Callable[[int, int], PretendedJob]) -> None:
    (alone,) = job(1, 1).groups
    alone.board.write_record(f"first\n{'x' * BYTES}\nlast")
    (record,) = alone.records().values()
    assert (record[0], record[-1]) == ("first", "last")
    assert "... (cut)" in record


@pytest.mark.slow
def test_the_records_of_many_ranks_fit_into_the_file_that_others_read(job: Callable[[int, int], PretendedJob]) -> None:
    ranks = job(1, 400)
    ranks.beat()
    for each in ranks.groups:
        each.board.write_record(f"first\n{'x' * BYTES}\nlast")
    first = ranks.groups[0]
    assert first.tell([])
    records = json.loads(first.directory.read("node-0.json"))["records"]
    assert len(records) == 400
    assert all((record[0], record[-1]) == ("first", "last") for record in records.values())


def recorded(guard: Guard, number: int, entered: float) -> Call:
    call = Call(guard, "a call")
    call.number, call.entered = number, entered
    return call


def test_the_last_calls_of_a_rank_are_shown_to_whoever_looks(job: Callable[[int, int], PretendedJob]) -> None:
    ranks = job(1, 2)
    first, second = ranks.groups
    record = first.guard.record
    for number in range(LENGTH + 44):
        record.entries.append(recorded(first.guard, number + 1, 10.0 + number))
    first.note_calls()
    shown, nothing = second.board.calls()
    assert [*shown.entered] == [*range(45, LENGTH + 45)]
    assert shown.entered[LENGTH + 44] == int((10.0 + LENGTH + 43) * 1e9)
    assert (shown.strategy, shown.ranks) == (first.identity, 2)
    assert nothing.entered == {}
    record.entries.append(recorded(first.guard, LENGTH + 45, 999.0))
    first.note_calls()
    assert [*second.board.calls()[0].entered] == [*range(46, LENGTH + 46)]
