"""A picture of time by size."""

from __future__ import annotations

from typing import Any


def draw(report: dict[str, Any], file: str) -> str:
    """Draw the cases of one array into a PNG file.

    Returns:
        Why there is no picture; "" when there is one.
    """
    cases = [case for case in report["cases"] if case["suite"] == "all_reduce"]
    if not cases:
        return "there is no picture: it shows the suite all_reduce, which was not run"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "there is no picture: matplotlib is not installed (pip install 'mpistrategy[bench]')"
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row["name"] for case in cases for row in case["variants"]))
    for number, name in enumerate(names):
        points = [(case["bytes"], row) for case in cases for row in case["variants"] if row["name"] == name]
        sizes = [size for size, _ in points]
        line = {"mpi4py": "--", "mpistr": "-"}.get(name[:6], ":")
        color = f"C{number}"
        axes.plot(sizes, [row["median_us"] for _, row in points], line, marker=".", color=color, label=name)
        low, high = ([row[f"quartile_{n}_us"] for _, row in points] for n in (1, 3))
        axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([case["bytes"] for case in cases], [case["case"] for case in cases], rotation=45, ha="right")
    axes.set(xlabel="what each rank brings", ylabel="time of one call in us (median, quartiles)")
    axes.set_title("all_reduce, {ranks} ranks, {mpi}, {cpu}, {date}".format_map(report["environment"]), fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    return ""
