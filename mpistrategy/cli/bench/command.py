"""`mpistrategy bench`: its options, and the run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.cli.bench.cases.shapes import LISTS, NETWORKS
from mpistrategy.cli.bench.measuring import report as reports
from mpistrategy.cli.bench.measuring.environment import describe, in_words
from mpistrategy.cli.bench.measuring.timing import FULL, PATIENCE, QUICK, measure
from mpistrategy.cli.bench.peers import open_peers
from mpistrategy.errors import DeviceError, UnsupportedError
from mpistrategy.mpi.job.launcher import claim_in
from mpistrategy.mpi.tuning.files import (
    VARIABLE,
    Machine,
    check_can_save,
    expanded,
    save,
    trying,
)
from mpistrategy.mpi.tuning.thresholds import DEFAULT, default_for
from mpistrategy.strategy.mirrored import MirroredStrategy
from mpistrategy.strategy.replica_context import ReplicaContext

if TYPE_CHECKING:
    from mpistrategy.cli.bench.cases.case import Case
    from mpistrategy.cli.bench.cases.sums import Bench
    from mpistrategy.cli.bench.measuring.raw import RawRanks
    from mpistrategy.strategy.strategy import Strategy

SUITES = ("all_reduce", "small", "lists", "steps", "nodes")
UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy bench`."""
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; it says how long it will take")
    parser.add_argument(
        "--only", type=_names(SUITES), default=list(SUITES[:-1]), metavar="SUITE,...", help=f"of {', '.join(SUITES)}"
    )
    parser.add_argument("--sizes", type=_sizes, metavar="SIZE,...", help="for all_reduce, e.g. 4,64KiB,1MiB")
    parser.add_argument("--lists", type=_names(tuple(LISTS)), metavar="LIST,...", help=f"of {', '.join(LISTS)}")
    parser.add_argument(
        "--networks",
        type=_names(NETWORKS),
        default=list(NETWORKS),
        metavar="NETWORK,...",
        help=f"of {', '.join(NETWORKS)}",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        type=_python_file,
        default=[],
        metavar="FILE.py",
        help="files that add other libraries, such as scripts/peers/torch_gloo.py of the source tree",
    )
    parser.add_argument(
        "--devices",
        choices=("cpu", "gpu", "shared"),
        default="cpu",
        help="gpu: arrays in GPU memory, each rank with a GPU of its own; shared: ranks may share one",
    )
    parser.add_argument("--seconds", type=_positive, help="for each case")
    parser.add_argument(
        "--line-rate", type=_positive, metavar="GBIT", help="of the link between nodes, for the suite nodes"
    )
    parser.add_argument("--json", type=_file, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--markdown", type=_file, metavar="FILE", default="-", help="write the tables there; default: the screen"
    )
    parser.add_argument(
        "--save", action="store_true", help="measure the thresholds of this machine instead, and save them"
    )
    parser.add_argument("--plot", type=_file, metavar="FILE.png", help="draw time by size")


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks of the job; return the exit status."""
    if options.devices != "cpu":
        return _on_gpus(options)
    # Saved thresholds must not influence their own measurement.
    with trying(DEFAULT) if options.save else nullcontext():
        strategy = MirroredStrategy()  # starts MPI
    if strategy.num_replicas_in_sync == 1:
        print(
            "mpistrategy bench: found one rank; expected several to measure between. "
            "Start it with your launcher: mpiexec -n 2 mpistrategy bench",
            file=sys.stderr,
        )
        return 2
    from mpistrategy.cli.bench.measuring.raw import RawRanks

    ranks = RawRanks()
    report: dict[str, Any] = {"environment": describe(ranks.job()), "method": reports.METHOD, "cases": []}
    status = 0
    if options.save:
        status = _save(options, ranks, report)
        if ranks.rank == 0:
            reports.write(options.markdown, reports.markdown(report))
    else:
        growing = reports.Growing(options.markdown if ranks.rank == 0 else None)
        growing.add(reports.head(report["environment"]))
        _run_suites(options, ranks, strategy, report, growing)
    if ranks.rank == 0:
        if options.json:
            reports.write(options.json, reports.as_json(report))
        if options.plot:
            _tell(reports.draw(report, options.plot) or f"drew {options.plot}")
    ranks.close()
    strategy.close()
    right = all(row["right"] for case in report["cases"] for row in case["variants"])
    if not right and ranks.rank == 0:
        _tell("WRONG RESULTS: see the tables")
    return status if right else 1


def _on_gpus(options: argparse.Namespace) -> int:
    """Measure with arrays in GPU memory, on one rank or more; return the exit status."""
    others = [name for name in ("save", "plot", "peers") if getattr(options, name)]
    if others:
        _tell(f"mpistrategy bench: found --devices {options.devices} with --{others[0]}; expected one of the two")
        return 2
    try:
        strategy = MirroredStrategy(options.devices)  # starts MPI
    except (DeviceError, UnsupportedError) as error:  # on all ranks
        claim = claim_in(os.environ)
        if claim is None or claim.rank == 0:
            _tell(f"mpistrategy bench --devices {options.devices}: {error}")
        return 2
    from mpistrategy.cli.bench import gpus
    from mpistrategy.cli.bench.measuring.raw import RawRanks

    ranks = RawRanks()
    environment = describe(ranks.job())
    growing = reports.Growing(options.markdown if ranks.rank == 0 else None)
    growing.add([in_words(environment)])
    found = gpus.measure(strategy, ranks, options, _tell if ranks.rank == 0 else lambda line: None, growing)
    if ranks.rank == 0 and options.json:
        reports.write(options.json, reports.as_json({"environment": environment, **found}))
    ranks.close()
    strategy.close()
    return 0 if all(row["right"] for row in found["rows"]) else 1


def _run_suites(
    options: argparse.Namespace, ranks: RawRanks, strategy: Strategy, report: dict[str, Any], growing: reports.Growing
) -> None:
    from mpistrategy.cli.bench.cases import nodes, steps, sums

    suites: dict[str, Callable[[Bench], Iterator[Case]]] = {
        "all_reduce": sums.one_array,
        "small": sums.small_values,
        "lists": sums.gradient_lists,
        "steps": steps.training_steps,
        "nodes": nodes.between_nodes,
    }
    peers, missing = open_peers(options.peers, ranks, report["environment"]["nodes"])
    bench = sums.Bench(
        ranks,
        strategy,
        report["environment"]["nodes"],
        ReplicaContext(strategy, strategy.replica_id_in_sync_group),
        peers,
        missing,
        options.sizes or (sums.QUICK_SIZES if options.quick else sums.SIZES),
        options.lists or (sums.QUICK_LISTS if options.quick else tuple(LISTS)),
        options.networks,
    )
    effort = QUICK if options.quick else FULL
    if options.seconds:
        effort = replace(effort, seconds=options.seconds)
    counts = {
        "all_reduce": len(bench.sizes),
        "small": 2,
        "lists": len(bench.lists),
        "steps": len(bench.networks),
        "nodes": (len(nodes.SIZES) + 1) * (bench.nodes > 1),
    }
    number = sum(counts[suite] for suite in options.only)
    tell = _tell if ranks.rank == 0 else lambda line: None
    tell(
        f"{number} cases, each measured for up to about {effort.seconds:g} s "
        f"({PATIENCE * effort.seconds:g} s where other programs take the cores), and prepared and checked before that"
    )
    started = time.monotonic()
    for suite in options.only:
        for case in suites[suite](bench):
            done, passed = len(report["cases"]), time.monotonic() - started
            left = f"about {max(number - done, 0) * passed / done:.0f} s to go" if done else "the first one"
            tell(f"{suite}: {case.name} ... (case {done + 1} of {number}, {left})")
            report["cases"].append(measure(case, ranks, effort))
            figures = report["cases"][-1]
            if suite == "steps":
                figures["communication_us"] = steps.communication(figures)
            elif suite == "nodes" and nodes.BEHIND in [row["name"] for row in figures["variants"]]:
                figures["hidden"] = nodes.hidden(figures)
            elif suite == "nodes" and options.line_rate:
                figures["line_us"] = nodes.on_the_line(case.nbytes, bench.nodes, options.line_rate)
            for variant in case.variants:
                if variant.close is not None:
                    variant.close()
            case.variants.clear()  # frees their memory for the next case
            if report["cases"][-2:-1] == [] or report["cases"][-2]["suite"] != suite:
                growing.add(reports.suite_head(suite))
            growing.add(reports.rows(figures))
        growing.add(reports.suite_tail([case for case in report["cases"] if case["suite"] == suite]))
    growing.add(reports.tail(report["cases"]))
    tell(f"{len(report['cases'])} cases took {time.monotonic() - started:.0f} s")
    for peer in peers:
        peer.close()


def _save(options: argparse.Namespace, ranks: RawRanks, report: dict[str, Any]) -> int:
    from mpistrategy.cli.bench.cases.thresholds import EFFORT, Search
    from mpistrategy.cli.bench.cases.thresholds import QUICK as QUICK_SEARCH

    environment = report["environment"]
    machine = Machine(environment["mpi"], environment["ranks_on_node"], environment["nodes"])
    named = os.environ.get(VARIABLE)

    def place() -> Path:
        return expanded(named) if named else machine.file

    def failed(action: Callable[[], object]) -> bool:
        """Say on all ranks whether rank 0 could not do it."""
        trouble = False
        try:
            if ranks.rank == 0:
                action()
        except OSError as error:
            trouble = True
            _tell(f"rank 0 cannot save the thresholds: {error}. Name another file: {VARIABLE}=FILE.")
        return bool(ranks.greatest(np.array([float(trouble)]))[0])

    if failed(lambda: check_can_save(place())):
        return 1
    tell = _tell if ranks.rank == 0 else lambda line: None
    effort, trials = (QUICK_SEARCH, 1) if options.quick else (EFFORT, 3)
    default = default_for(machine.library)
    search = Search(ranks, machine.ranks_on_node > 1, machine.nodes, tell, default, effort, trials)
    paths = replace(search.run(), source=f"measured {environment['date']} on {environment['cpu']}")
    report["cases"] = search.cases
    report["paths"] = asdict(paths)
    if failed(lambda: save(paths, machine, place())):
        return 1
    tell(
        f"saved {place()}. Every new strategy of {machine.ranks_on_node} ranks on each of {machine.nodes} node(s) "
        f"under {machine.library} uses it."
    )
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _names(eligible: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in eligible]
        if unknown or not names:
            found = f"there is no {unknown[0]!r}" if unknown else "nothing is named"
            raise argparse.ArgumentTypeError(f"{found}; eligible: {', '.join(eligible)}")
        return names

    return parse


def _file(text: str) -> str:
    """Check that a file can be written, before anything is measured."""
    path = Path(text)
    target = path if path.exists() else path.parent
    if text != "-" and (path.is_dir() or not os.access(target, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def _python_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".py" or not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file of Python")
    return path


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        number = word.strip().lower().rstrip("bkmgi")
        unit = word.strip().lower()[len(number) :].strip()
        with suppress(ValueError):
            size = float(number) * UNITS.get(unit, 0)
            if 4 <= size < float("inf") and size % 4 == 0:
                sizes.append(int(size))
                continue
        raise argparse.ArgumentTypeError(f"{word!r} is not a size; write multiples of 4 bytes as 4, 64KiB or 1MiB")
    return sizes
