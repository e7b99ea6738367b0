"""The figures of this repository: sums, training steps and several nodes, beside mpi4py and other libraries.

    mpiexec -n 2 python scripts/bench --only all_reduce,small --quick
    mpiexec -n 2 python scripts/bench --only steps --peers scripts/peers/torch_gloo.py --json steps.json

`mpistrategy bench` measures sums on a user's machine; this measures them alike, and what only its developers ask for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodes
import small
import steps
from drawing import draw
from libraries import Peer, open_peers
from mpistrategy.cli.arguments import positive
from mpistrategy.cli.bench import command, sums
from mpistrategy.cli.bench.case import Case
from mpistrategy.cli.bench.raw import RawRanks
from mpistrategy.cli.bench.report import Report, time_in_words
from mpistrategy.cli.bench.shapes import LISTS
from mpistrategy.cli.bench.timing import FULL_SECONDS, QUICK_SECONDS
from mpistrategy.strategy.strategy import Strategy

SUITES = ("all_reduce", "small", "lists", "steps", "nodes")


def main() -> int:
    """Measure on all ranks of the job; return the exit status."""
    options = _options()
    started = command.start("python scripts/bench")
    if started is None:
        return 2
    ranks, strategy = started
    peers, missing = open_peers(options.peers, ranks, ranks.nodes)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else FULL_SECONDS)
    counts = {
        "all_reduce": len(options.sizes),
        "small": 2,
        "lists": len(options.lists),
        "steps": len(options.networks),
        "nodes": (len(nodes.SIZES) + 1) * (ranks.nodes > 1),
    }
    report = Report(ranks, seconds, sum(counts[suite] for suite in options.only))
    for suite in options.only:
        follows: list[str] = []
        for case in _cases(suite, options, ranks, strategy, peers):
            figures = report.add(case)
            follows += _what_follows(figures, ranks, options)
        if follows:
            report.print(["", *follows])
    if "nodes" in options.only and ranks.nodes == 1:
        missing["nodes"] = "all ranks are on one node"
    if missing:
        words = "; ".join(f"{name} ({why})" for name, why in sorted(missing.items()))
        report.print(["", f"Not measured: {words}."])
    for peer in peers:
        peer.close()
    right = report.end(options.json)
    if options.plot and ranks.rank == 0:
        draw(report.environment, report.cases, options.plot)
    ranks.close()
    strategy.close()
    return 0 if right else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument(
        "--only", type=command.names_of(SUITES), default=SUITES, metavar="SUITE,...", help=f"of {', '.join(SUITES)}"
    )
    parser.add_argument("--sizes", type=command.sizes, metavar="SIZE,...", help="for all_reduce, e.g. 4,64KiB,1MiB")
    parser.add_argument("--lists", type=command.names_of(LISTS), metavar="LIST,...", help=f"of {', '.join(LISTS)}")
    parser.add_argument(
        "--networks",
        type=command.names_of(steps.NETWORKS),
        default=list(steps.NETWORKS),
        metavar="NETWORK,...",
        help=f"of {', '.join(steps.NETWORKS)}",
    )
    parser.add_argument(
        "--peers", nargs="+", type=Path, default=[], metavar="FILE.py", help="other libraries, as in scripts/peers"
    )
    parser.add_argument("--seconds", type=positive, help="for each case")
    parser.add_argument(
        "--line-rate", type=positive, metavar="GBIT", help="of the link between nodes, for the suite nodes"
    )
    parser.add_argument("--json", type=command.writable, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=command.writable, metavar="FILE.png", help="draw time by size; needs matplotlib")
    options = parser.parse_args()
    options.sizes = options.sizes or (sums.QUICK_SIZES if options.quick else sums.SIZES)
    options.lists = options.lists or (sums.QUICK_LISTS if options.quick else tuple(LISTS))
    return options


def _cases(
    suite: str, options: argparse.Namespace, ranks: RawRanks, strategy: Strategy, peers: list[Peer]
) -> Iterator[Case]:
    """Yield the cases of a suite, with the variants of the other libraries."""
    if suite == "all_reduce":
        for case in sums.one_array(ranks, strategy, options.sizes):
            [mine] = case.variants[0].operands
            case.variants += [variant for peer in peers for variant in peer.one_array(mine)]
            yield case
    elif suite == "small":
        yield from small.small_values(ranks, strategy)
    elif suite == "lists":
        for case in sums.gradient_lists(ranks, strategy, options.lists):
            arrays = case.variants[0].operands
            case.variants += [variant for peer in peers for variant in peer.gradients(arrays)]
            yield case
    elif suite == "steps":
        yield from steps.training_steps(steps.Bench(ranks, strategy, peers), options.networks)
    elif ranks.nodes > 1:
        yield from nodes.between_nodes(ranks, strategy)


def _what_follows(case: dict[str, Any], ranks: RawRanks, options: argparse.Namespace) -> Iterator[str]:
    """Add to the figures of a case what follows from them, and yield that in words."""
    if case["suite"] == "steps":
        case["communication_us"] = steps.communication(case)
        costs = ", ".join(f"{name} {_signed(cost)}" for name, cost in case["communication_us"].items())
        yield f"Communication of {case['case']} (step less the same library's without it): {costs}."
    elif case["suite"] == "nodes" and nodes.BEHIND in [row["name"] for row in case["variants"]]:
        case["hidden"] = nodes.hidden(case)
        yield f"{case['case']}: {100 * case['hidden']:.0f} % of the communication is hidden."
    elif case["suite"] == "nodes" and options.line_rate:
        case["line_us"] = nodes.on_the_line(case["bytes"], ranks.nodes, options.line_rate)
        yield f"{case['case']}: the bytes alone keep the line busy for {time_in_words(case['line_us'])}."


def _signed(microseconds: float) -> str:
    return ("-" if microseconds < 0 else "") + time_in_words(abs(microseconds))


if __name__ == "__main__":
    sys.exit(main())
