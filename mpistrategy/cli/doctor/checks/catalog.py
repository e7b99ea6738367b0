"""The table of all checks, in the order of the report.

To add a check, write a function from `Job` to findings in the file of its subject, and name it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpistrategy.cli.doctor.checks import gpu, launch, layout, mpi, network, node
from mpistrategy.cli.doctor.checks.finding import Finding
from mpistrategy.cli.doctor.facts.facts import Job

Check = Callable[[Job], Iterator[Finding]]

#: For every job, also where ranks are missing.
ALWAYS: tuple[Check, ...] = (launch.launch, launch.pmi)
#: For jobs whose ranks all answered, also where the library refuses to start.
ALONE: tuple[Check, ...] = (mpi.versions, mpi.library)
#: For jobs that the library can start on.
TOGETHER: tuple[Check, ...] = (
    mpi.thread_level,
    layout.nodes,
    launch.local_rank,
    node.cores,
    node.shared_memory,
    gpu.gpus,
    gpu.cuda_aware,
    gpu.network,
    network.network,
    mpi.start,
    mpi.sums,
    mpi.leftovers,
)


def examine(job: Job) -> list[Finding]:
    """Return the findings of all checks."""
    checks = ALWAYS
    if not job.missing:
        checks += ALONE if job.facts[0].refusal else (*ALONE, *TOGETHER)
    return [finding for check in checks for finding in check(job)]
