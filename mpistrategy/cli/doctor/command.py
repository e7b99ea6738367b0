"""`mpistrategy doctor`: its options, and the run."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from mpistrategy.cli.doctor.checks import catalog, mpich_start
from mpistrategy.cli.doctor.checks.finding import BAD, Finding, worst
from mpistrategy.cli.doctor.checks.gpu import parts_of
from mpistrategy.cli.doctor.deadline import STATUS, Deadline
from mpistrategy.cli.doctor.facts import gather
from mpistrategy.cli.doctor.facts.facts import Facts, Job
from mpistrategy.cli.doctor.report import report
from mpistrategy.cli.doctor.report.privacy import covered, veil
from mpistrategy.errors import FallbackWarning, LaunchError, MpiStrategyError
from mpistrategy.mpi.job.start import start

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.facts.ranks import Ranks

_SECONDS = 60.0
#: The other ranks wait longer than rank 0, which says who is missing.
_LONGER_SECONDS = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy doctor`."""
    parser.epilog = (
        "Start it as you start your program: mpiexec -n 4 mpistrategy doctor, or srun mpistrategy doctor. "
        "Status: 0 nothing is bad, 1 something is, 2 could not be done as asked."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ranks", type=_positive, metavar="N", help="how many ranks there should be")
    parser.add_argument(
        "--timeout", type=_seconds, default=_SECONDS, metavar="SECONDS", help=f"how long it may take; {_SECONDS:g}"
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
    hung.add_argument("--pid", type=_positive, metavar="PID", help="the same of the job of a process of this node")


def run(options: argparse.Namespace) -> int:
    """Examine the job that this process is a rank of, or another one; return the exit status."""
    start_seconds = gather.seconds_since_start()
    if options.job or options.pid:
        from mpistrategy.cli.doctor.running_job import hung_job

        return hung_job.run(options)
    if options.remove_leftovers:
        from mpistrategy.cli.doctor import leftovers

        return leftovers.run()
    deadline = Deadline(options.timeout + _LONGER_SECONDS)
    try:
        return _examine(options, deadline, start_seconds)
    finally:
        deadline.met()


def _examine(options: argparse.Namespace, deadline: Deadline, start_seconds: float) -> int:
    cover = veil(os.environ)
    facts = gather.of_this_process(os.environ, start_seconds)
    refused = mpich_start.refusal(facts, os.environ)
    if refused is not None:
        return _alone(options, facts, refused, cover)
    began = time.monotonic()
    try:
        start("mpistrategy doctor", options.timeout)
        from mpistrategy.cli.doctor.facts.ranks import Ranks

        ranks = Ranks()
    except LaunchError as error:
        if error.__context__ is not None:
            return _without_mpi(options, facts, error, cover)
        return _alone(options, facts, Finding("pmi", BAD, *parts_of(error)), cover)
    facts = gather.with_mpi(facts, ranks, time.monotonic() - began)
    if facts.refusal and facts.place:
        return 0  # all of them found the same; the first one tells it, and its status is the job's
    deadline.title = f"[rank {ranks.rank}/{ranks.size}] " if ranks.size > 1 else ""
    try:
        job = _meet(options, deadline, ranks, facts, cover)
    except BaseException:
        if ranks.size == 1:
            raise
        sys.excepthook(*sys.exc_info())
        ranks.abort(STATUS)
        raise
    if ranks.rank == 0:
        findings = catalog.examine(job)
        _tell(options, job, findings, cover)
        status = int(worst(findings) == BAD)
    else:
        status = 0
    # srun --kill-on-bad-exit ends the ranks that are still at it when the first has ended, and reports their status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if job.missing:
        ranks.abort(STATUS)
    return ranks.told(status)


def _meet(
    options: argparse.Namespace, deadline: Deadline, ranks: Ranks, facts: Facts, cover: Callable[[str], str]
) -> Job:
    """Return what is known of the job; on rank 0 of all ranks, elsewhere of this one."""
    wanted = options.ranks or 0
    patience = deadline.left - _LONGER_SECONDS

    def absent(there: dict[int, str], waited: float) -> Job | None:
        missing = [rank for rank in range(ranks.size) if rank not in there] if ranks.rank == 0 else []
        return Job([facts], wanted, missing, round(waited)) if missing else None

    deadline.stage = "waiting for all ranks"
    job = absent(ranks.collect("here", patience), patience)
    if job is not None:
        return job
    ranks.told(0)
    deadline.stage = "looking at nodes and GPUs"
    facts = gather.on_node(facts, ranks.place_on_node())
    texts = ranks.collect(json.dumps(covered(asdict(facts), cover)), left := deadline.left - _LONGER_SECONDS)
    job = absent(texts, left)
    if job is not None:
        return job
    everyone = [Facts.read(texts[rank]) for rank in sorted(texts)]
    deadline.stage = "adding up"
    sums_right, untried = _sums(ranks, everyone)
    from mpistrategy.cli.doctor.facts import cuda_trial

    deadline.stage = "giving GPU memory to MPI"
    trial = cuda_trial.try_all(ranks, facts.local_rank, everyone)
    return Job(everyone, wanted, (), 0.0, sums_right, untried, trial)


def _sums(ranks: Ranks, everyone: list[Facts]) -> tuple[bool | None, str]:
    """Return whether the ranks add up right, or why it was not tried.  Collective."""
    if ranks.size == 1:
        return None, ""
    kinds = {
        "the ranks run different versions": len({(e.mpistrategy, e.python.rpartition(".")[0]) for e in everyone}),
        "the ranks started MPI differently": len({each.thread_level for each in everyone}),  # it may hang then
    }
    reasons = list(kinds)
    differ = next((number for number, reason in enumerate(reasons) if kinds[reason] > 1), -1)
    if (number := ranks.told(differ)) >= 0:
        return None, reasons[number]
    from mpistrategy.cli.doctor.facts.one_sum import is_right

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # a check says it
            return is_right(ranks), ""
    except MpiStrategyError as error:  # on all ranks alike
        return None, str(error)


def _without_mpi(options: argparse.Namespace, facts: Facts, error: LaunchError, cover: Callable[[str], str]) -> int:
    """Say that no MPI can be loaded."""
    found, fix = parts_of(error)
    if facts.wanted:
        fix = f"Correct MPI4PY_LIBMPI={facts.wanted}: is it there, with all that it needs (ldd)? Or unset it.\n{fix}"
    return _alone(options, facts, Finding("mpi", BAD, found, fix), cover)


def _alone(options: argparse.Namespace, facts: Facts, finding: Finding, cover: Callable[[str], str]) -> int:
    """Tell the one thing that is known where MPI cannot be started, on the first of the launcher's processes."""
    if facts.place:
        return 0  # all of them found the same; the status of the first one is the job's
    _tell(options, Job([replace(facts, refusal=(finding.found, finding.fix))]), [finding], cover)
    return STATUS


def _tell(options: argparse.Namespace, job: Job, findings: list[Finding], cover: Callable[[str], str]) -> None:
    text = report.as_json(job, findings, cover) if options.json else cover(report.as_text(job, findings))
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds
