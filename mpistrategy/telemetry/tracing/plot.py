"""A picture of some collectives: a row for each rank; one colour for the same call of all ranks; waiting is grey."""

from __future__ import annotations

from mpistrategy import own_files
from mpistrategy.telemetry.tracing.timeline import Timeline, refusal

#: The most collectives of a rank, and the most ranks, that a reader can distinguish in one picture.
_MOST_CALLS, _MOST_RANKS = 16, 32
_COLORS = {"step": "#e4ecf5", "span": "#f6dfae", "waiting": "#c8c8c8"}
#: Of a row of height 1, from its middle: where steps, spans and collectives begin, and how high they are.
_PARTS = {"step": (-0.42, 0.84), "span": (-0.38, 0.22), "collective": (-0.12, 0.46)}


def draw(timeline: Timeline, file: str) -> None:
    """Draw a PNG of the ranks' events while the first rank makes some collectives in the middle of the run.

    Who may read it: as of checkpoints (`mpistrategy.own_files.new_file`).

    Args:
        timeline: the run.
        file: what to write.

    Raises:
        OSError: when it cannot be written.
        TraceError: without matplotlib, and where nothing was recorded.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise refusal("no matplotlib", "one that draws pictures", "pip install matplotlib") from None
    ranks, colors = list(timeline.by_rank())[:_MOST_RANKS], dict(_COLORS)
    calls = [event for event in timeline.events if event["cat"] == "collective" and event["pid"] == ranks[0]]
    middle = calls[max(0, len(calls) - _MOST_CALLS) // 2 :][:_MOST_CALLS] or timeline.events
    if not middle:
        raise refusal("no events", "some to draw")
    start, end = middle[0]["ts"], max(event["ts"] + event["dur"] for event in middle)
    figure = Figure(figsize=(12, 1.5 + 0.78 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    visible_events = [event for event in timeline.events if event["ts"] < end and event["ts"] + event["dur"] > start]
    for event in sorted(visible_events, key=lambda event: [*_PARTS].index(event["cat"])):
        if event["pid"] in ranks:
            arrival, (low, height) = event["ts"] + event["args"].get("waited_us", 0), _PARTS[event["cat"]]
            label = event["name"] if event["cat"] == "collective" else event["cat"]
            for name, begin, stop in (("waiting", event["ts"], arrival), (label, arrival, event["ts"] + event["dur"])):
                color, row = colors.setdefault(name, f"C{len(colors) % 10}"), (ranks.index(event["pid"]) + low, height)
                axes.broken_barh([(begin / 1e3, (stop - begin) / 1e3)], row, facecolors=color, edgecolors="white")
    axes.set(xlim=(start / 1e3, end / 1e3), xlabel="ms since the beginning", ylim=(len(ranks) - 0.5, -0.5))
    axes.set(yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in ranks])
    for name, color in colors.items():
        axes.bar(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    with own_files.whole_file(file) as whole:
        figure.savefig(whole, format="png")
