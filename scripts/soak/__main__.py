"""What takes too long, or too much memory, for every change; each is a file beside this one.

    scripts/mpirun -n 3 scripts/soak NAME [OPTION...]      steps, interruptions, large_counts
    .venv/bin/python scripts/soak NAME [OPTION...]         the others, which start jobs of their own
    .venv/bin/python scripts/soak all                      all of them; hours

With MPIR_CVAR_NUM_CLIQUES=2 in the environment MPICH pretends two nodes.  Exit status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path += [str(SCRIPTS.parent / "tests"), str(SCRIPTS.parent / "tests" / "jobs")]

#: The number of ranks that `all` starts, how many there are of what --count counts, and what it does.
SOAKS = {
    "steps": (3, 20_000, "steps of mixed collectives, and an eighth as many strategies: nothing grows"),
    "interruptions": (3, 5_000, "calls, of which every tenth is interrupted: no hang, no wrong sum"),
    "large_counts": (2, 2**31 + 16, "elements in one message; needs 20 GiB of memory"),
    "faults": (1, 2, "ranks, of which the last has one of nine faults: who is named, after how many seconds"),
    "matrix": (1, 3, "ranks, of which one makes a mistake of tests/mistakes: none is silent"),
    "kills": (1, 200, "kills of whole jobs: nothing stays in /dev/shm, and what was saved can be restored"),
    "saves": (1, 1_000, "processes that are killed while they save, or whose power fails: nothing is torn"),
    "hostile_files": (1, 10_000, "checkpoints that were made up to harm, and other files and settings"),
}


def run_all() -> int:
    """Run everything; return 1 where something has failed."""
    failed = []
    for name, (ranks, _, _) in SOAKS.items():
        print(f"== {name} on {ranks} ranks", flush=True)
        launcher = [str(SCRIPTS / "mpirun"), "-n", str(ranks)] if ranks > 1 else [sys.executable]
        if subprocess.run([*launcher, str(SCRIPTS / "soak"), name], check=False).returncode:
            failed.append(name)
    print(f"== failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))


def main() -> int:
    """Run what is named; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = parser.add_subparsers(dest="name", required=True)
    names.add_parser("all", help="all of them")
    for name, (_, count, words) in SOAKS.items():
        soak = names.add_parser(name, help=f"--count {count}: {words}")
        soak.add_argument("--count", type=int, default=count, help="default: %(default)s")
        soak.add_argument("--seed", type=int, default=0, help="default: %(default)s")
        soak.add_argument("only", nargs="*", help="of faults, mistakes (matrix) and large counts: only these")
    options = parser.parse_args()
    return run_all() if options.name == "all" else int(import_module(options.name).soak(options))


if __name__ == "__main__":
    sys.exit(main())
