"""The figures: what they were measured on, tables of Markdown that grow on the screen, and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.cli.bench.case import Case
from mpistrategy.cli.bench.timing import measure
from mpistrategy.mpi.shared_memory.spin_wait import cores
from mpistrategy.objects.text import encoded

if TYPE_CHECKING:
    from mpistrategy.cli.bench.raw import RawRanks

METHOD = (
    "Median of all rounds; the variants of a case take turns within each round. Ratio: median over the median of the "
    "case's first row; in brackets the quartiles of the ratios round by round. Every rank rewrites its operand before "
    "each call and reads its result after it (not counted). A call's time is that of its slowest rank. Bus bandwidth, "
    "as in nccl-tests: bytes / time * 2 (n - 1) / n."
)


def environment(ranks: RawRanks) -> dict[str, Any]:
    """Return what readers need to judge the figures of a run."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "mpi": ranks.library,
        "ranks": ranks.size,
        "ranks_on_node": ranks.ranks_on_node,
        "nodes": ranks.nodes,
        "cores": len(cores()),
        "cpu": next(names, platform.machine()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def time_in_words(microseconds: float) -> str:
    """Return a time with three digits."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds:.3g} us"


class Report:
    """The cases of a run.  Rank 0 prints each row when it is measured: what is printed stays when the job is killed.

    Args:
        ranks: who measures.
        seconds: for each case.
        expected: how many cases there will be.

    Attributes:
        cases: the figures so far, the same on every rank.
    """

    def __init__(self, ranks: RawRanks, seconds: float, expected: int) -> None:
        self._ranks, self._seconds, self._expected = ranks, seconds, expected
        self._started = time.monotonic()
        self.environment: dict[str, Any] = environment(ranks)
        self.cases: list[dict[str, Any]] = []
        self.tell(f"{expected} cases, each measured for up to about {seconds:g} s, and checked before that")
        about = (
            "{date}, {mpi}, {ranks} ranks on {nodes} node(s), {cores} cores of {cpu}, {system}, Python {python}, "
            "NumPy {numpy}, BLAS threads {blas_threads}"
        )
        self.print([about.format_map(self.environment), "", METHOD])

    def tell(self, line: str) -> None:
        """Say something about the run that is not one of its figures."""
        if self._ranks.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def print(self, lines: Iterable[str]) -> None:
        """Print lines of the report."""
        if self._ranks.rank == 0:
            print("\n".join(lines), flush=True)

    def add(self, case: Case) -> dict[str, Any]:
        """Measure a case, print its rows and free its memory; return its figures.  Collective."""
        passed = time.monotonic() - self._started
        which = f"case {len(self.cases) + 1} of {self._expected}"
        self.tell(f"{case.suite}: {case.name} ... ({which}, {passed:.0f} s so far)")
        figures = measure(case, self._ranks, self._seconds)
        for variant in case.variants:
            if variant.close is not None:
                variant.close()
        case.variants.clear()
        if not self.cases or self.cases[-1]["suite"] != case.suite:
            head = "| case | variant | time | ratio (quartiles) | bus bandwidth |"
            self.print(["", f"**{case.suite}**", "", head, "|---|---|---|---|---|"])
        self.cases.append(figures)
        self.print(rows(figures))
        return figures

    def end(self, file: str | None) -> bool:
        """Write all figures to a file, if one is named; return whether all results were right."""
        self.tell(f"{len(self.cases)} cases took {time.monotonic() - self._started:.0f} s")
        if file and self._ranks.rank == 0:
            write_json(file, {"environment": self.environment, "method": METHOD, "cases": self.cases})
        right = all(row["right"] for case in self.cases for row in case["variants"])
        if not right:
            self.tell("WRONG RESULTS: see the tables")
        return right


def rows(case: dict[str, Any]) -> list[str]:
    """Return the rows of one case."""
    lines, name, ratio = [], case["case"], "1"
    for row in case["variants"]:
        wrong = "" if row["right"] else " **WRONG RESULT**"
        took = time_in_words(row["median_us"])
        speed = f"{row['bus_gb_s']:.3g} GB/s{wrong}"
        lines.append(f"| {name} | {row['name']} | {took} | {ratio.format_map(row)} | {speed} |")
        name, ratio = "", "{ratio:.2f} ({ratio_quartile_1:.2f}-{ratio_quartile_3:.2f})"
    return lines


def write_json(path: str, report: dict[str, Any]) -> None:
    """Write a whole report."""
    Path(path).write_bytes(encoded(json.dumps(report, indent=1) + "\n"))
