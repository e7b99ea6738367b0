"""`mpistrategy bench`: its options, and the run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.bench import report as reports
from mpistrategy.bench.environment import describe
from mpistrategy.bench.plot import draw
from mpistrategy.bench.shapes import LISTS
from mpistrategy.bench.timing import FULL, QUICK, Case, measure
from mpistrategy.mirrored_strategy import MirroredStrategy
from mpistrategy.mpi.path_files import VARIABLE, Machine, save
from mpistrategy.replica_context import ReplicaContext

if TYPE_CHECKING:
    from mpistrategy.bench.raw import RawRanks
    from mpistrategy.bench.sums import Bench
    from mpistrategy.strategy import Strategy

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
    parser.add_argument(
        "--save", action="store_true", help="measure the thresholds of this machine instead, and save them"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw time by size")


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks of the job; return the exit status."""
    strategy = MirroredStrategy()  # starts MPI
    if strategy.num_replicas_in_sync == 1:
        print(
            "mpistrategy bench: found one rank; expected several to measure between. "
            "Start it with your launcher: mpiexec -n 2 mpistrategy bench",
            file=sys.stderr,
        )
        return 2
    from mpistrategy.bench.raw import RawRanks

    ranks = RawRanks()
    report: dict[str, Any] = {"environment": describe(ranks.job()), "method": reports.METHOD, "cases": []}
    status = 0
    if options.save:
        status = _save(ranks, strategy, report)
    else:
        _run_suites(options, ranks, strategy, report)
    if ranks.rank == 0:
        reports.write(options.markdown, reports.markdown(report))
        if options.json:
            reports.write(options.json, reports.as_json(report))
        if options.plot:
            _tell(draw(report, options.plot) or f"drew {options.plot}")
    ranks.close()
    strategy.close()
    right = all(row["right"] for case in report["cases"] for row in case["variants"])
    if not right and ranks.rank == 0:
        _tell("WRONG RESULTS: see the tables")
    return status if right else 1


def _run_suites(options: argparse.Namespace, ranks: RawRanks, strategy: Strategy, report: dict[str, Any]) -> None:
    from mpistrategy.bench import steps, sums
    from mpistrategy.bench.peers import open_peers

    suites: dict[str, Callable[[Bench], Iterator[Case]]] = {
        "all_reduce": sums.one_array,
        "small": sums.small_values,
        "lists": sums.gradient_lists,
        "steps": steps.training_steps,
    }
    peers, missing = open_peers(options.peers, ranks)
    bench = sums.Bench(
        ranks,
        strategy,
        ReplicaContext(strategy, strategy.replica_id_in_sync_group),
        peers,
        missing,
        options.sizes or (sums.QUICK_SIZES if options.quick else sums.SIZES),
        options.lists or (sums.QUICK_LISTS if options.quick else tuple(LISTS)),
    )
    effort = QUICK if options.quick else FULL
    if options.seconds:
        effort = replace(effort, seconds=options.seconds)
    for suite in options.only:
        for case in suites[suite](bench):
            if ranks.rank == 0:
                _tell(f"{suite}: {case.name} ...")
            report["cases"].append(measure(case, ranks, effort))
            if suite == "steps":
                report["cases"][-1]["communication_us"] = steps.communication(report["cases"][-1])
            for variant in case.variants:
                if variant.close is not None:
                    variant.close()
            case.variants.clear()  # their memory is wanted for the next
    for peer in peers:
        peer.close()


def _save(ranks: RawRanks, strategy: Strategy, report: dict[str, Any]) -> int:
    from mpistrategy.bench.thresholds import Search

    communicator = strategy.extended.communicator
    environment = report["environment"]
    machine = Machine(environment["mpi"], environment["ranks_on_node"], environment["nodes"])
    search = Search(ranks, machine.ranks_on_node > 1, _tell if ranks.rank == 0 else lambda line: None)
    paths = replace(search.run(), source=f"measured {environment['date']} on {environment['cpu']}")
    report["cases"] = search.cases
    report["paths"] = asdict(paths)
    named = os.environ.get(VARIABLE)
    trouble = ""
    try:
        # The first rank of each node: their homes may be different ones.
        if communicator.node_of.index(communicator.node_of[ranks.rank]) == ranks.rank:
            file = save(paths, machine, Path(named).expanduser() if named else None)
            if ranks.rank == 0:
                _tell(f"saved {file}; every new strategy of {machine} uses it")
    except OSError as error:
        trouble = f"rank {ranks.rank} cannot save the thresholds: {error}. Name another file: {VARIABLE}=FILE."
        _tell(trouble)
    return int(ranks.greatest(np.array([float(bool(trouble))]))[0])


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
