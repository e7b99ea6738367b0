"""All checks, in the order in which they are told: functions from what is known of a job to findings.

A further check is a function in one of the files by subject, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpistrategy.cli.doctor.checks import gpu, launch, mpi, node, speed
from mpistrategy.cli.doctor.checks.finding import Finding
from mpistrategy.cli.doctor.facts.facts import Job

Check = Callable[[Job], Iterator[Finding]]

#: What makes sense of any job, also of one whose ranks did not meet.
ALWAYS: tuple[Check, ...] = (launch.launch, launch.pmi)
#: What makes sense of one rank.
ALONE: tuple[Check, ...] = (mpi.versions, mpi.library)
#: What needs the facts of all ranks.
TOGETHER: tuple[Check, ...] = (
    mpi.thread_level,
    node.nodes,
    launch.local_rank,
    node.cores,
    node.shared_memory,
    gpu.gpus,
    gpu.peer_access,
    gpu.cuda_aware,
    mpi.start,
    speed.sums,
    speed.speed,
    speed.links,
    speed.clock,
    mpi.leftovers,
)


def examine(job: Job) -> list[Finding]:
    """Return what all checks say of a job."""
    checks = ALWAYS
    if not job.missing:
        checks += ALONE if job.facts[0].refusal else (*ALONE, *TOGETHER)
    return [finding for check in checks for finding in check(job)]
