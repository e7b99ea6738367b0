"""What takes too long, or too much memory, for every change; each a file beside this one, with a line of figures.

scripts/mpirun -n 3 scripts/soak NAME [OPTION...]      one of them; what starts jobs itself wants -n 1
.venv/bin/python scripts/soak all [--mpi openmpi]      all of them; hours

steps           20000 steps of mixed collectives and 3000 strategies: nothing grows
late_ranks      ten minutes of ranks that are late by less than the timeout: no alarm
faults          40 planned faults: who is named, after how many seconds
mistakes        every mistake of tests/mistakes, made by one rank: none is silent
interruptions   100000 calls, of which every tenth is interrupted: no hang, no wrong sum
kills           1000 kills of jobs: nothing stays in /dev/shm
checkpoints     1000 kills of processes that save, and 200 of whole jobs: nothing is lost or torn
hostile_files   10000 checkpoints, other files and settings that were made up to harm
large_counts    messages of more than 2^31 elements on 2 ranks; needs 20 GiB of memory
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = [line.split()[0] for line in (__doc__ or "").split("\n\n")[2].splitlines()]
#: For `all`: the number of ranks, pretended nodes of MPICH, and the arguments.
EVERYTHING: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (2, 1, ("steps",)),
    (3, 1, ("steps",)),
    (3, 1, ("late_ranks", "--timeout", "5")),
    *((1, nodes, ("faults",)) for nodes in (1, 2)),
    *((1, nodes, ("mistakes",)) for nodes in (1, 2, 3)),
    *((3, 1, ("interruptions", "--calls", "5000", "--seed", str(seed))) for seed in range(20)),
    (1, 1, ("kills",)),
    (1, 1, ("checkpoints",)),
    (1, 1, ("checkpoints", "--whole-jobs", "200")),
    (1, 1, ("hostile_files",)),
    (2, 1, ("hostile_files", "--on-ranks", "--files", "500")),
    (2, 1, ("large_counts",)),
)


def run_all(options: list[str]) -> int:
    """Run everything; return 1 where something has failed."""
    failed = []
    for ranks, nodes, words in EVERYTHING:
        print(f"== {' '.join(words)}, ranks: {ranks}, nodes: {nodes}", flush=True)
        environment = {**os.environ, "MPIR_CVAR_NUM_CLIQUES": str(nodes)}
        if ranks == 1:  # it starts jobs of its own, or needs no MPI
            command = [sys.executable, str(FOLDER), *words]
        else:
            command = [str(FOLDER.parent / "mpirun"), *options, "-n", str(ranks), str(FOLDER), *words]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(" ".join(words))
    print(f"== failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))


def main() -> int:
    """Run what is named; return the exit status."""
    if len(sys.argv) > 1 and sys.argv[1] == "all":
        return run_all(sys.argv[2:])
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(__doc__)
        return 2
    name = sys.argv[1]
    sys.argv[:2] = [f"scripts/soak {name}"]
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
