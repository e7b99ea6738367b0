"""The table of all checks, in the order of the report.

To add a check, write a function from `Job` to a list of findings in the file of its subject, and name it here.
"""

from __future__ import annotations

from collections.abc import Callable

from mpistrategy.cli.doctor.checks import gpu, launch, node
from mpistrategy.cli.doctor.findings import Finding, Job

Check = Callable[[Job], list[Finding]]

#: For jobs whose ranks all answered, also where the library refuses to start.
ALONE: tuple[Check, ...] = (launch.launch, launch.versions, launch.library)
#: For jobs that the library can start on.
TOGETHER: tuple[Check, ...] = (
    launch.thread_level,
    launch.nodes,
    node.cores,
    node.shared_memory,
    gpu.gpus,
    gpu.cuda_aware,
    node.network,
    launch.sums,
    node.leftovers,
)


def examine(job: Job) -> list[Finding]:
    """Return the findings of all checks."""
    if job.missing:
        return launch.launch(job)
    checks = ALONE if job.facts[0]["refusal"] else (*ALONE, *TOGETHER)
    return [finding for check in checks for finding in check(job)]
