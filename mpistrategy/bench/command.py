"""`mpistrategy bench`: its options, and the run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpistrategy.bench import report as reports
from mpistrategy.bench.environment import describe
from mpistrategy.bench.plot import draw
from mpistrategy.bench.shapes import LISTS
from mpistrategy.bench.timing import FULL, QUICK, Case, measure
from mpistrategy.mirrored_strategy import MirroredStrategy
from mpistrategy.replica_context import ReplicaContext

if TYPE_CHECKING:
    from mpistrategy.bench.sums import Bench

SUITES = ("all_reduce", "small", "lists", "steps")
PEERS = ("torch",)
UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say what `mpistrategy bench` takes."""
    parser.add_argument("--quick", action="store_true", help="less than a minute: fewer sizes and rounds")
    parser.add_argument(
        "--only", type=_names(SUITES), default=list(SUITES), metavar="SUITE,...", help=f"of {', '.join(SUITES)}"
    )
    parser.add_argument("--sizes", type=_sizes, metavar="SIZE,...", help="for all_reduce, e.g. 4,64KiB,1MiB")
    parser.add_argument("--lists", type=_names(tuple(LISTS)), metavar="LIST,...", help=f"of {', '.join(LISTS)}")
    parser.add_argument(
        "--peers",
        type=_names(PEERS),
        default=list(PEERS),
        metavar="PEER,...",
        help="other libraries to run as well, where installed",
    )
    parser.add_argument("--seconds", type=float, help="for each case")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", metavar="FILE", default="-", help="write the tables there; default: the screen")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time by size")


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks of the job; return the exit status."""
    strategy = MirroredStrategy()  # starts MPI
    if strategy.num_replicas_in_sync == 1:
        print(
            "mpistrategy bench: needs ranks to measure between. Start it as: mpiexec -n 2 mpistrategy bench",
            file=sys.stderr,
        )
        return 2
    from mpistrategy.bench import steps, sums
    from mpistrategy.bench.peers import open_peers
    from mpistrategy.bench.raw import RawRanks

    suites: dict[str, Callable[[Bench], Iterator[Case]]] = {
        "all_reduce": sums.one_array,
        "small": sums.small_values,
        "lists": sums.gradient_lists,
        "steps": steps.training_steps,
    }
    effort = QUICK if options.quick else FULL
    ranks = RawRanks()
    peers, missing = open_peers(options.peers, ranks)
    bench = sums.Bench(
        ranks,
        strategy,
        ReplicaContext(strategy, strategy.replica_id_in_sync_group),
        peers,
        missing,
        options.sizes or (sums.QUICK_SIZES if options.quick else sums.SIZES),
        options.lists or tuple(LISTS),
    )
    report: dict[str, Any] = {"environment": describe(ranks.job()), "method": reports.METHOD, "cases": []}
    for suite in options.only:
        for case in suites[suite](bench):
            if ranks.rank == 0:
                print(f"{suite}: {case.name} ...", file=sys.stderr, flush=True)
            report["cases"].append(measure(case, ranks, effort))
            if suite == "steps":
                report["cases"][-1]["communication"] = steps.communication(report["cases"][-1])
            for variant in case.variants:
                if variant.close is not None:
                    variant.close()
            case.variants.clear()  # their memory is wanted for the next
    if ranks.rank == 0:
        reports.write(options.markdown, reports.markdown(report))
        if options.json:
            reports.write(options.json, reports.as_json(report))
        if options.plot:
            print(draw(report, options.plot) or f"drew {options.plot}", file=sys.stderr)
    for peer in peers:
        peer.close()
    ranks.close()
    strategy.close()
    return 0 if all(row["right"] for case in report["cases"] for row in case["variants"]) else 1


def _names(eligible: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in eligible]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; eligible: {', '.join(eligible)}")
        return names

    return parse


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        number = word.strip().lower().rstrip("bkmgi")
        unit = word.strip().lower()[len(number) :].strip()
        with suppress(ValueError):
            size = float(number) * UNITS.get(unit, 0)
            if size >= 4 and size % 4 == 0:
                sizes.append(int(size))
                continue
        raise argparse.ArgumentTypeError(f"{word!r} is no size; write multiples of 4 bytes as 4, 64KiB or 1MiB")
    return sizes
