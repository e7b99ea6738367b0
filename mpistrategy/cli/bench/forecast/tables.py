"""The forecast in tables: time, efficiency and route, by nodes, from the formulas of `mpi.tuning.costs`.

Nothing is measured and MPI is not started.  The rates are those that `mpistrategy bench --save` measured, where it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpistrategy.cli.bench.forecast.units import LinkRates, Shape, speed_in_words
from mpistrategy.cli.bench.measuring.report import time_in_words
from mpistrategy.mpi.tuning import costs
from mpistrategy.mpi.tuning.costs import Route
from mpistrategy.mpi.tuning.thresholds import Rates, Thresholds
from mpistrategy.objects.shown import size_in_words

NODES = tuple(2**power for power in range(1, 11))
SIZES = (64 * 2**10, 2**20, 100 * 2**20)
COMPUTE_SECONDS = 0.1
ROUTES: tuple[Route, ...] = tuple(costs.SECONDS)
#: The message in front of every call between nodes, which compares the calls of the ranks.
FIRST_MESSAGE_BYTES = 256
#: The rates that the formulas use, and what they are called.
RATES = {
    "link_bytes_per_second": "link of a node",
    "latency_seconds": "latency of a message",
    "copy_bytes_per_second": "copy of a core",
    "add_bytes_per_second": "addition of a core",
    "memory_bytes_per_second": "all ranks of a node together",
    "cores": "cores of a node",
    "python_message_seconds": "message made in Python",
    "lanes_seconds": "waits of a call by lanes",
}


@dataclass(frozen=True)
class Row:
    """An all-reduce on so many nodes: the seconds of a call by each route, which may be taken, and which would be."""

    nodes: int
    seconds: dict[Route, float]
    allowed: tuple[Route, ...]
    taken: Route


@dataclass(frozen=True)
class Table:
    """The rows of one size on nodes of so many ranks."""

    ranks_per_node: int
    nbytes: int
    rows: list[Row]
    asked: set[int]


@dataclass(frozen=True)
class Assumed:
    """Thresholds, and why which of their rates were not measured.

    Attributes:
        thresholds: with the rates of the forecast.
        source: the file of those that were measured; "" where none were.
        reasons: of each rate that was not: "the default", or the option that says it.
    """

    thresholds: Thresholds
    source: str
    reasons: dict[str, str]


def assumed(thresholds: Thresholds, source: str, link: LinkRates) -> Assumed:
    """Return the thresholds of a file, or the defaults, with the link of the command line.

    On another link than the measured one, the measured corrections of the formulas do not hold.
    """
    # Files from before there were formulas have measured the link alone.
    whole = bool(thresholds.rates.measured_over_estimated)
    measured = {name for name in RATES if whole or getattr(thresholds.rates, name) != getattr(Rates(), name)}
    said = {"link_bytes_per_second": link.bytes_per_second, "latency_seconds": link.latency_seconds}
    changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    reasons = {name: "--link" if name in changes else "the default" for name in RATES}
    reasons = {name: why for name, why in reasons.items() if why == "--link" or name not in measured}
    rates = replace(thresholds.rates, **changes)
    if changes:
        rates = replace(rates, measured_over_estimated=())
    return Assumed(replace(thresholds, rates=rates), source, reasons)


def call_seconds(route: Route, shape: Shape, nbytes: int, thresholds: Thresholds) -> float:
    """Return how long an all-reduce of the user's takes, its first message included."""
    first = costs.flat_seconds(shape.nodes, shape.ranks_per_node, FIRST_MESSAGE_BYTES, thresholds)
    return first + costs.SECONDS[route](shape.nodes, shape.ranks_per_node, nbytes, thresholds)


def tables(shapes: Sequence[Shape], sizes: Sequence[int], thresholds: Thresholds) -> list[Table]:
    """Return a table for each number of ranks on a node and each size: 2 to 1,024 nodes, and those of the shapes."""
    found = []
    for ranks in dict.fromkeys(shape.ranks_per_node for shape in shapes):
        asked = {shape.nodes for shape in shapes if shape.ranks_per_node == ranks}
        for nbytes in sizes:
            rows = [_row(Shape(nodes, ranks), nbytes, thresholds) for nodes in sorted(asked.union(NODES))]
            found.append(Table(ranks, nbytes, rows, asked))
    return found


def _row(shape: Shape, nbytes: int, thresholds: Thresholds) -> Row:
    seconds = {
        route: call_seconds(route, shape, nbytes, thresholds)
        for route in ROUTES
        if route != "lanes" or shape.ranks_per_node > 1
    }
    arguments = shape.nodes, shape.ranks_per_node, nbytes, thresholds
    return Row(shape.nodes, seconds, costs.allowed_between_nodes(*arguments), costs.between_nodes(*arguments))


def in_words(assumption: Assumed, found: Sequence[Table], compute_seconds: float) -> str:
    """Return the forecast as text, with tables in Markdown."""
    lines = [
        "Forecast of an all-reduce between nodes, by the formulas of mpistrategy/mpi/tuning/costs.py, which names "
        "their sources. The percentage is the part of a step that computes, where the step computes for "
        f"{time_in_words(1e6 * compute_seconds)} and then reduces. In brackets: the route is not allowed at this size "
        "or on so many nodes. Lanes are taken where they are allowed and no other route is clearly cheaper.",
        "",
        *rates_in_words(assumption),
    ]
    for table in found:
        lines += ["", f"**{size_in_words(table.nbytes)}, {_ranks(table.ranks_per_node)} on each node**", ""]
        lines += [f"| nodes | ranks | {' | '.join(ROUTES)} | taken |", "|---" * (3 + len(ROUTES)) + "|"]
        for row in table.rows:
            nodes = f"**{row.nodes}**" if row.nodes in table.asked else str(row.nodes)
            cells = [_cell(row, route, compute_seconds) for route in ROUTES]
            lines.append(f"| {nodes} | {row.nodes * table.ranks_per_node} | {' | '.join(cells)} | {row.taken} |")
    return "\n".join(lines) + "\n"


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def efficiency(seconds: float, compute_seconds: float) -> float:
    """Return the part of a step that computes."""
    return compute_seconds / (compute_seconds + seconds)


def _cell(row: Row, route: Route, compute_seconds: float) -> str:
    if route not in row.seconds:
        return "-"
    seconds = row.seconds[route]
    text = f"{time_in_words(1e6 * seconds)}, {100 * efficiency(seconds, compute_seconds):.0f} %"
    return text if route in row.allowed else f"({text})"


def rates_in_words(assumption: Assumed) -> list[str]:
    """Return the measured rates, and the assumed ones, on lines of their own."""
    rates = assumption.thresholds.rates
    measured = [
        f"{what} {rate_in_words(rates, name)}" for name, what in RATES.items() if name not in assumption.reasons
    ]
    for cost, what in (("flat", "MPI's Allreduce"), ("pairwise", "the pairwise exchange")):
        sizes = sorted({size for name, size, _ in rates.measured_over_estimated if name == cost})
        if sizes:
            measured.append(f"{what} {' to '.join(dict.fromkeys(map(size_in_words, (sizes[0], sizes[-1]))))}")
    lines = [f"Measured ({assumption.source}): {', '.join(measured)}."] if measured else ["Measured: nothing."]
    for reason in dict.fromkeys(assumption.reasons.values()):
        names = [name for name, why in assumption.reasons.items() if why == reason]
        each = ", ".join(f"{RATES[name]} {rate_in_words(rates, name)}" for name in names)
        lines.append(f"Assumed ({reason}): {each}.")
    if not rates.measured_over_estimated:
        lines.append("Assumed: MPI's Allreduce takes as long as its best algorithm should.")
    return lines


def rate_in_words(rates: Rates, name: str) -> str:
    """Return a rate with its unit."""
    value = getattr(rates, name)
    if name.endswith("bytes_per_second"):
        return speed_in_words(value)
    return time_in_words(1e6 * value) if name.endswith("seconds") else f"{value:g}"
