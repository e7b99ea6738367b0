"""A picture of a timeline: a row for each rank; one colour for the same collective of all ranks; waiting is grey."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from mpistrategy import own_files
from mpistrategy.telemetry.tracing.chrome import title
from mpistrategy.telemetry.tracing.clocks import meetings_of
from mpistrategy.telemetry.tracing.recordings import Interval
from mpistrategy.telemetry.tracing.timeline import Timeline

#: So many collectives of a rank can be told apart in one picture, and so many ranks.
_MOST_CALLS, _MOST_RANKS = 16, 32
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#5e4fa2")
_WAITING, _STEP, _SPAN, _OPEN, _INK = "#c8c8c8", "#e4ecf5", "#f6dfae", "#b2182b", "#333333"
_OTHERS = "#7f7f7f"
#: Of a row's height, from its top: the part of a step, of spans, of calls.
_STEP_PART, _SPAN_PART, _CALL_PART = (-0.42, 0.84), (-0.38, 0.22), (-0.12, 0.46)
_INCHES, _POINTS, _LETTER = 12.0, 72.0, 0.72


def draw(timeline: Timeline, file: str, part: tuple[float, float] | None = None) -> str:
    """Draw a picture: PNG, unless the file's ending is that of another format that matplotlib writes.

    Who may read it: as of checkpoints (`mpistrategy.own_files.file_mode`).

    Args:
        timeline: the run.
        file: what to write.
        part: from which second to which; None for some steps in the middle.

    Returns:
        Why there is no plot; "" when there is one.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    if not timeline.intervals:
        return "no plot: nothing was recorded"
    ranks = timeline.ranks[:_MOST_RANKS]
    start, end = window(timeline, ranks[0])
    if part is not None:
        start, end = part[0] * 1e9, min(part[1], timeline.seconds) * 1e9
    if not start < end:
        return f"no plot: the trace ends after {timeline.seconds:.3f} s"
    figure = Figure(figsize=(_INCHES, 1.5 + 0.78 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(start / 1e6, end / 1e6)
    shown = [each for each in timeline.intervals if each.end > start and each.start < end and each.rank in ranks]
    handles = _Rows(axes, ranks, (end - start) / 1e6).draw(shown)
    _meetings(axes, timeline, ranks, start, end)
    hosts = {each.rank: each.header["host"] for each in timeline.recordings}
    several = len({hosts.get(rank) for rank in ranks}) > 1
    names = [f"rank {rank}" + (f"\n{hosts.get(rank, '')}" if several else "") for rank in ranks]
    axes.set_yticks(range(len(ranks)), names)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlabel("ms since the beginning")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(_title(timeline, ranks), loc="left", fontsize=10, color=_INK, pad=16)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8, frameon=False)
    ending = os.path.splitext(file)[1][1:].lower()
    try:
        with own_files.whole_file(file) as whole:
            figure.savefig(
                whole, dpi=150, format=ending if ending in figure.canvas.get_supported_filetypes() else "png"
            )
    except OSError as error:
        return f"no plot: {file}: {error.strerror or error}"
    return ""


def _title(timeline: Timeline, ranks: Sequence[int]) -> str:
    header = timeline.recordings[0].header
    of = f"{len(ranks)} of {len(timeline.ranks)} ranks" if len(ranks) < len(timeline.ranks) else f"{len(ranks)} ranks"
    return f"{header['program']}, {of}, {header['begun'][:16].replace('T', ' ')}"


def window(timeline: Timeline, rank: int) -> tuple[float, float]:
    """Return from when to when a picture shows what a rank does, in nanoseconds: whole steps, where there are any."""
    mine = [each for each in timeline.intervals if each.rank == rank]
    calls = [each for each in mine if each.kind == "call"]
    steps = [each for each in mine if each.kind == "step"]
    first, last = 0.0, timeline.seconds * 1e9
    inside = [each for each in calls if steps and steps[0].start <= each.start < steps[-1].end]
    if inside:
        count = max(1, min(len(steps), round(_MOST_CALLS * len(steps) / len(inside))))
        begin = (len(steps) - count) // 2
        first, last = steps[begin].start, steps[begin + count - 1].end
    elif len(calls) > _MOST_CALLS:
        begin = (len(calls) - _MOST_CALLS) // 2
        first, last = calls[begin].start, calls[begin + _MOST_CALLS - 1].end
    margin = 0.015 * (last - first) or 1.0
    return first - margin, last + margin


class _Rows:
    """Draws intervals.

    Args:
        axes: where.
        ranks: the rows.
        width: of the picture, in milliseconds.
    """

    def __init__(self, axes: Any, ranks: Sequence[int], width: float) -> None:
        self._axes = axes
        self._row = {rank: row for row, rank in enumerate(ranks)}
        self._points = 0.88 * _INCHES * _POINTS / width
        self._colors: dict[str, str] = {}
        self._titled = -math.inf

    def draw(self, intervals: Sequence[Interval]) -> list[Any]:
        """Draw them; return what the legend shows."""
        from matplotlib.patches import Patch

        for kind in ("step", "span", "call"):
            for each in intervals:
                if each.kind == kind:
                    getattr(self, f"_{kind}")(each)
        handles = [Patch(color=color, label=name) for name, color in self._colors.items()]
        kinds = {each.kind for each in intervals}
        others = [
            (any(each.waited > 0 for each in intervals), _WAITING, "waiting for the last rank"),
            ("span" in kinds, _SPAN, "spans of the program"),
            ("step" in kinds, _STEP, "steps"),
            (any(each.is_open for each in intervals), _OPEN, "never left"),
        ]
        return handles + [Patch(color=color, label=text) for is_there, color, text in others if is_there]

    def _step(self, each: Interval) -> None:
        self._bar(each.start, each.end, each.rank, _STEP_PART, _STEP)
        left, right = self._axes.get_xlim()
        text, start = title(each), each.start / 1e6
        width = (len(text) + 1) * 7 * _LETTER / self._points
        if self._row[each.rank] == 0 and max(left, self._titled) <= start < right - width:
            self._titled = start + width
            self._write(start, -0.46, text, ha="left", va="bottom")

    def _span(self, each: Interval) -> None:
        self._bar(each.start, each.end, each.rank, _SPAN_PART, _SPAN)
        self._text(each.start, each.end, each, _SPAN_PART, _INK, [title(each)])

    def _call(self, each: Interval) -> None:
        text = title(each)
        color = _OPEN if each.is_open else self._color(text)
        together = each.start + each.waited
        if each.waited:
            self._bar(each.start, together, each.rank, _CALL_PART, _WAITING)
        self._bar(together, each.end, each.rank, _CALL_PART, color)
        self._text(together, each.end, each, _CALL_PART, "white", [text, text.partition(" ")[0]])

    def _color(self, text: str) -> str:
        if text not in self._colors:
            number = len(self._colors)
            self._colors[text] = _COLORS[number] if number < len(_COLORS) else _OTHERS
        return self._colors[text]

    def _bar(self, start: float, end: float, rank: int, part: tuple[float, float], color: str) -> None:
        low, height = part
        self._axes.broken_barh(
            [(start / 1e6, (end - start) / 1e6)],
            (self._row[rank] + low, height),
            facecolors=color,
            edgecolors="white",
            linewidth=0.4,
        )

    def _text(
        self, start: float, end: float, each: Interval, part: tuple[float, float], color: str, texts: Sequence[str]
    ) -> None:
        left, right = self._axes.get_xlim()
        start, end = max(start / 1e6, left), min(end / 1e6, right)
        room = (end - start) * self._points
        for text in texts:
            if len(text) * 7 * _LETTER < room:
                y = self._row[each.rank] + part[0] + part[1] / 2
                self._write((start + end) / 2, y, text, color=color, ha="center", va="center_baseline")
                return

    def _write(self, x: float, y: float, text: str, **how: Any) -> None:
        self._axes.text(x, y, text, **{"fontsize": 7, "color": _INK, **how}).set_in_layout(False)


def _meetings(axes: Any, timeline: Timeline, ranks: Sequence[int], start: float, end: float) -> None:
    """Join the same collective of all ranks: a line where the last rank has come."""
    row = {rank: number for number, rank in enumerate(ranks)}
    low, height = _CALL_PART
    for meeting in meetings_of(timeline.recordings).values():
        inside = [each for each in meeting if each.rank in row and each.last_rank >= 0]
        if len(inside) > 1:
            came = max(each.start for each in inside)
            if start < came < end:
                rows = [row[each.rank] for each in inside]
                axes.plot(
                    [came / 1e6] * 2, [min(rows) + low, max(rows) + low + height], color=_INK, linewidth=0.6, zorder=3
                )
