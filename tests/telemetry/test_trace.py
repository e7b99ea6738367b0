"""Traces: what is recorded, one clock for all ranks, files that viewers can read, and nothing that runs unasked."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from replicas import RANK, SIZE, all_raise, context, gather_texts, new_variable
from traces import overlapping, read_events

import mpistrategy as ms
from mpistrategy.cli import main
from mpistrategy.mpi.contract import observers
from mpistrategy.telemetry.tracing import recorder
from mpistrategy.telemetry.tracing import timeline as timeline_module
from mpistrategy.telemetry.tracing.report import report
from mpistrategy.telemetry.tracing.timeline import timeline_of

Launch = Callable[..., launching.Finished]
STEPS = 5


@pytest.fixture
def folder(folder: Path) -> Path:
    """A folder that all ranks see, and that is not there yet."""
    return folder / "a trace"


def train(strategy: ms.Strategy, folder: Path) -> None:
    """Make collectives of all kinds of ways: quick ones and others, in steps, in a span and outside."""
    weights = new_variable(strategy, np.zeros((8, 8)), name="weights")
    optimizer = ms.optimizers.SGD(0.1)

    def step() -> Any:
        replica = context()
        with ms.telemetry.span("load"):
            time.sleep(0.001 * (RANK == 1))
        optimizer.apply_gradients([(np.ones((8, 8)), weights)])
        replica.all_reduce("SUM", np.ones(3, np.float32))
        replica.all_reduce("MEAN", {"a": 1.0, "b": 2.0})
        replica.all_reduce_async("MAX", np.ones(100_000)).wait()

    for _ in range(STEPS):
        strategy.run(step)
    with pytest.raises(ms.errors.DTypeError):  # and what it ended is closed
        strategy.reduce("SUM", "no number")
    strategy.barrier("all here")
    strategy.gather(np.ones(2), axis=0)
    with strategy.scope():
        ms.Checkpoint(weights=weights).save(folder / "saved", wait=False).wait()


def test_a_second_start_begins_another_file(strategy: ms.Strategy, folder: Path) -> None:
    recording = ms.telemetry.trace(folder)
    for _ in range(2):
        recording.start()
        with ms.telemetry.trace(folder):  # counts nothing twice
            strategy.reduce("SUM", 1.0)
    recording.stop()
    recording.stop()
    strategy.reduce("SUM", 1.0)
    gather_texts("all have written")
    names = [[event["name"].split()[0] for event in json.loads(path.read_text())] for path in folder.iterdir()]
    assert [own.count("reduce") for own in names] == [1, 1] * SIZE


def test_all_ranks_are_on_one_clock_and_viewers_can_read_it(strategy: ms.Strategy, folder: Path) -> None:
    with ms.telemetry.trace(folder) as trace:
        train(strategy, folder.parent)
    assert observers.observers == []
    assert Path(trace.path).parent == folder
    gather_texts("all have written")
    if RANK:
        return
    timeline = timeline_of(str(folder))
    assert [each.is_whole for each in timeline.recordings] == [True] * SIZE
    meetings = overlapping(timeline, SIZE)
    assert meetings >= 4 * STEPS + 1 if SIZE > 1 else meetings == 0
    timeline.write(str(folder / "trace.json"))
    events = read_events(folder / "trace.json")
    for rank in range(SIZE):
        mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        names = Counter(event["name"] for event in mine)
        assert [f"step {number}" in names for number in range(1, STEPS + 1)] == [True] * STEPS
        assert names["load"] == names["all_reduce SUM 12 B"] == names["all_reduce MEAN 16 B"] == STEPS
        assert names["write a checkpoint"] == (rank == 0)
        steps = [event for event in mine if event["cat"] == "step"]
        quick = [event for event in mine if event["name"] == "all_reduce SUM 12 B"]
        for step, call in zip(steps, quick, strict=True):
            assert step["ts"] <= call["ts"] <= call["ts"] + call["dur"] <= step["ts"] + step["dur"]
        assert {"op": "SUM", "bytes": 12, "values": "float32[3] (12 B)"}.items() <= quick[0]["args"].items()
        assert re.fullmatch(r"test_trace\.py:\d+", quick[0]["args"]["line"])
        if SIZE > 1:
            assert names["apply_gradients SUM"] + names["apply_gradients SUM 512 B"] == STEPS
            assert names["all_reduce MAX 781 KiB"] == STEPS
            assert names["barrier"] == names["gather"] == 1
            assert sum("waited_us" in event["args"] for event in mine) >= 4 * STEPS


@pytest.mark.mpi(min_size=2)
def test_the_last_to_come_are_named(strategy: ms.Strategy, folder: Path) -> None:
    with ms.telemetry.trace(folder):
        for _ in range(4):
            time.sleep(0.05 * (RANK == SIZE - 1))
            strategy.reduce("SUM", np.ones(3))
    gather_texts("all have written")
    if RANK == 0:
        assert re.search(
            r"waited 0\.\d+ s in Strategy\.reduce at test_trace\.py:\d+ from .*: "
            rf"rank {SIZE - 1} came last to [234] of 4",
            "\n".join(report(timeline_of(str(folder)))),
        )


def test_nothing_recorded_leaves_no_file_and_what_is_no_folder_is_refused(folder: Path) -> None:
    for bad in (3, "", None):
        all_raise(ms.errors.OptionTypeError, lambda bad=bad: ms.telemetry.trace(bad))
    with ms.telemetry.trace(folder) as trace:
        pass
    assert trace.path == ""
    assert not folder.exists()


@pytest.mark.parametrize("is_full", [False, True])
def test_where_no_more_can_be_written_the_job_goes_on(
    strategy: ms.Strategy,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_full: bool,
) -> None:
    if is_full:
        monkeypatch.setattr(recorder, "MOST_EVENTS", 2)
    elif RANK == 0:
        folder.write_text("a file")
    gather_texts("the file is there")
    with ms.telemetry.trace(folder / "below"):
        for _ in range(3):
            assert strategy.reduce("SUM", 1.0) == SIZE
    said = capsys.readouterr().err
    assert said.count("mpistrategy cannot write its trace to ") == 1
    assert ("it has 2 events" if is_full else "Not a directory. The job goes on without.") in said
    gather_texts("all have written")
    assert not is_full or len(timeline_of(str(folder / "below")).events) == 2 * SIZE


def test_a_forked_child_leaves_the_file_alone(strategy: ms.Strategy, folder: Path) -> None:
    with ms.telemetry.trace(folder) as trace:
        with ms.telemetry.span("before"):
            child = os.fork()
            if child == 0:
                os._exit(bool(observers.observers))
        assert os.waitpid(child, 0)[1] == 0
    found = timeline_module.read(trace.path)
    assert found is not None
    assert [each["name"] for each in found.events] == ["before"]


# ------------------------------------------------------------------------------------- recordings made by hand


def write(folder: Path, rank: int = 0, events: Iterable[dict[str, Any]] = (), **header: Any) -> None:
    """Write a recording whose last line was cut off."""
    folder.mkdir(exist_ok=True)
    about = {
        "version": 4, "rank": rank, "size": 2, "host": f"n{rank}", "process": 1, "program": "p.py", "clock": "c",
        "zero_us": 0.0, "wall_us": 0.0, "begun": "2026-01-01T00:00:00",
    } | header  # fmt: skip
    lines = [{"name": "mpistrategy", "ph": "M", "ts": 0, "args": about}, *events]
    text = "".join(json.dumps({"ph": "X", "pid": rank, "tid": 0, **line}) + ",\n" for line in lines)
    (folder / f"rank-{rank}.{about['process']}.json").write_text(f'[\n{text}{{"name":"d","ca', encoding="utf-8")


def collective(number: int, start: float, duration: float, group: str = "g") -> dict[str, Any]:
    args = {"group": group, "number": number}
    return {"name": "c", "cat": "collective", "ts": start, "dur": duration, "args": args}


AHEAD = 3e9


@pytest.mark.parametrize(
    ("count", "jump", "words"),
    [
        (1, 0, "known to .* us from 1 collectives"),
        (200, 0, "known to .* us from 200 collectives"),
        (200, 50e3, "which did not stay"),
        (0, 0, "by their wall clocks, which may differ"),
    ],
)
def test_the_clocks_of_two_nodes_are_told_apart_by_collectives(
    tmp_path: Path, count: int, jump: float, words: str
) -> None:
    dice = random.Random(count)
    for rank in (0, 1):
        events = []
        for number in range(count):  # both ranks are in the collective for a while
            entered, left = (dice.expovariate(1 / 20) + 2 for _ in range(2))
            ahead = rank * (AHEAD + jump * (number > count / 2))
            events.append(collective(number, 1e6 * number + ahead - entered, entered + left))
        write(tmp_path / "t", rank, events, clock=f"c{rank}", zero_us=-rank * AHEAD)
    timeline = timeline_of(str(tmp_path / "t"))
    clock = timeline.clocks["c1"]
    assert re.search(rf"clock of n1 \(rank 1\): [+-]\d+\.\d{{6}} s against .*, {words}", "\n".join(report(timeline)))
    if not jump:
        assert abs(clock.offset + AHEAD) <= clock.uncertainty < 200
        assert overlapping(timeline, 2, 2 * clock.uncertainty) == count


def test_a_line_that_was_cut_costs_only_itself(tmp_path: Path) -> None:
    write(tmp_path / "t", 0, [collective(1, 10, 10), collective(2, 40, 10)])
    timeline = timeline_of(str(tmp_path / "t"))
    assert [(each["ts"], each["dur"]) for each in timeline.events] == [(0, 10), (30, 10)]
    text = "\n".join(report(timeline))
    assert "no recording of rank 1 of 2" in text
    assert "not ended in order (killed, or still running): rank 0" in text


def test_only_the_newest_run_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    for process in (1, 2, 3):
        for rank in (0, 1):
            write(folder, rank, [collective(1, 1, 1, f"run{process}")], wall_us=process * 1e6 + rank, process=process)
    write(folder, 1, wall_us=5e6, process=4)  # a child of rank 1
    timeline = timeline_of(str(folder))
    assert [(each.header["rank"], each.header["process"]) for each in timeline.recordings] == [(0, 3), (1, 3)]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "No such file"),
        ("folder", "no recordings in"),
        ("rank-0.json", "no recordings in"),
        ("newer", "version 5 of the format"),
        ("trace.json/folder", "directory"),
    ],
)
def test_the_command_says_what_it_cannot_do(
    tmp_path: Path, what: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "t"
    if what in ("newer", "trace.json/folder"):
        write(folder, version=5 if what == "newer" else 4)
    if what.endswith("folder"):
        (folder / what).mkdir(parents=True)
    elif what.endswith(".json"):
        folder.mkdir()
        (folder / what).write_text("hello\n")
    assert main.main(["trace", str(folder)]) == 2
    assert words in capsys.readouterr().err
    assert not list(folder.glob("*.new"))


# ------------------------------------------------------------------------------------- whole jobs

PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpistrategy as ms
strategy = ms.MirroredStrategy()
rank = strategy.replica_id_in_sync_group

def step(number):
    total = ms.get_replica_context().all_reduce("SUM", np.ones(4))
    if number == 4 and rank == 1 and sys.argv[1:]:
        time.sleep(0.6)  # the others wait so long, which is written down
        os.kill(os.getpid(), signal.SIGKILL)
    return total

for number in range(6):
    strategy.run(step, args=(number,))
"""


def test_a_program_as_it_stands(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a trace"
    launch(3, PROGRAM, env={"MPISTRATEGY_TRACE": str(folder)}).check()
    for path in folder.glob("rank-*.json"):
        assert json.loads(path.read_text())[-1]["name"] == "end", "each file opens in a viewer as it is"
    pytest.importorskip("matplotlib")
    trace = ["trace", str(folder), "-o", str(tmp_path / "out.json"), "--png"]
    assert main.main([*trace, str(tmp_path / "none" / "b.png")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main.main([*trace, str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    said = capsys.readouterr().out
    assert "3 ranks on 1 node" in said
    assert "ui.perfetto.dev" in said
    assert Counter(event["cat"] for event in read_events(tmp_path / "out.json") if event["ph"] == "X")["step"] == 18


@pytest.mark.slow
def test_a_killed_job_leaves_what_its_ranks_did(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    job = launch(3, [launching.program(PROGRAM, tmp_path), "die"], env={"MPISTRATEGY_TRACE": str(folder)})
    assert job.returncode != 0
    timeline = timeline_of(str(folder))
    assert list(timeline.by_rank()) == [0, 1, 2]
    assert not any(each.is_whole for each in timeline.recordings)
    overlapping(timeline, 3)
