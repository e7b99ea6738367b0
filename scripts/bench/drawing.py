"""Draws the time of a sum by the size of the array: raw mpi4py beside mpistrategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LINES = {"mpi4py": "--", "mpistrategy": "-"}


def draw(environment: dict[str, Any], cases: Sequence[dict[str, Any]], file: str) -> None:
    """Draw the cases of one array; the ending of the file says the format (png, svg)."""
    from matplotlib.figure import Figure

    cases = [case for case in cases if case["suite"] == "all_reduce"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, line in LINES.items():
        times = [row["median_us"] for case in cases for row in case["variants"] if row["name"] == name]
        axes.plot([case["bytes"] for case in cases], times, line, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([case["bytes"] for case in cases], [case["case"] for case in cases], rotation=45, ha="right")
    axes.set(xlabel="size of each rank's array", ylabel="time of one call in us (median)")
    axes.set_title("all_reduce, {ranks} ranks, {mpi}, {cpu}, {date}".format_map(environment), fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
