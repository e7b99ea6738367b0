"""`mpistrategy bench`: its options, and the run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mpistrategy.cli.bench.cases import LISTS, cases
from mpistrategy.cli.bench.timing import measure, tell
from mpistrategy.cli.ranks import Ranks
from mpistrategy.errors import DeviceError, LaunchError, OptionError, UnsupportedError
from mpistrategy.mpi.tuning.thresholds import VARIABLE, file_for, library_name, save
from mpistrategy.objects.shown import time_in_words
from mpistrategy.objects.text import encoded
from mpistrategy.strategy.mirrored import MirroredStrategy
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.telemetry.own_rank import own_place

_WHERE = "mpistrategy bench"
_COULD_NOT = 2
SIZES = tuple(4**power for power in range(1, 15))  # 4 B ... 256 MiB
QUICK_SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
#: For each case, about.
QUICK_SECONDS, FULL_SECONDS = 1.0, 8.0
METHOD = (
    "Median of all rounds; the variants of a case take turns within each round. Ratio: median over the median of the "
    "case's first row; in brackets the quartiles of the ratios round by round. Every rank rewrites its operand before "
    "each call and reads its result after it (not counted). A call's time is that of its slowest rank. Bus bandwidth, "
    "as in nccl-tests: bytes / time * 2 (n - 1) / n."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy bench`."""
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; it says how long it will take")
    parser.add_argument("--sizes", nargs="+", type=size, metavar="BYTES", help="of one array: multiples of 4")
    parser.add_argument("--lists", nargs="+", choices=tuple(LISTS), help="of gradients")
    parser.add_argument(
        "--devices",
        choices=("cpu", "gpu", "shared"),
        default="cpu",
        help="gpu: arrays in GPU memory, each rank with a GPU of its own; shared: ranks may share one",
    )
    parser.add_argument("--seconds", type=float, help="for each case")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--save", action="store_true", help="measure the thresholds of this machine instead, and save them"
    )


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks of the job; return the exit status."""
    if options.save and options.devices != "cpu":
        raise OptionError.at(_WHERE, found=f"--devices {options.devices} with --save", expected="one of the two")
    try:
        strategy = MirroredStrategy(options.devices)
    except (DeviceError, UnsupportedError) as error:  # on all ranks
        if own_place()[0] == 0:
            sys.stderr.write(f"{_WHERE} --devices {options.devices}: {error}\n")
        return _COULD_NOT
    with closing(strategy):
        if strategy.num_replicas_in_sync == 1:
            fix = f"Start it with your launcher: mpiexec -n 2 {_WHERE}"
            raise LaunchError.at(_WHERE, found="one rank", expected="several to measure between", fix=fix)
        return _save(options, Ranks()) if options.save else _measure(options, Ranks(), strategy)


def _measure(options: argparse.Namespace, ranks: Ranks, strategy: Strategy) -> int:
    sizes, lists = options.sizes or (), options.lists or ()
    if not (sizes or lists):
        sizes, lists = QUICK_SIZES if options.quick else SIZES, tuple(LISTS)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else FULL_SECONDS)
    tell(ranks, f"{len(sizes) + len(lists)} cases, each measured for up to about {seconds:g} s, and checked")
    about, figures = environment(ranks), list[dict[str, Any]]()
    if ranks.rank == 0:
        print(head(about), flush=True)
    with ReplicaContext(strategy, strategy.replica_id_in_sync_group) as ctx:
        for case in cases(ranks, ctx, sizes, lists, options.devices != "cpu"):
            figures.append(measure(case, ranks, seconds))
            for variant in case.variants:
                variant.close()
            if ranks.rank == 0:  # at once: printed rows stay when the job is killed
                print("\n".join(rows(figures[-1])), flush=True)
    return _end(options, ranks, {"environment": about, "method": METHOD, "cases": figures})


def _save(options: argparse.Namespace, ranks: Ranks) -> int:
    """Measure the thresholds and save them."""
    from mpistrategy.cli.bench import thresholds

    about = environment(ranks)
    search = thresholds.Search(ranks, about, options.quick)
    result = replace(search.run(), source=f"measured {about['date']} on {about['cpu']}")
    try:
        file = file_for(about["mpi"], about["ranks_on_node"], about["nodes"])
        if ranks.rank == 0:
            save(result, file)
        note = f"Every new strategy of {about['ranks_on_node']} ranks on each of {about['nodes']} node(s) uses it."
        tell(ranks, f"saved {file}. {note}")
    except OSError as error:
        tell(ranks, f"rank 0 cannot save the thresholds: {error}. Name another file: {VARIABLE}=FILE.")
        return 1
    return _end(options, ranks, {"environment": about, "cases": search.cases, "thresholds": asdict(result)})


def _end(options: argparse.Namespace, ranks: Ranks, report: dict[str, Any]) -> int:
    """Write all figures to a file, if one is named; return the exit status."""
    if options.json and ranks.rank == 0:
        Path(options.json).write_bytes(encoded(json.dumps(report, indent=1) + "\n"))
    right = all(row["right"] for case in report["cases"] for row in case["variants"])
    if not right:
        tell(ranks, "WRONG RESULTS: see the tables")
    return 0 if right else 1


def environment(ranks: Ranks) -> dict[str, Any]:
    """Return what readers need to judge the figures of a run.  Collective."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    nodes = Counter(ranks.places()[0])
    return {
        "mpi": library_name(ranks.version),
        "ranks": ranks.size,
        "ranks_on_node": max(nodes.values()),
        "nodes": len(nodes),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": next(names, platform.machine()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def head(about: dict[str, Any]) -> str:
    """Return the beginning of the report, from the result of `environment`."""
    text = (
        "{date}, {mpi}, {ranks} ranks on {nodes} node(s), {cores} cores of {cpu}, Python {python}, NumPy {numpy}, "
        "BLAS threads {blas_threads}"
    )
    columns = "| what | case | variant | time | ratio (quartiles) | bus bandwidth |\n|---|---|---|---|---|---|"
    return f"{text.format_map(about)}\n\n{METHOD}\n\n{columns}"


def rows(case: dict[str, Any]) -> list[str]:
    """Return the rows of one case."""
    lines, ratio = [], "1"
    for row in case["variants"]:
        wrong = "" if row["right"] else " **WRONG RESULT**"
        figures = f"{time_in_words(row['median_us'] / 1e6)} | {ratio.format_map(row)} | {row['bus_gb_s']:.3g} GB/s"
        lines.append(f"| {case['suite']} | {case['case']} | {row['name']} | {figures}{wrong} |")
        ratio = "{ratio:.2f} ({ratio_quartile_1:.2f}-{ratio_quartile_3:.2f})"
    return lines


def writable(text: str) -> str:
    """Check that a file can be written, before anything is measured."""
    path = Path(text)
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def size(text: str) -> int:
    """Read a size in bytes: of an array of float32."""
    number = int(text)
    if number < 4 or number % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write multiples of 4")
    return number
