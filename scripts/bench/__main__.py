"""Measurements for those who change the library, each a file beside this one.

    scripts/mpirun -n 2 scripts/bench NAME [OPTION...]
    scripts/mpirun -n 1 scripts/bench calls

`mpistrategy bench` measures sums of one array and of lists on a user's machine.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = ("between_nodes", "calls", "forecast", "growth", "imports", "torch_steps", "training_steps")


def main() -> int:
    """Run the named measurement with the other arguments; return the exit status where there is none."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"{__doc__}\nNAME is one of {', '.join(NAMES)}; NAME --help tells more.")
        return 2
    sys.argv[:2] = [f"scripts/bench {sys.argv[1]}"]
    name = sys.argv[0].split()[1]
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
