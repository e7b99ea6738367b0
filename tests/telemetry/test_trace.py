"""Traces: what is recorded, one clock for all ranks, files that viewers can read, and nothing that runs unasked."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context, gather_texts, outcomes
from traces import overlapping, plant, read_events

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
def folder(tmp_path: Path) -> Path:
    """A folder that all ranks see."""
    return Path(gather_texts(str(tmp_path))[0]) / "a trace"


@pytest.fixture(autouse=True)
def _all_off_afterwards() -> Iterator[None]:
    yield
    assert observers.observers == []


def train(strategy: ms.Strategy, steps: int = STEPS) -> None:
    """Make collectives of all kinds of ways: quick ones and others, in steps, in a span and outside."""
    with strategy.scope():
        weights = ms.Variable(np.zeros((8, 8)), name="weights")
        optimizer = ms.optimizers.SGD(0.1)

    def step() -> Any:
        replica = context()
        with ms.telemetry.span("load"):
            time.sleep(0.001 * (RANK == 1))
        optimizer.apply_gradients([(np.ones((8, 8)), weights)])
        replica.all_reduce("SUM", np.ones(3, np.float32))
        replica.all_reduce("MEAN", {"a": 1.0, "b": 2.0})
        replica.all_reduce_async("MAX", np.ones(100_000)).wait()
        return replica.all_reduce("SUM", [np.ones(5), np.ones(2, np.int64)], name="by name")

    for _ in range(steps):
        strategy.run(step)
    strategy.barrier("all here")
    strategy.gather(np.ones(2), axis=0)


def recorded(strategy: ms.Strategy, folder: Path, steps: int = STEPS) -> None:
    with ms.telemetry.trace(folder) as trace:
        train(strategy, steps)
    assert Path(trace.path).parent == folder
    gather_texts("all have written")


def test_all_ranks_are_on_one_clock_and_viewers_can_read_it(strategy: ms.Strategy, folder: Path) -> None:
    recorded(strategy, folder)
    if RANK:
        return
    timeline = timeline_of(str(folder))
    assert list(timeline.by_rank()) == list(range(SIZE))
    assert [each.is_whole for each in timeline.recordings] == [True] * SIZE
    meetings = overlapping(timeline, SIZE)
    assert meetings >= 5 * STEPS + 1 if SIZE > 1 else meetings == 0
    timeline.write(str(folder / "trace.json"))
    events = read_events(folder / "trace.json")
    for rank in range(SIZE):
        mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        names = Counter(event["name"] for event in mine)
        assert [f"step {number}" in names for number in range(1, STEPS + 1)] == [True] * STEPS
        assert names["load"] == STEPS
        assert names["all_reduce SUM 12 B"] == names["all_reduce MEAN 16 B"] == STEPS
        steps = [event for event in mine if event["cat"] == "step"]
        quick = [event for event in mine if event["name"] == "all_reduce SUM 12 B"]
        for step, call in zip(steps, quick, strict=True):
            assert step["ts"] <= call["ts"]
            assert call["ts"] + call["dur"] <= step["ts"] + step["dur"]
        assert {"op": "SUM", "bytes": 12, "values": "float32[3] (12 B)"}.items() <= quick[0]["args"].items()
        assert re.fullmatch(r"test_trace\.py:\d+", quick[0]["args"]["line"])
        if SIZE > 1:
            assert names["apply_gradients SUM"] + names["apply_gradients SUM 512 B"] == STEPS
            assert names["all_reduce MAX 781 KiB"] == names["all_reduce SUM 56 B"] == STEPS
            assert names["barrier"] == names["gather"] == 1
            assert sum("waited_us" in event["args"] for event in mine) >= 5 * STEPS


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("clocks", [{1: 3e6}, {1: -5.0, 3: 0.123456789}, {0: 1e6, 1: -1e3, 2: 7e-9, 3: 1.0}])
def test_planted_clocks_are_found_between_made_up_nodes(folder: Path, clocks: dict[int, float]) -> None:
    nodes = OnNodes([rank % 2 for rank in range(SIZE)], ms.MpiAllReduce())
    recorded(nodes, folder, 20)
    nodes.close()
    if RANK:
        return
    planted = {rank: ahead for rank, ahead in clocks.items() if rank < SIZE}
    plant(folder, planted)
    timeline = timeline_of(str(folder))
    assert overlapping(timeline, SIZE, 2 * max(each.uncertainty for each in timeline.clocks.values())) >= 6 * 20
    for recording in timeline.recordings[1:]:
        header = recording.header
        clock = timeline.clocks[header["clock"]]
        if header["clock"] != timeline.recordings[0].header["clock"]:
            assert clock.meetings >= 6 * 20
            assert 0 <= clock.uncertainty < 20e3
            ahead = planted.get(header["rank"], 0) - planted.get(0, 0)
            assert abs(clock.offset / 1e6 + ahead) < 0.02
    text = "\n".join(report(timeline))
    assert re.search(
        r"clock of node1 \(rank 1\): [+-]\d+\.\d{6} s against .*, known to \S+ us from \d+ collectives", text
    )


@pytest.mark.mpi(min_size=2)
def test_the_last_to_come_are_named(strategy: ms.Strategy, folder: Path) -> None:
    with ms.telemetry.trace(folder):
        for _ in range(4):
            time.sleep(0.05 * (RANK == SIZE - 1))
            strategy.reduce("SUM", np.ones(3))
    gather_texts("all have written")
    if RANK == 0:
        timeline = timeline_of(str(folder))
        lines = list(report(timeline))
        waited = [line for line in lines if line.startswith("waited")]
        assert re.search(
            r"waited 0\.\d+ s in Strategy\.reduce at test_trace\.py:\d+ from .*: "
            rf"rank {SIZE - 1} came last to [234] of 4",
            waited[0],
        )


def test_nothing_recorded_leaves_no_file_and_what_is_no_folder_is_refused(folder: Path) -> None:
    wrong: list[Any] = [3, "", None]
    for bad in wrong:
        assert {each.error for each in outcomes(lambda bad=bad: ms.telemetry.trace(bad))} == {ms.errors.OptionTypeError}
    with ms.telemetry.trace(folder) as trace:
        pass
    assert trace.path == ""
    assert not folder.exists()


def test_two_recordings_at_a_time_and_one_after_the_other(strategy: ms.Strategy, folder: Path) -> None:
    with ms.telemetry.trace(folder / "outer"):
        with ms.telemetry.trace(folder / "inner"):
            bad = outcomes(lambda: strategy.run(lambda: context().all_reduce("SUM", "no number")))
            assert {each.error for each in bad} == {ms.errors.DTypeError}  # and what it ended is closed
            strategy.reduce("SUM", 1.0)
        strategy.reduce("SUM", 1.0)
        gather_texts("all have written")
        again = ms.telemetry.trace(folder / "inner")
        again.start()
        strategy.reduce("SUM", 1.0)
        again.stop()
        again.stop()
    gather_texts("all have written")
    if RANK == 0:
        counts = {
            name: sum(each["name"].startswith("reduce") for each in timeline_of(str(folder / name)).events)
            for name in ("outer", "inner")
        }
        assert counts == {"outer": 3 * SIZE, "inner": 2 * SIZE}


def test_saves_of_checkpoints_are_there(strategy: ms.Strategy, folder: Path) -> None:
    with strategy.scope():
        weights = ms.Variable(np.zeros(3))
    with ms.telemetry.trace(folder / "trace"):
        ms.Checkpoint(weights=weights).save(folder / "saved", wait=False).wait()
    gather_texts("all have written")
    if RANK == 0:
        mine = [each for each in timeline_of(str(folder / "trace")).events if each["pid"] == 0]
        assert [each["name"] for each in mine] == ["save", "write a checkpoint", "wait"]
        assert len({each["tid"] for each in mine}) == 2


def test_where_nothing_can_be_written_the_job_goes_on(
    strategy: ms.Strategy, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if RANK == 0:
        folder.write_text("a file")
    gather_texts("the file is there")
    with ms.telemetry.trace(folder / "below"):
        assert strategy.reduce("SUM", 1.0) == SIZE
        time.sleep(3 * recorder.SECONDS_BETWEEN_WRITES)
        assert strategy.reduce("SUM", 1.0) == SIZE
    said = capsys.readouterr().err
    assert said.count("mpistrategy cannot write its trace to ") == 1
    assert "Not a directory. The job goes on without." in said


def test_a_rank_records_so_much_and_no_more(
    strategy: ms.Strategy, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_EVENTS", 2)
    with ms.telemetry.trace(folder):
        for _ in range(3):
            strategy.reduce("SUM", 1.0)
    assert "cannot write its trace" in capsys.readouterr().err
    gather_texts("all have written")
    if RANK == 0:
        assert len(timeline_of(str(folder)).events) == 2 * SIZE


def test_a_forked_child_leaves_the_file_alone(strategy: ms.Strategy, folder: Path) -> None:
    with ms.telemetry.trace(folder) as trace:
        with ms.telemetry.span("before"):
            pass
        child = os.fork()
        if child == 0:
            with ms.telemetry.span("in the child"):
                pass
            os._exit(bool(observers.observers))
        assert os.waitpid(child, 0)[1] == 0
        with ms.telemetry.span("after"):
            pass
    found = timeline_module.read(trace.path)
    assert found is not None
    assert [each["name"] for each in found.events] == ["before", "after"]


# ------------------------------------------------------------------------------------- damaged and foreign files


def a_trace(folder: Path, group: str = "", **header: Any) -> Path:
    """Write a small recording by hand."""
    folder.mkdir(exist_ok=True)
    told = {
        "version": 3, "rank": 0, "size": 2, "host": "n", "process": 1, "program": "p.py", "clock": "c",
        "monotonic_us": 0.0, "wall_us": 0.0, "begun": "2026-01-01T00:00:00",
    } | header  # fmt: skip
    track = {"pid": told["rank"], "tid": 0}
    events: list[dict[str, Any]] = [
        {"name": "mpistrategy", "ph": "M", "ts": 0, **track, "args": told},
        {"name": "a", "cat": "span", "ph": "X", "ts": 10, "dur": 10, **track, "args": {}},
        {"name": "c", "cat": "collective", "ph": "X", "ts": 40, "dur": 10, **track, "args": {"number": 1}},
    ]
    if group:
        events[-1]["args"]["group"] = group
    path = folder / f"rank-{told['rank']}.{told['process']}.json"
    text = "".join(json.dumps(event) + ",\n" for event in events)
    path.write_text(f'[\n{text}{{"name":"d","ca', encoding="utf-8")
    return path


def test_a_line_that_was_cut_costs_only_itself(tmp_path: Path) -> None:
    a_trace(tmp_path / "t")
    timeline = timeline_of(str(tmp_path / "t"))
    found = [(each["name"], each["ts"], each["dur"]) for each in timeline.events]
    assert found == [("a", 0, 10), ("c", 30, 10)]
    text = "\n".join(report(timeline))
    assert "no recording of rank 1 of 2" in text
    assert "not ended in order (killed, or still running): rank 0" in text
    assert "1 lines could not be read" in text


def test_only_the_newest_run_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    for start, process in ((0.0, 1), (1e6, 2), (2e6, 3)):
        for rank in (0, 1):
            a_trace(folder, f"run{process}", wall_us=start + rank, process=process, rank=rank)
    a_trace(folder, wall_us=3e6, process=4, rank=1)  # a child of rank 1
    timeline = timeline_of(str(folder))
    assert [(each.header["rank"], each.header["process"]) for each in timeline.recordings] == [(0, 3), (1, 3)]
    assert "left out: 5 files of other runs in the same folder" in list(report(timeline))


@pytest.mark.parametrize("what", ["no folder", "empty", "foreign", "newer", "unwritable"])
def test_the_command_says_what_it_cannot_do(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t"
    if what != "no folder":
        folder.mkdir()
    if what == "foreign":
        (folder / "rank-0.json").write_text("hello\n")
    elif what == "newer":
        a_trace(folder, version=4)
    elif what == "unwritable":
        a_trace(folder)
        (folder / "trace.json").mkdir()
    status = main.main(["trace", str(folder)])
    said = capsys.readouterr().err
    expected = {
        "no folder": "No such file", "empty": "no recordings in", "foreign": "no recordings in",
        "newer": "version 4 of the format", "unwritable": "directory",
    }  # fmt: skip
    assert status == 2
    assert expected[what] in said
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


@pytest.mark.parametrize("how", ["environment", "option"])
def test_a_program_as_it_stands(launch: Launch, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, folder = launching.program(PROGRAM, tmp_path), tmp_path / "a trace"
    if how == "environment":
        launch(3, program, env={"MPISTRATEGY_TRACE": str(folder)}).check()
    else:
        launch(3, ["-m", "mpistrategy", "run", "--trace", folder, program]).check()
    timeline = timeline_of(str(folder))
    assert list(timeline.by_rank()) == [0, 1, 2]
    assert all(each.is_whole for each in timeline.recordings)
    assert overlapping(timeline, 3) >= 6
    for path in folder.glob("rank-*.json"):
        assert json.loads(path.read_text())[-1]["name"] == "end", "each file opens in a viewer as it is"
    assert main.main(["trace", str(folder), "-o", str(tmp_path / "out.json")]) == 0
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


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mpistrategy.telemetry.tracing import plot

    folder = tmp_path / "t"
    with ms.telemetry.trace(folder):
        train(ms.OneDeviceStrategy("CPU:0"))
    assert plot.draw(timeline_of(str(folder)), str(tmp_path / "a.png")) == ""
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "No such file" in plot.draw(timeline_of(str(folder)), str(tmp_path / "none" / "b.png"))
