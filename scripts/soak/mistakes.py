"""One rank makes a mistake: nobody waits, and nothing is silently wrong.

    python scripts/soak mistakes [--every N] [--offset N] [NAME...]
    MPIR_CVAR_NUM_CLIQUES=2 python scripts/soak mistakes ...               on 2 nodes that MPICH pretends

The whole mutation matrix: every mistake of tests/mistakes on 2 and 3 ranks of one node, and on 3 and 4 ranks of
several, made by the first and by the last, at first and later.

Prints how many had which outcome, and the output of each that differs from the table.  Exit status 1 with such.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests" / folder) for folder in ("", "jobs")]
from mistakes.judging import judge  # noqa: E402
from mistakes.matrix import load  # noqa: E402


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    table, began = load(), time.monotonic()
    nodes = int(os.environ.get("MPIR_CVAR_NUM_CLIQUES", 1))
    cases = [
        (name, ranks, odd, rounds)
        for name, ranks, rounds in product(options.names or table, (2, 3) if nodes == 1 else (3, 4), (0, 2))
        for odd in (0, ranks - 1)
    ][options.offset :: options.every]
    counts: Counter[str] = Counter()
    wrong = 0
    for name, ranks, odd, rounds in cases:
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(name, ranks, odd, rounds, Path(folder), nodes)
        expected = table[name][1]
        counts[expected if verdict.is_as(expected) else f"{verdict.kind}, not {expected}"] += 1
        if not verdict.is_as(expected):
            wrong += 1
            title = f"--- {name}: {verdict.kind} in place of {expected}"
            print(f"{title}; {ranks} ranks, rank {odd}, {rounds} rounds before\n{verdict.story}", flush=True)
    figures = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    seconds = time.monotonic() - began
    print(f"mistakes: {len(cases)} jobs, nodes: {nodes}, {seconds:.0f} s: {figures}; {wrong} not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
