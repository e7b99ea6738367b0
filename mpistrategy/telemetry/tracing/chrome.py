"""A timeline in Chrome's Trace Event Format, which Perfetto and chrome://tracing show: a process for each rank."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from mpistrategy import own_files
from mpistrategy.errors import TraceError
from mpistrategy.mpi.job.introductions import version
from mpistrategy.objects.shown import size_in_words
from mpistrategy.telemetry.tracing.recordings import Interval
from mpistrategy.telemetry.tracing.timeline import Timeline


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events: names first, then what happened, by time."""
    threads: dict[tuple[int, int], str] = {}
    for recording in timeline.recordings:
        for number, (name, replica) in recording.threads.items():
            threads[recording.rank if replica is None else replica, number] = name
    hosts = {each.rank: each.header["host"] for each in timeline.recordings}
    for rank in timeline.ranks:
        host = f" on {hosts[rank]}" if rank in hosts else ""
        yield _name("process_name", rank, 0, name=f"rank {rank}{host}")
        yield _name("process_sort_index", rank, 0, sort_index=rank)
    for (rank, number), name in threads.items():
        yield _name("thread_name", rank, number, name=name)
        yield _name("thread_sort_index", rank, number, sort_index=number)
    for each in timeline.intervals:
        yield _event(each)


def _name(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": args}


def _event(each: Interval) -> dict[str, Any]:
    kinds = {"call": "collective", "step": "step", "span": "span"}
    return {
        "name": title(each),
        "cat": kinds[each.kind],
        "ph": "X",
        "ts": round(each.start / 1e3, 3),
        "dur": round((each.end - each.start) / 1e3, 3),
        "pid": each.rank,
        "tid": each.thread,
        "args": _args(each),
    }


def title(each: Interval) -> str:
    """Return what an interval is called: ``all_reduce SUM 24 B``, ``step 3``, the name of a span."""
    if each.kind == "step":
        text = f"step {each.number}"
    elif each.kind == "span":
        text = each.name
    else:
        nbytes = each.what.get("bytes", 0)
        parts = [each.name.rpartition(".")[2], each.what.get("op", ""), size_in_words(nbytes) if nbytes else ""]
        text = " ".join(filter(None, parts))
    return f"{text} (not left)" if each.is_open else text


def _args(each: Interval) -> dict[str, Any]:
    if each.kind == "step":
        return {"function": each.name, "number": each.number}
    if each.kind == "span":
        return {}
    told = {name: each.what.get(name, "") for name in ("call", "op", "values", "bytes", "destination", "name")}
    args = {name: value for name, value in told.items() if value not in ("", 0)}
    args["line"] = each.what.get("place", "")
    args["number"] = each.number
    if each.last_rank >= 0:
        args |= {"waited_us": round(each.waited / 1e3, 3), "last_rank": each.last_rank}
    return args


def write(timeline: Timeline, path: str) -> int:
    """Write a file, compressed if its name ends in .gz, as a whole; return the number of events.

    Who may read it: as of checkpoints (`mpistrategy.own_files.file_mode`).

    Raises:
        TraceError: when it cannot be written.
    """
    count = 0
    begun = timeline.recordings[0].header["begun"] if timeline.recordings else ""
    about = {"program": timeline.recordings[0].header["program"], "begun": begun, "mpistrategy": version()}
    try:
        with own_files.whole_file(path) as whole, _text(whole, path.endswith(".gz")) as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n')
            for event in events(timeline):
                file.write((",\n" if count else "") + json.dumps(event))
                count += 1
            file.write("\n]}\n")
    except OSError as error:
        raise TraceError.at(
            "mpistrategy trace", found=f"{path}: {error.strerror or error}", expected="a file that can be written"
        ) from error
    return count


@contextmanager
def _text(file: IO[bytes], compressed: bool) -> Iterator[IO[str]]:
    if compressed:
        import gzip  # here, for the quick start of `mpistrategy run`

        with gzip.open(file, "wt", encoding="utf-8") as text:
            yield text
    else:
        with io.TextIOWrapper(file, encoding="utf-8") as text:
            yield text
