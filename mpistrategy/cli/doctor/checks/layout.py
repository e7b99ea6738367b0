"""Who is on which node: ranks of one host that share no memory, and nodes with fewer or more ranks than the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding, count
from mpistrategy.cli.doctor.facts.facts import Facts, Job
from mpistrategy.objects.shown import ranks_in_words


def nodes(job: Job) -> Iterator[Finding]:
    """Find ranks of one host that share no memory, and nodes with fewer or more ranks than the others."""
    by_host = _parts_of_hosts(job)
    torn = {host: parts for host, parts in by_host.items() if len(parts) > 1}
    if torn and is_arbitrary(job):
        yield _without_a_map(job, by_host, torn)
        return
    for host, parts in torn.items():
        shown = " and ".join(ranks_in_words([each.rank for each in part]) for part in parts[:4])
        yield Finding(
            "nodes",
            BAD,
            f"{shown} are all on {host}, but share no memory: they would talk through the network",
            "Start one container for all ranks of a node, or let them share: docker run --ipc=host, "
            "apptainer without --containall; and a host name of its own for every node",
            tuple(each.rank for part in parts for each in part),
        )
    if torn:
        return
    groups = job.nodes
    sizes = Counter(len(ranks) for ranks in groups.values())
    usual = max(sizes, key=lambda size: (sizes[size] * size, size))  # where most ranks are
    odd = [ranks for ranks in groups.values() if len(ranks) != usual]
    if odd:
        first = odd[0]
        yield Finding(
            "nodes",
            NOTE,
            f"{count(len(first), 'rank')} on {first[0].host} ({ranks_in_words([each.rank for each in first])}), "
            f"{usual} on {'others' if len(groups) > 2 else 'the other'}: steps take as long as on the fullest",
            _evenly(job, len(groups)),
            tuple(each.rank for ranks in odd for each in ranks),
        )
        return
    names = ", ".join(list(by_host)[:4]) + (f" and {len(by_host) - 4} more" if len(by_host) > 4 else "")
    each = " on each" if len(groups) > 1 else ""
    yield Finding("nodes", OK, f"{count(len(groups), 'node')} ({names}), {count(usual, 'rank')}{each}")


def is_arbitrary(job: Job) -> bool:
    """Return whether a list of hosts placed the ranks: ``srun --distribution=arbitrary``."""
    return job.facts[0].distribution.startswith("arbitrary")


def has_torn_hosts(job: Job) -> bool:
    """Return whether ranks of one host share no memory."""
    return any(len(parts) > 1 for parts in _parts_of_hosts(job).values())


def _parts_of_hosts(job: Job) -> dict[str, list[list[Facts]]]:
    found: dict[str, list[list[Facts]]] = {}
    for ranks in job.nodes.values():
        found.setdefault(ranks[0].host, []).append(ranks)
    return found


def _without_a_map(job: Job, by_host: dict[str, list[list[Facts]]], torn: dict[str, list[list[Facts]]]) -> Finding:
    """Slurm's PMI-2 tells MPICH no map of ranks to nodes where a list of hosts places them."""
    host, parts = next(iter(torn.items()))
    ranks = [each.rank for part in parts for each in part]
    return Finding(
        "nodes",
        BAD,
        f"{ranks_in_words(ranks)} are all on {host}, but {job.facts[0].library} takes them for ranks of "
        f"{len(parts)} nodes: srun --distribution=arbitrary tells it no map of the ranks",
        f"{_evenly(job, len(by_host))}. If you need the list of hosts: mpiexec -n {len(job.facts)} -f HOSTFILE in the "
        "batch script",
        tuple(each.rank for parts in torn.values() for part in parts for each in part),
    )


def _evenly(job: Job, nodes: int) -> str:
    """Return how to start no fewer ranks so that each node has as many."""
    total = len(job.facts)
    cores = min(each.machine_cores for each in job.facts)
    even = [number for number in range(1, total + 1) if total % number == 0]
    fitting = [number for number in even if number <= nodes and total // number <= cores]
    more = next(number for number in even if number >= nodes)
    if fitting or more <= 2 * nodes:
        nodes = fitting[-1] if fitting else more
        said = f"Evenly, the same {total} ranks: "
    else:
        total = -(-total // nodes) * nodes
        said = f"{len(job.facts)} ranks fit evenly on no such number of nodes; {total} do: "
    each = total // nodes
    lines = (
        f"srun --nodes={nodes} --ntasks={total} --ntasks-per-node={each} (Open MPI: --map-by ppr:{each}:node; MPICH: "
        f"-ppn {each})"
    )
    if is_arbitrary(job):
        lines = (
            f"unset SLURM_HOSTFILE SLURM_DISTRIBUTION; srun --distribution=block --nodes={nodes} --ntasks={total} "
            f"--ntasks-per-node={each}"
        )
    return said + lines
