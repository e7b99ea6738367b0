"""All checks, in the order in which they are told: functions from what is known of a job to findings.

A further check is a function in one of the files by subject, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpistrategy.doctor import gpu_checks, launch_checks, mpi_checks, node_checks, speed_checks
from mpistrategy.doctor.facts import Job
from mpistrategy.doctor.finding import Finding

Check = Callable[[Job], Iterator[Finding]]

#: What makes sense of any job, also of one whose ranks did not meet.
ALWAYS: tuple[Check, ...] = (launch_checks.launch, launch_checks.pmi)
#: What makes sense of one rank.
ALONE: tuple[Check, ...] = (mpi_checks.versions, mpi_checks.library)
#: What needs the facts of all ranks.
TOGETHER: tuple[Check, ...] = (
    mpi_checks.thread_level,
    node_checks.nodes,
    launch_checks.local_rank,
    node_checks.cores,
    node_checks.shared_memory,
    gpu_checks.gpus,
    gpu_checks.peer_access,
    gpu_checks.cuda_aware,
    mpi_checks.start,
    speed_checks.sums,
    speed_checks.speed,
    speed_checks.links,
    speed_checks.clock,
    mpi_checks.leftovers,
)


def examine(job: Job) -> list[Finding]:
    """Return what all checks say of a job."""
    checks = ALWAYS
    if not job.missing:
        checks += ALONE if job.facts[0].refusal else (*ALONE, *TOGETHER)
    return [finding for check in checks for finding in check(job)]
