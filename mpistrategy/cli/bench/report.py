"""The figures: their environment, tables of Markdown that grow on the screen, and JSON."""

from __future__ import annotations

import os
import platform
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mpistrategy.cli.ranks import Ranks
from mpistrategy.mpi.shared_memory.spin_wait import cores
from mpistrategy.mpi.tuning.thresholds import library_name
from mpistrategy.objects.shown import time_in_words

METHOD = (
    "Median of all rounds; the variants of a case take turns within each round. Ratio: median over the median of the "
    "case's first row; in brackets the quartiles of the ratios round by round. Every rank rewrites its operand before "
    "each call and reads its result after it (not counted). A call's time is that of its slowest rank. Bus bandwidth, "
    "as in nccl-tests: bytes / time * 2 (n - 1) / n."
)


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
        "cores": len(cores()),
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
