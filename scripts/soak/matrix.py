"""The whole mutation matrix: every mistake of tests/mistakes, made by the first rank and by the last, at first and
after two good rounds, on one node or on those that MPICH pretends.

Prints how many had which outcome, and the output of each that differs from the table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

from mistakes.judging import judge
from mistakes.matrix import load


def soak(options: argparse.Namespace) -> bool:
    """Run the jobs; return whether something is wrong."""
    table, counts, wrong = load(), Counter[str](), 0
    nodes = int(os.environ.get("MPIR_CVAR_NUM_CLIQUES", 1))
    for name, odd, rounds in product(options.only or table, (0, options.count - 1), (0, 2)):
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(name, options.count, odd, rounds, Path(folder), nodes)
        expected = table[name][1]
        counts[verdict.kind] += 1
        if not verdict.is_as(expected):
            wrong += 1
            print(f"--- {name}: {verdict.kind}, not {expected}; rank {odd}, after {rounds} rounds\n{verdict.story}")
    print(f"mistakes on {options.count} ranks, nodes: {nodes}: {dict(counts)}; {wrong} not as they should be")
    return bool(wrong)
