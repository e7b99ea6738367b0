"""`mpistrategy doctor`: its options, and the run."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from dataclasses import replace

from mpistrategy.cli.doctor import cuda_trial, facts, leftovers, mpich, running_job
from mpistrategy.cli.doctor.checks import examine
from mpistrategy.cli.doctor.findings import BAD, Facts, Finding, Job, as_json, as_text, parts_of, worst
from mpistrategy.cli.ranks import Ranks
from mpistrategy.errors import FallbackWarning, LaunchError, MpiStrategyError
from mpistrategy.mpi.job.launcher import start

_SECONDS = 60.0
#: The other ranks wait longer than rank 0, which says who is missing.
_LONGER_SECONDS = 5.0
#: The exit status when something is bad; a hang counts as bad.
_BAD = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy doctor`."""
    parser.epilog = (
        "Start it as you start your program: mpiexec -n 4 mpistrategy doctor, or srun mpistrategy doctor. "
        "Status: 0 nothing is bad, 1 something is, 2 could not be done as asked."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="how many ranks there should be")
    parser.add_argument(
        "--timeout", type=positive, default=_SECONDS, metavar="SECONDS", help=f"how long it may take; {_SECONDS:g}"
    )
    parser.add_argument(
        "--remove-leftovers",
        action="store_true",
        help="remove what killed jobs of yours have left in /dev/shm and TMPDIR of this node; no running job uses it",
    )
    hung = parser.add_argument_group("a job that hangs or is slow, from outside")
    hung.add_argument(
        "--job", metavar="ID", help="a Slurm job: what each rank is doing, who has not come, who comes late"
    )
    hung.add_argument("--pid", type=int, metavar="PID", help="the same of the job of a process of this node")


def positive(text: str) -> float:
    """Read a number above 0."""
    number = float(text)
    if not number > 0:
        raise ValueError
    return number


def run(options: argparse.Namespace) -> int:
    """Examine the job that this process is a rank of, or another one; return the exit status."""
    if options.job or options.pid:
        return running_job.run(options)
    if options.remove_leftovers:
        return leftovers.run()
    end = time.monotonic() + options.timeout
    own_facts = facts.of_this_process(os.environ)
    problem = mpich.refusal(own_facts, os.environ) or _start_mpi(options.timeout)
    if problem is not None:
        if own_facts["place"]:
            return 0  # all processes find the same; the status of the first is the job's
        own_facts["refusal"] = (problem.found, problem.fix)
        return _print(options, Job([own_facts]), [problem])
    # A rank that waits for others in vain shows where, and ends.
    faulthandler.dump_traceback_later(max(end - time.monotonic(), 0) + _LONGER_SECONDS, exit=True, file=2)
    ranks = Ranks()
    own_facts |= facts.of_mpi(ranks)
    if own_facts["refusal"] and own_facts["place"]:
        return 0  # all ranks find the same; the first prints it, and its status is the job's
    job = _meet(options, ranks, own_facts, end)
    status = 0
    if ranks.rank == 0:
        status = _print(options, job, examine(job))
    # srun --kill-on-bad-exit ends the ranks that are still at it when the first has ended, and reports their status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if job.missing:
        ranks.comm.Abort(_BAD)
    status = ranks.from_first(status)
    faulthandler.cancel_dump_traceback_later()
    return status


def _start_mpi(seconds: float) -> Finding | None:
    """Start MPI; return why that cannot be done."""
    try:
        start("mpistrategy doctor", seconds)
    except LaunchError as error:
        return Finding("launch" if error.__context__ is None else "mpi", BAD, *parts_of(error))
    return None


def _meet(options: argparse.Namespace, ranks: Ranks, own_facts: Facts, end: float) -> Job:
    """Return the known facts of the job: on rank 0 of all ranks, elsewhere of this rank."""
    patience = max(end - time.monotonic(), 0.0)
    texts = ranks.collect(json.dumps(own_facts), patience)
    if ranks.rank == 0 and len(texts) < ranks.size:
        return Job([own_facts], options.ranks, sorted({*range(ranks.size)} - texts.keys()), patience)
    leaders, local_rank = ranks.places()
    all_facts = [facts.UNKNOWN | json.loads(texts[rank]) | {"leader": leaders[rank]} for rank in sorted(texts)]
    job = Job(all_facts, options.ranks)
    differ = any(job.differing(key)[0] for key in ("mpistrategy", "python", "thread_level"))  # it may hang then
    if ranks.from_first(int(differ)):
        return replace(job, untried="the ranks run different versions, or started MPI differently")
    if ranks.size > 1:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)  # a check says it
                job = replace(job, sums_right=ranks.add_up_right())
        except MpiStrategyError as error:  # on all ranks alike
            job = replace(job, untried=str(error))
    return replace(job, trial=cuda_trial.try_all(ranks, local_rank, job))


def _print(options: argparse.Namespace, job: Job, findings: list[Finding]) -> int:
    """Print the report; return the exit status."""
    sys.stdout.write(f"{as_json(job, findings) if options.json else as_text(job, findings)}\n")
    sys.stdout.flush()
    return _BAD if worst(findings) == BAD else 0
