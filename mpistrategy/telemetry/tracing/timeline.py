"""What all ranks did, on one clock: the recordings of a run put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpistrategy.telemetry.tracing.clocks import Clock, common_clock, is_meeting, meetings_of
from mpistrategy.telemetry.tracing.recordings import Interval, Recording, newest_run


@dataclass
class Timeline:
    """A run.

    Attributes:
        recordings: of its ranks, with times in nanoseconds since the beginning of the run.
        clocks: how the clocks were read, by their names.
        seconds: how long it was recorded.
        other_files: how many recordings of other runs are in the folder.
    """

    recordings: list[Recording]
    clocks: dict[str, Clock]
    seconds: float
    other_files: int = 0

    @property
    def intervals(self) -> list[Interval]:
        """Everything, by beginning; what lasts longer first."""
        everything = [each for recording in self.recordings for each in recording.intervals]
        return sorted(everything, key=lambda each: (each.start, -each.end))

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order; those of which there is nothing but a header, too."""
        return sorted({each.rank for each in self.recordings} | {each.rank for each in self.intervals})

    def between(self, start: float, end: float) -> Timeline:
        """Return the part from one second to another."""
        for recording in self.recordings:
            recording.intervals = [
                each for each in recording.intervals if each.end >= start * 1e9 and each.start <= end * 1e9
            ]
        return self


def timeline_of(folder: str) -> Timeline:
    """Return the newest run in a folder.

    Raises:
        TraceError: where there is none that can be read.
    """
    recordings, others = newest_run(folder)
    return put_together(recordings, others)


def put_together(recordings: Sequence[Recording], other_files: int = 0) -> Timeline:
    """Return the recordings of one run on one clock."""
    clocks = common_clock(recordings)
    for recording in recordings:
        clock = clocks[recording.clock]
        for each in recording.intervals:
            each.start, each.end = clock.common(each.start), clock.common(each.end)
    everything = [each for recording in recordings for each in recording.intervals]
    zero = min((each.start for each in everything), default=0.0)
    for each in everything:
        each.start -= zero
        each.end -= zero
    last = max((each.end for each in everything), default=0.0)
    _find_out_who_was_late(recordings)
    return Timeline(list(recordings), clocks, last / 1e9, other_files)


def _find_out_who_was_late(recordings: Sequence[Recording]) -> None:
    for meeting in meetings_of(recordings).values():
        if len(meeting) > 1 and is_meeting(meeting[0]):
            last = max(meeting, key=lambda each: each.start)
            for each in meeting:
                each.waited = max(0.0, min(last.start, each.end) - each.start)
                each.last_rank = last.rank
