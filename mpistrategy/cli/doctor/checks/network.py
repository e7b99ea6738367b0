"""By which network do the ranks talk, and is it the fast one?"""

from __future__ import annotations

from collections.abc import Iterator

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding
from mpistrategy.cli.doctor.checks.node import node_without_room_for_mpi
from mpistrategy.cli.doctor.facts.facts import Job

_CLUSTERS_OWN = (
    "The cluster's own MPI knows its network: load its module and name it, export MPI4PY_LIBMPI=/path/to/its/libmpi.so "
    "(mpistrategy guide mpi)"
)


def network(job: Job) -> Iterator[Finding]:
    """Find TCP where there is a faster network, and an MPI that knows no other."""
    first = job.facts[0]
    if len(job.nodes) == 1:
        if first.size > 1:
            way = "by TCP within it (see shared memory)" if node_without_room_for_mpi(job) else "through its memory"
            yield Finding("network", OK, f"none: one node; {way}")
        return
    by = first.network or "a network that cannot be seen"
    said = f"between nodes {first.library} talks by {by}{f' (by {first.carrier})' * bool(first.carrier)}"
    beside = next((each.fabric for each in job.facts if each.fabric), "")
    if first.network == "TCP" and beside:
        chosen = "Unset variables that choose a network (FI_PROVIDER, UCX_TLS, OMPI_MCA_btl, ...). "
        yield Finding("network", BAD, f"{said}, beside {beside}", f"{chosen}{_CLUSTERS_OWN}")
    elif first.network == "TCP" and first.from_pip:
        yield Finding(
            "network",
            NOTE,
            f"{said}; it is pip's {first.from_pip}, which uses a fast network only where the system has its libraries. "
            "Expect of TCP 0.1 GB/s at 1 Gbit/s and 1 GB/s at 10 Gbit/s, of InfiniBand or Slingshot 10 to 25 GB/s",
            _CLUSTERS_OWN,
        )
    else:
        yield Finding("network", OK, said)
