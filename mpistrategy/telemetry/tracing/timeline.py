"""What all ranks did, on one clock: the recordings of a run put together, and written as one file for viewers."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpistrategy import own_files
from mpistrategy.errors import TraceError
from mpistrategy.telemetry.tracing.clocks import Clock, common_clock, meetings_of
from mpistrategy.telemetry.tracing.recordings import Recording, newest_run


@dataclass
class Timeline:
    """A run.

    Attributes:
        recordings: of its ranks, with times in microseconds since the beginning of the run.
        clocks: how the clocks were read, by their names.
        seconds: how long it was recorded.
        other_files: how many recordings of other runs are in the folder.
    """

    recordings: list[Recording]
    clocks: dict[str, Clock]
    seconds: float
    other_files: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """Everything, by beginning; what lasts longer first."""
        everything = [each for recording in self.recordings for each in recording.events]
        return sorted(everything, key=lambda each: (each["ts"], -each["dur"]))

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order; those of which there is nothing but a header, too."""
        return sorted({each.rank for each in self.recordings} | {each["pid"] for each in self.events})

    def between(self, start: float, end: float) -> Timeline:
        """Return the part from one second to another."""
        for each in self.recordings:
            each.events = [e for e in each.events if e["ts"] + e["dur"] >= start * 1e6 and e["ts"] <= end * 1e6]
        return self

    def write(self, path: str) -> None:
        """Write a file for viewers, compressed if its name ends in .gz, as a whole.

        Who may read it: as of checkpoints (`mpistrategy.own_files.file_mode`).

        Raises:
            TraceError: when it cannot be written.
        """
        about = {name: self.recordings[0].header[name] for name in ("program", "begun")}
        events = [*(each for recording in self.recordings for each in recording.names), *self.events]
        try:
            with own_files.whole_file(path) as whole:
                packed: Any = gzip.GzipFile("", "wb", fileobj=whole) if path.endswith(".gz") else whole
                with io.TextIOWrapper(packed, encoding="utf-8") as file:
                    file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n')
                    file.write(",\n".join(map(json.dumps, events)) + "\n]}\n")
        except OSError as error:
            found = f"{path}: {error.strerror or error}"
            raise TraceError.at("mpistrategy trace", found=found, expected="a file that can be written") from error


def timeline_of(folder: str) -> Timeline:
    """Return the newest run in a folder, on one clock.

    Raises:
        TraceError: where there is none that can be read.
    """
    recordings, others = newest_run(folder)
    clocks = common_clock(recordings)
    zero = min((e["ts"] + clocks[each.clock].offset for each in recordings for e in each.events), default=0.0)
    for recording in recordings:
        for each in recording.events:
            each["ts"] += clocks[recording.clock].offset - zero
    _find_out_who_was_late(recordings)
    last = max((e["ts"] + e["dur"] for each in recordings for e in each.events), default=0.0)
    return Timeline(recordings, clocks, last / 1e6, others)


def _find_out_who_was_late(recordings: Sequence[Recording]) -> None:
    for meeting in meetings_of(recordings):
        last = max(meeting, key=lambda each: float(each["ts"]))
        for each in meeting if len(meeting) > 1 else ():
            waited = max(0.0, min(last["ts"] - each["ts"], each["dur"]))
            each["args"] |= {"waited_us": waited, "last_rank": last["pid"]}
