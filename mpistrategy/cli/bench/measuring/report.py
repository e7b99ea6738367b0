"""The figures as JSON, as Markdown tables, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpistrategy.cli.bench.measuring.environment import in_words
from mpistrategy.objects.text import encoded

METHOD = (
    "Median of all rounds; the variants of a case take turns within each round. Ratio: median over the median of the "
    "case's first row; in brackets the quartiles of the ratios round by round. Every rank rewrites its operand before "
    "each call and reads its result after it (not counted). A call's time is that of its slowest rank. Calls during "
    "which a rank had to share its core with another program are left out, unless nearly all are (marked ~). Where raw "
    "MPI's median is ten times its own least time or more, the case is marked as disturbed: measure it again."
)
#: From how many times its own least time on raw MPI was disturbed.
DISTURBED = 10.0


def time_in_words(microseconds: float) -> str:
    """Return a time with three digits."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds:.3g} us"


class Growing:
    """A report that is written while the figures come: what is in it stays when the job is killed.

    Args:
        path: a file; ``-`` for the screen; None for nowhere.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        if path not in (None, "-"):
            write(path, "")

    def add(self, lines: Iterable[str]) -> None:
        """Write lines, at once."""
        text = "".join(f"{line}\n" for line in lines)
        if self._path == "-":
            print(text, end="", flush=True)
        elif self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(text)


def markdown(report: dict[str, Any]) -> str:
    """Return the whole report: one table for each suite."""
    cases = report["cases"]
    lines = head(report["environment"])
    for suite in dict.fromkeys(case["suite"] for case in cases):
        lines += suite_head(suite)
        own = [case for case in cases if case["suite"] == suite]
        lines += [row for case in own for row in rows(case)]
        lines += suite_tail(own)
    return "".join(f"{line}\n" for line in lines + tail(cases))


def head(environment: dict[str, Any]) -> list[str]:
    """Return what the figures were measured on, and how."""
    return [in_words(environment), "", METHOD]


def suite_head(suite: str) -> list[str]:
    """Return the beginning of a table."""
    return ["", f"**{suite}**", "", "| case | variant | time | ratio (quartiles) |", "|---|---|---|---|"]


def rows(case: dict[str, Any]) -> list[str]:
    """Return the rows of one case."""
    return [_row(case, number) for number in range(len(case["variants"]))]


def tail(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Return the end of a report: what was not measured, and a word on disturbed cases."""
    lines = []
    missing = {name: why for case in cases for name, why in case["missing"].items()}
    if missing:
        lines += ["", "Not measured: " + "; ".join(f"{name} ({why})" for name, why in sorted(missing.items())) + "."]
    disturbed = sum(map(is_disturbed, cases))
    if disturbed:
        lines += ["", f"{disturbed} of {len(cases)} cases were disturbed: measure them again on cores that are free."]
    return lines


def is_disturbed(case: dict[str, Any]) -> bool:
    """Return whether raw MPI, the reference of a case, usually took ten times its own least time, or more."""
    return _is_raw(case) and bool(case["variants"][0]["median_us"] >= DISTURBED * case["least_us"])


def _is_raw(case: dict[str, Any]) -> bool:
    return bool(case["reference"].startswith("mpi4py"))


def suite_tail(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Return what follows from the figures of a suite, in words."""
    lines = []
    for case in cases:
        if "communication_us" in case:
            costs = ", ".join(f"{name} {_signed(cost)}" for name, cost in case["communication_us"].items())
            lines.append(f"Communication of {case['case']} (step less the same library's without it): {costs}.")
        if "line_us" in case:
            lines.append(f"{case['case']}: the bytes alone keep the line busy for {time_in_words(case['line_us'])}.")
        if "hidden" in case:
            lines.append(f"{case['case']}: {100 * case['hidden']:.0f} % of the communication is hidden.")
    return ["", *lines] if lines else []


def _signed(microseconds: float) -> str:
    return ("-" if microseconds < 0 else "") + time_in_words(abs(microseconds))


def _row(case: dict[str, Any], number: int) -> str:
    row = case["variants"][number]
    doubt = "~" if row["ratio_disturbed"] else ""
    ratio = (
        f"{doubt}{row['ratio']:.2f} ({row['ratio_quartile_1']:.2f}-{row['ratio_quartile_3']:.2f})" if number else "1"
    )
    wrong = "" if row["right"] else " **WRONG RESULT**"
    busy = "" if row["disturbed_left_out"] else "~"
    time = time_in_words(row["median_us"])
    if is_disturbed(case):
        time += " disturbed" if number else f" disturbed: at best {time_in_words(case['least_us'])}"
    return f"| {'' if number else case['case']} | {row['name']} | {busy}{time} | {ratio}{wrong} |"


def write(path: str, text: str) -> None:
    """Write a report to a file, or to the screen for ``-``."""
    if path == "-":
        print(text, end="")
    else:
        Path(path).write_bytes(encoded(text))


def as_json(report: dict[str, Any]) -> str:
    """Return the whole report."""
    return json.dumps(report, indent=1) + "\n"


def draw(report: dict[str, Any], file: str) -> str:
    """Draw the cases of one array into a PNG file.

    Returns:
        Why there is no plot; "" when there is one.
    """
    cases = [case for case in report["cases"] if case["suite"] == "all_reduce"]
    if not cases:
        return "no plot: it shows the suite all_reduce, which was not run"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
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
    axes.set(xlabel="size of each rank's array", ylabel="time of one call in us (median, quartiles)")
    axes.set_title("all_reduce, {ranks} ranks, {mpi}, {cpu}, {date}".format_map(report["environment"]), fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    return ""
