"""What the ranks of many nodes read and write to hear that one of them is busy, or that a collective is late."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.watchdog import alarm, group
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.roll_call import Account
from mpistrategy.mpi.watchdog.run_directory import RunDirectory
from mpistrategy.mpi.watchdog.status_board import ANSWERED, BYTES, WELL, RankStatus, StatusBoard

pytestmark = pytest.mark.one_rank
LIMIT = 600.0


class Counted(RunDirectory):
    """A run directory that counts what is done with it."""

    def __init__(self, path: Path, done: Counter[str]) -> None:
        super().__init__(str(path))
        self._done = done

    def read(self, name: str) -> str:
        self._done["read"] += 1
        return super().read(name)

    def has(self, name: str) -> bool:
        self._done["has"] += 1
        return super().has(name)

    def names(self) -> list[str]:
        self._done["names"] += 1
        return super().names()

    def write(self, name: str, text: str) -> bool:
        self._done["write"] += 1
        return super().write(name, text)


class Job:
    """The groups of pretended ranks, in rank order, all with one run directory."""

    def __init__(self, path: Path, nodes: int, local: int) -> None:
        self.path, self.local, self.done = path, local, Counter[str]()
        self.now = 1_000.0
        #: Until when the last rank is busy.
        self.busy_until = 0.0
        self.groups: list[Group] = []
        for node in range(nodes):
            segments = tuple(np.zeros(BYTES, np.uint8) for _ in range(local))
            for rank in range(local):
                guard = Guard(None, node * local + rank, nodes * local)
                guard.timeout = LIMIT
                board = StatusBoard(SharedMemory(segments, rank, True))
                self.groups.append(Group(guard, board, node, nodes, Counted(path, self.done)))
                self.groups[-1].ranks = range(nodes * local)

    def beat(self, now: float, state: int = WELL) -> None:
        for rank, each in enumerate(self.groups):
            expected = self.busy_until if rank == len(self.groups) - 1 else 0.0
            each.board.write(RankStatus(rank, 7000 + rank, state, now, expected, 9.0, LIMIT, 0, "in #7 barrier"))

    def tick(self, later: float = 0.0) -> list[bool]:
        """Let all ranks look, of which all but the last one are late; return which of these are excused."""
        self.now = now = self.now + later
        self.beat(now)
        for each in self.groups:
            each.update_nodes(now)
        return [each.is_excused(now, LIMIT) for each in self.groups[:-1]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Job]:
    def make(nodes: int, local: int) -> Job:
        made = Job(tmp_path / f"run-{nodes}", nodes, local)
        clock = SimpleNamespace(monotonic=lambda: made.now, time=lambda: made.now + 1.7e9, sleep=lambda seconds: None)
        monkeypatch.setattr(group, "time", clock)
        return made

    return make


@pytest.mark.parametrize("local", [1, 4])
def test_a_node_that_is_busy_is_asked_after_growing_pauses_by_one_rank_of_a_node(
    job: Callable[[int, int], Job], local: int
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


def test_a_node_that_is_done_early_is_found_out(job: Callable[[int, int], Job]) -> None:
    ranks = job(3, 2)
    ranks.busy_until = ranks.now + 50_000
    assert all(all(ranks.tick(1)) for _ in range(300))
    ranks.busy_until = ranks.now - LIMIT
    late = next(seconds for seconds in range(1_000) if not all(ranks.tick(1)))
    assert late <= 2 * LIMIT / 10 + 2


def test_a_rank_that_nobody_excuses_is_late_when_its_node_has_looked(job: Callable[[int, int], Job]) -> None:
    ranks = job(2, 3)
    for _ in range(2):
        excused = ranks.tick(1)
    assert not any(excused)
    assert ranks.done["names"] <= 6


def test_a_node_whose_reader_has_stopped_is_served_by_the_next_rank(job: Callable[[int, int], Job]) -> None:
    ranks = job(2, 3)
    ranks.beat(ranks.now)
    ranks.groups[0].board.write(RankStatus(0, 7000, WELL, ranks.now - 60, 0.0, 0.0, LIMIT, 0, "stopped"))
    assert not ranks.groups[1].is_excused(ranks.now, LIMIT)
    assert not ranks.groups[2].is_excused(ranks.now, LIMIT)
    assert ranks.done["names"] == 1


def test_the_first_node_that_raises_the_alarm_calls_the_roll_and_reads_each_file_once(
    job: Callable[[int, int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    for nodes in (4, 16):
        ranks = job(nodes, 2)
        speakers = ranks.groups[::2]
        ranks.beat(ranks.now, ANSWERED)
        for rank, each in enumerate(ranks.groups):
            each.board.write_record(f"the stacks of {rank}\nline")
        for each in (speakers[2], *speakers):
            each.alarm()
        assert [each.calls_the_roll() for each in speakers] == [node == 2 for node in range(nodes)]
        caller, others = speakers[2], [each for each in speakers if each is not speakers[2]]
        monkeypatch.setattr(group, "_CLAIM_LOOKS", 1)
        for each in others:
            each.tell([Account(status, 0.0) for status in each.board.read()])
            assert not each.is_published()
        ranks.done.clear()
        alarm._speak(caller, time.monotonic(), {}, 4, "[rank 4] ")
        assert ranks.done["read"] <= nodes, "each file once, and who calls"
        assert all(each.is_published() for each in others)
        assert not others[0].calls_the_roll()
        files = sorted(path.name for path in ranks.path.iterdir())
        assert len(files) <= nodes + 1
        assert "node-2.json" not in files
        told = json.loads((ranks.path / "error-4.json").read_text())
        assert len(told["ranks"]) == 2 * nodes
        assert told["records"]["5"] == ["the stacks of 5", "line"]
        assert json.loads((ranks.path / "node-1.json").read_text())["records"]["3"] == ["the stacks of 3", "line"]


def test_a_long_record_keeps_its_beginning_and_its_end(job: Callable[[int, int], Job]) -> None:
    (alone,) = job(1, 1).groups
    alone.board.write_record(f"first\n{'x' * BYTES}\nlast")
    (record,) = alone.records().values()
    assert (record[0], record[-1]) == ("first", "last")
    assert "... (cut)" in record
