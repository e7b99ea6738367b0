"""`mpistrategy bench`: its options, and the run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpistrategy import own_files
from mpistrategy.cli.bench.report import Report, environment, environment_in_words, write_json
from mpistrategy.cli.bench.shapes import LISTS
from mpistrategy.cli.bench.timing import FULL, QUICK
from mpistrategy.errors import DeviceError, UnsupportedError
from mpistrategy.mpi.job.launcher import claim_in
from mpistrategy.mpi.tuning.files import VARIABLE, file_for, save, trying
from mpistrategy.mpi.tuning.thresholds import DEFAULT, default_for
from mpistrategy.strategy.mirrored import MirroredStrategy

if TYPE_CHECKING:
    from mpistrategy.cli.bench.raw import RawRanks
    from mpistrategy.strategy.strategy import Strategy

UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy bench`."""
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; it says how long it will take")
    parser.add_argument("--sizes", type=sizes, metavar="SIZE,...", help="of one array, e.g. 4,64KiB,1MiB")
    parser.add_argument("--lists", type=names_of(LISTS), metavar="LIST,...", help=f"of {', '.join(LISTS)}")
    parser.add_argument(
        "--devices",
        choices=("cpu", "gpu", "shared"),
        default="cpu",
        help="gpu: arrays in GPU memory, each rank with a GPU of its own; shared: ranks may share one",
    )
    parser.add_argument("--seconds", type=positive, help="for each case")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--save", action="store_true", help="measure the thresholds of this machine instead, and save them"
    )


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks of the job; return the exit status."""
    if options.devices != "cpu":
        return _on_gpus(options)
    # Saved thresholds must not influence their own measurement.
    with trying(DEFAULT) if options.save else nullcontext():
        started = start("mpistrategy bench")
    if started is None:
        return 2
    ranks, strategy = started
    status = _save(options, ranks) if options.save else _measure(options, ranks, strategy)
    ranks.close()
    strategy.close()
    return status


def start(program: str) -> tuple[RawRanks, Strategy] | None:
    """Start MPI; return the ranks and a strategy of theirs; None, after a word about it, where there is one rank."""
    strategy = MirroredStrategy()
    if strategy.num_replicas_in_sync == 1:
        _tell(
            f"{program}: found one rank; expected several to measure between. "
            f"Start it with your launcher: mpiexec -n 2 {program}"
        )
        return None
    from mpistrategy.cli.bench.raw import RawRanks

    return RawRanks(), strategy


def _measure(options: argparse.Namespace, ranks: RawRanks, strategy: Strategy) -> int:
    from mpistrategy.cli.bench import sums

    every = not (options.sizes or options.lists)
    sizes = options.sizes or ((sums.QUICK_SIZES if options.quick else sums.SIZES) if every else ())
    lists = options.lists or ((sums.QUICK_LISTS if options.quick else tuple(LISTS)) if every else ())
    effort = QUICK if options.quick else FULL
    if options.seconds:
        effort = replace(effort, seconds=options.seconds)
    report = Report(ranks, effort, len(sizes) + len(lists))
    for case in chain(sums.one_array(ranks, strategy, sizes), sums.gradient_lists(ranks, strategy, lists)):
        report.add(case)
    return 0 if report.end(options.json) else 1


def _on_gpus(options: argparse.Namespace) -> int:
    """Measure with arrays in GPU memory, on one rank or more; return the exit status."""
    if options.save:
        _tell(f"mpistrategy bench: found --devices {options.devices} with --save; expected one of the two")
        return 2
    try:
        strategy = MirroredStrategy(options.devices)  # starts MPI
    except (DeviceError, UnsupportedError) as error:  # on all ranks
        claim = claim_in(os.environ)
        if claim is None or claim.rank == 0:
            _tell(f"mpistrategy bench --devices {options.devices}: {error}")
        return 2
    from mpistrategy.cli.bench import gpus
    from mpistrategy.cli.bench.raw import RawRanks

    ranks = RawRanks()
    about = environment(ranks)
    if ranks.rank == 0:
        print(environment_in_words(about))
    found = gpus.measure(strategy, ranks, options)
    if ranks.rank == 0 and options.json:
        write_json(options.json, {"environment": about, **found})
    ranks.close()
    strategy.close()
    return 0 if all(row["right"] for row in found["rows"]) else 1


def _save(options: argparse.Namespace, ranks: RawRanks) -> int:
    """Measure the thresholds and save them."""
    from mpistrategy.cli.bench import thresholds

    about = environment(ranks)

    def place() -> Path:
        return file_for(ranks.library, ranks.ranks_on_node, ranks.nodes)

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

    if failed(lambda: own_files.make_folders(str(place().parent))):
        return 1
    tell = _tell if ranks.rank == 0 else lambda line: None
    effort, trials = (thresholds.QUICK, 1) if options.quick else (thresholds.EFFORT, 3)
    default = default_for(ranks.library)
    search = thresholds.Search(ranks, ranks.ranks_on_node > 1, ranks.nodes, tell, default, effort, trials)
    found = replace(search.run(), source=f"measured {about['date']} on {about['cpu']}")
    if failed(lambda: save(found, place())):
        return 1
    tell(
        f"saved {place()}. Every new strategy of {ranks.ranks_on_node} ranks on each of {ranks.nodes} node(s) "
        f"under {ranks.library} uses it."
    )
    if options.json and ranks.rank == 0:
        write_json(options.json, {"environment": about, "cases": search.cases, "thresholds": asdict(found)})
    return 0 if all(row["right"] for case in search.cases for row in case["variants"]) else 1


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def names_of(eligible: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads a list of these names."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in eligible]
        if unknown or not names:
            found = f"there is no {unknown[0]!r}" if unknown else "nothing is named"
            raise argparse.ArgumentTypeError(f"{found}; eligible: {', '.join(eligible)}")
        return names

    return parse


def writable(text: str) -> str:
    """Check that a file can be written, before anything is measured."""
    path = Path(text)
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def positive(text: str) -> float:
    """Read a positive number."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def sizes(text: str) -> list[int]:
    """Read sizes in bytes, each with its unit."""
    found = []
    for word in text.split(","):
        number = word.strip().lower().rstrip("bkmgi")
        unit = word.strip().lower()[len(number) :].strip()
        with suppress(ValueError):
            size = float(number) * UNITS.get(unit, 0)
            if 4 <= size < float("inf") and size % 4 == 0:
                found.append(int(size))
                continue
        raise argparse.ArgumentTypeError(f"{word!r} is not a size; write multiples of 4 bytes as 4, 64KiB or 1MiB")
    return found
