"""One rank is late, stopped, killed, ...: who is named, after how many seconds, on one node or on pretended ones.

Prints a row a job: its status, the seconds from the fault to its end, and the first line that names the rank; of a rank
that is killed only the launcher speaks.  Wrong is a job that hangs, or ends well.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import launching

PROGRAM = """
import os, resource, signal, sys, time
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
large = np.ones(2**24)
for number in range(8):
    value = large if number == 3 else np.ones(4)
    if number == 3 and strategy.rank == strategy.num_replicas_in_sync - 1:
        print("AT", time.time(), flush=True)
        FAULT
    strategy.reduce("SUM", value)
"""
LATE_SECONDS = "4"
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
}
JOB_SECONDS = 15


def soak(options: argparse.Namespace) -> bool:
    """Run the jobs; return whether something is wrong."""
    settings = {name: value for name, value in os.environ.items() if name == "MPIR_CVAR_NUM_CLIQUES"}
    settings["MPISTRATEGY_TIMEOUT_SECONDS"] = LATE_SECONDS
    names_it = rf"(?i)\brank {options.count - 1}\b(?!/)|\[rank {options.count - 1}/{options.count}\] \S"
    bad = 0
    for name in options.only or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            program = launching.program(PROGRAM.replace("FAULT", FAULTS[name]), Path(folder))
            try:
                job = launching.launch(options.count, [program], JOB_SECONDS, settings, Path(folder))
            except TimeoutError as error:
                print(f"{name}: {error}")
                bad += 1
                continue
        seconds = time.time() - float(job.stdout.partition("AT ")[2].split()[0])
        lines = [line for line in job.stderr.splitlines() if re.search(names_it, line)]
        bad += job.returncode == 0
        print(f"{name:12} status {job.returncode:3} {seconds:5.1f} s  {lines[0].strip()[:130] if lines else ''}")
    return bool(bad)
