"""A picture of a timeline: a row for each rank; one colour for the same collective of all ranks; waiting is grey."""

from __future__ import annotations

import os

from mpistrategy import own_files
from mpistrategy.telemetry.tracing.timeline import Timeline

#: So many collectives of a rank, and so many ranks, can be told apart in one picture.
_MOST_CALLS, _MOST_RANKS = 16, 32
_COLORS = {"step": "#e4ecf5", "span": "#f6dfae", "waiting": "#c8c8c8"}
#: Of a row of height 1, from its middle: where steps, spans and collectives begin, and how high they are.
_PARTS = {"step": (-0.42, 0.84), "span": (-0.38, 0.22), "collective": (-0.12, 0.46)}


def draw(timeline: Timeline, file: str, part: tuple[float, float] | None = None) -> str:
    """Draw a picture: PNG, unless the file's ending is that of another format that matplotlib writes.

    Who may read it: as of checkpoints (`mpistrategy.own_files.new_file`).

    Args:
        timeline: the run.
        file: what to write.
        part: from which second to which; None for some collectives in the middle.

    Returns:
        Why there is no picture; "" when there is one.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    start, end = part or _middle(timeline)
    shown = [e for e in timeline.events if e["ts"] < end * 1e6 and e["ts"] + e["dur"] > start * 1e6]
    if not shown:
        return f"no picture: nothing was recorded from {start:.3f} s on; the trace has {timeline.seconds:.3f} s"
    ranks, colors = timeline.ranks[:_MOST_RANKS], dict(_COLORS)
    figure = Figure(figsize=(12, 1.5 + 0.78 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for category, (low, height) in _PARTS.items():
        for each in shown:
            if each["cat"] == category and each["pid"] in ranks:
                came = each["ts"] + each["args"].get("waited_us", 0)
                label = each["name"] if category == "collective" else category
                for name, begin, stop in (("waiting", each["ts"], came), (label, came, each["ts"] + each["dur"])):
                    color = colors.setdefault(name, f"C{len(colors) % 10}")
                    rows = ranks.index(each["pid"]) + low, height
                    axes.broken_barh([(begin / 1e3, (stop - begin) / 1e3)], rows, facecolors=color, edgecolors="white")
    axes.set(xlim=(start * 1e3, min(end, timeline.seconds) * 1e3), xlabel="ms since the beginning")
    axes.set(ylim=(len(ranks) - 0.5, -0.5), yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in ranks])
    for name, color in colors.items():
        axes.bar(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    axes.set_title("{program}, {size} ranks, {begun}".format_map(timeline.recordings[0].header), loc="left")
    ending = os.path.splitext(file)[1][1:].lower()
    try:
        with own_files.whole_file(file) as whole:
            figure.savefig(whole, format=ending if ending in figure.canvas.get_supported_filetypes() else "png")
    except OSError as error:
        return f"no picture: {file}: {error.strerror or error}"
    return ""


def _middle(timeline: Timeline) -> tuple[float, float]:
    """Return from which second to which the first rank makes some collectives in the middle of the run."""
    calls = [e for e in timeline.events if e["cat"] == "collective" and e["pid"] == timeline.ranks[0]]
    shown = calls[max(0, len(calls) - _MOST_CALLS) // 2 :][:_MOST_CALLS] or timeline.events
    return (shown[0]["ts"] - 1) / 1e6 if shown else 0.0, max((e["ts"] + e["dur"] for e in shown), default=0.0) / 1e6
