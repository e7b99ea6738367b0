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
from mpistrategy.cli.bench.timing import Effort, measure
from mpistrategy.mpi.shared_memory.spin_wait import cores
from mpistrategy.objects.text import encoded

if TYPE_CHECKING:
    from mpistrategy.cli.bench.raw import RawRanks

METHOD = (
    "Median of all rounds; the variants of a case take turns within each round. Ratio: median over the median of the "
    "case's first row; in brackets the quartiles of the ratios round by round. Every rank rewrites its operand before "
    "each call and reads its result after it (not counted). A call's time is that of its slowest rank."
)
#: Variables that set the number of BLAS threads.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def environment(ranks: RawRanks) -> dict[str, Any]:
    """Return what readers need to judge the figures of a run."""
    return {
        "mpi": ranks.library,
        "ranks": ranks.size,
        "ranks_on_node": ranks.ranks_on_node,
        "nodes": ranks.nodes,
        "cores": len(cores()),
        "cpu": _cpu(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas_threads": next((os.environ[name] for name in _THREADS if name in os.environ), "not set"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def environment_in_words(found: dict[str, Any]) -> str:
    """Return the environment as one line."""
    return (
        "{date}, {mpi}, {ranks} ranks on {nodes} node(s), {cores} cores of {cpu}, {memory_gib} GiB, {system}, "
        "Python {python}, NumPy {numpy}, BLAS threads {blas_threads}"
    ).format_map(found)


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
        effort: for each case.
        expected: how many cases there will be.

    Attributes:
        cases: the figures so far, the same on every rank.
    """

    def __init__(self, ranks: RawRanks, effort: Effort, expected: int) -> None:
        self._ranks, self._effort, self._expected = ranks, effort, expected
        self._started = time.monotonic()
        self.environment: dict[str, Any] = environment(ranks)
        self.cases: list[dict[str, Any]] = []
        self.tell(f"{expected} cases, each measured for up to about {effort.seconds:g} s, and checked before that")
        self.print([environment_in_words(self.environment), "", METHOD])

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
        done, passed = len(self.cases), time.monotonic() - self._started
        left = f"about {max(self._expected - done, 0) * passed / done:.0f} s to go" if done else "the first one"
        self.tell(f"{case.suite}: {case.name} ... (case {done + 1} of {self._expected}, {left})")
        figures = measure(case, self._ranks, self._effort)
        for variant in case.variants:
            if variant.close is not None:
                variant.close()
        case.variants.clear()
        if not self.cases or self.cases[-1]["suite"] != case.suite:
            self.print(suite_head(case.suite))
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


def suite_head(suite: str) -> list[str]:
    """Return the beginning of a table."""
    return ["", f"**{suite}**", "", "| case | variant | time | ratio (quartiles) |", "|---|---|---|---|"]


def rows(case: dict[str, Any]) -> list[str]:
    """Return the rows of one case."""
    lines, first = [], case["variants"][0]
    for row in case["variants"]:
        ratio = f"{row['ratio']:.2f} ({row['ratio_quartile_1']:.2f}-{row['ratio_quartile_3']:.2f})"
        took = time_in_words(row["median_us"])
        wrong = "" if row["right"] else " **WRONG RESULT**"
        shown = (case["case"], "1") if row is first else ("", ratio)
        lines.append(f"| {shown[0]} | {row['name']} | {took} | {shown[1]}{wrong} |")
    return lines


def write_json(path: str, report: dict[str, Any]) -> None:
    """Write a whole report."""
    Path(path).write_bytes(encoded(json.dumps(report, indent=1) + "\n"))
