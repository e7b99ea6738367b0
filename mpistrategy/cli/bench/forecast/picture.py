"""The forecast as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrategy.cli.bench.forecast.tables import NODES, ROUTES, Table, efficiency
from mpistrategy.objects.shown import size_in_words


def draw(tables: Sequence[Table], compute_seconds: float, file: str) -> str:
    """Draw time and efficiency by nodes into a PNG file, one row of axes for each table.

    Returns:
        Why there is no plot; "" when there is one.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(10, 3.5 * len(tables)), layout="constrained")
    grid = figure.subplots(len(tables), 2, squeeze=False)
    for (times, shares), table in zip(grid, tables, strict=True):
        nodes = [row.nodes for row in table.rows]
        for number, route in enumerate(ROUTES):
            seconds = [row.seconds[route] for row in table.rows if route in row.seconds]
            if seconds:
                times.plot(nodes, [1e3 * each for each in seconds], "-", color=f"C{number}", label=route)
                part = [100 * efficiency(each, compute_seconds) for each in seconds]
                shares.plot(nodes, part, "-", color=f"C{number}", label=route)
        taken = [1e3 * row.seconds[row.taken] for row in table.rows]
        times.plot(nodes, taken, "ko", markersize=4, fillstyle="none", label="taken")
        taken = [100 * efficiency(row.seconds[row.taken], compute_seconds) for row in table.rows]
        shares.plot(nodes, taken, "ko", markersize=4, fillstyle="none", label="taken")
        for axes in (times, shares):
            axes.set_xscale("log", base=2)
            axes.set_xticks(NODES, [str(each) for each in NODES], rotation=45)
            axes.set_xlabel(f"nodes of {table.ranks_per_node} ranks")
            axes.grid(alpha=0.3)
        times.set_yscale("log")
        times.set(ylabel="forecast of one call in ms", title=size_in_words(table.nbytes))
        shares.set(ylabel="part of a step that computes in %", ylim=(0, 101))
        times.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    return ""
