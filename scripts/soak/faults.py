"""Forty planned faults: one rank is late, stopped, killed, ...; who is named, after how many seconds.

    python scripts/soak faults [--other MPIEXEC] [NAME...]
    MPIR_CVAR_NUM_CLIQUES=2 python scripts/soak faults ...                 on 2 nodes that MPICH pretends

Each is made by the last of 2 and of 3 ranks, with this interpreter's MPI.  `--other` is the mpiexec of another MPI, for
the row of a launcher that does not know the library.  Prints a row a job: the status, the seconds from the fault to the
end of the job, and the first line that names the rank; of a rank that is killed only the launcher speaks.
Exit status 1 where a job hangs, or ends well.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests" / folder) for folder in ("", "jobs")]
import launching  # noqa: E402

PROGRAM = """
import os, resource, signal, sys, time
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
large = np.ones(2**24)
for number in range(8):
    value = large if number == 3 else np.ones(4)
    if number == 3 and strategy.rank == strategy.num_replicas_in_sync - 1:
        sys.stderr.write(f"AT {time.time()}\\n")
        sys.stderr.flush()
        FAULT
    strategy.reduce("SUM", value)
"""
LIMIT = 4.0
WRONG_MPI = "wrong MPI"
FAULTS = {
    "late": "time.sleep(60)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit(3)": "os._exit(3)",
    "sys.exit(3)": "sys.exit(3)",
    "raised": "raise ValueError('why')",
    "left": "break",
    "mismatched": "value = np.ones(5)",
    "no memory": "resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))",
    WRONG_MPI: "pass",
}
JOB_SECONDS = 15


def run(name: str, ranks: int, other: str) -> tuple[int, float, str]:
    """Run one job; return its status, how many seconds after the fault it ended, and the line that names the rank."""
    told = {**launching.environment(), "MPISTRATEGY_TIMEOUT_SECONDS": str(LIMIT)}
    told |= {key: value for key, value in os.environ.items() if key == "MPIR_CVAR_NUM_CLIQUES"}
    at = time.time()
    with tempfile.TemporaryDirectory() as folder:
        program = launching.program(PROGRAM.replace("FAULT", FAULTS[name]), Path(folder))
        if name == WRONG_MPI:
            command = [other, "-n", str(ranks), sys.executable, str(program)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=told)
            status, text = done.returncode, done.stderr
        else:
            job = launching.launch(ranks, [program], JOB_SECONDS, told, Path(folder))
            status, text = job.returncode, job.stderr + job.stdout
            at = float((re.search(r"^AT ([.0-9]+)$", text, re.MULTILINE) or ["", "nan"])[1])
    seconds = time.time() - at
    unsaid = ("another rank prints", "application called")
    lines = [line.strip() for line in text.splitlines() if not any(words in line for words in unsaid)]
    for words in (rf"\brank {ranks - 1}\b(?!/)", rf"\[rank {ranks - 1}/{ranks}\] \S"):
        for line in lines:
            if re.search(words, line, re.IGNORECASE):
                return status, seconds, line
    return status, seconds, ""


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", default="", help="the mpiexec of another MPI")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    bad = 0
    for name, ranks in product(options.names or FAULTS, (2, 3)):
        if name == WRONG_MPI and not options.other:
            continue
        try:
            status, seconds, line = run(name, ranks, options.other)
        except TimeoutError as error:
            status, seconds, line = -1, math.nan, ""
            print(error)
        bad += status in (0, -1)
        print(f"{name:12} {ranks} ranks  status {status:3} {seconds:5.1f} s  {line[:130]}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
