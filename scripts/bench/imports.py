"""Measures what `import mpistrategy` costs beyond `import numpy`, in fresh interpreters; nothing starts MPI.

    python scripts/bench imports [--runs N]

The two imports take turns.  On a busy machine trust the CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

CODE = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import numpy
{more}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def milliseconds(more: str) -> tuple[float, float]:
    """Return the wall-clock and the CPU time of importing numpy, and `more`, in a new interpreter."""
    # One BLAS thread: the others' start would count as CPU time.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE.format(more=more)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    wall, cpu = map(float, printed.split())
    return 1e3 * wall, 1e3 * cpu


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21, help="pairs of new interpreters; default: %(default)s")
    runs = parser.parse_args().runs
    milliseconds("import mpistrategy")  # fills the disk cache
    pairs = [(milliseconds(""), milliseconds("import mpistrategy")) for _ in range(runs)]
    for clock, name in enumerate(("wall clock", "CPU time")):
        alone = statistics.median(numpy_alone[clock] for numpy_alone, _ in pairs)
        extra = statistics.median(both[clock] - numpy_alone[clock] for numpy_alone, both in pairs)
        print(f"{name}: import mpistrategy {extra:.1f} ms beyond numpy's {alone:.1f} (medians of {runs} pairs)")


if __name__ == "__main__":
    main()
