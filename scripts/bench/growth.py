"""How the work of a rank grows with the number of ranks: pretended ones, 8 on a node, in the library's own code.

Tables of Markdown: the CPU time of making a strategy, and of the report of a mismatch, which one rank prints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "doubles"))
from pretended import creation_seconds  # noqa: E402

from mpistrategy.mpi.contract.mismatch_report import Report, mismatch  # noqa: E402

LOCAL = 8


def creation(ranks: int) -> str:
    """Return CPU seconds on CPUs, and with devices="auto" where there are no GPUs."""
    return " | ".join(f"{min(creation_seconds(ranks, LOCAL, how) for _ in range(3)):.3f}" for how in (None, "auto"))


def mismatch_table(ranks: int) -> str:
    """Return lines and CPU seconds where the call of one rank differs, and where each differs."""
    cells = []
    for lengths in ([3 + (rank == 7) for rank in range(ranks)], range(ranks)):
        reports = [Report({"call": "Strategy.reduce", "values": f"float64[{n}]"}, "train.py:7") for n in lengths]
        began = time.process_time()
        lines = str(mismatch(reports)).splitlines()
        cells += [f"{len(lines)}", f"{time.process_time() - began:.3f}"]
    return " | ".join(cells)


TABLES = {
    'creation, s | devices="auto", s': creation,
    "lines of a mismatch, one differs | s | all differ | s": mismatch_table,
}


def measure(options: argparse.Namespace) -> None:
    """Print the tables."""
    creation_seconds(16, LOCAL)  # loads modules
    for title, row in TABLES.items():
        print(f"\n| ranks | {title} |\n|{'---|' * (title.count('|') + 2)}")
        for ranks in options.ranks:
            print(f"| {ranks} | {row(ranks)} |", flush=True)
    os._exit(0)  # the pretended ranks do not come to the end
