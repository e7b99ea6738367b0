"""Who is on which node: ranks of one host that share no memory, and nodes with fewer or more ranks than the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding, count
from mpistrategy.cli.doctor.checks.launch_lines import line
from mpistrategy.cli.doctor.facts.facts import Facts, Job
from mpistrategy.objects.shown import ranks_in_words


def nodes(job: Job) -> Iterator[Finding]:
    """Find ranks of one host that share no memory, and nodes with fewer or more ranks than the others."""
    by_host: dict[str, list[list[Facts]]] = {}
    for ranks in job.nodes.values():
        by_host.setdefault(ranks[0].host, []).append(ranks)
    torn = {host: parts for host, parts in by_host.items() if len(parts) > 1}
    for host, parts in torn.items():
        shown = " and ".join(ranks_in_words([each.rank for each in part]) for part in parts[:4])
        yield Finding(
            "nodes",
            BAD,
            f"{shown} are all on {host}, but share no memory: they would talk through the network",
            "Start one container for all ranks of a node, or let them share: docker run --ipc=host, "
            "apptainer without --containall; and a host name of its own for every node. After srun "
            "--distribution=arbitrary, MPICH knows no map of the ranks: use --distribution=block",
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
            f"Ask for as many on each: {line(first[0].launcher, 'evenly', each=-(-len(job.facts) // len(groups)))}",
            tuple(each.rank for ranks in odd for each in ranks),
        )
        return
    names = ", ".join(list(by_host)[:4]) + (f" and {len(by_host) - 4} more" if len(by_host) > 4 else "")
    each = " on each" if len(groups) > 1 else ""
    yield Finding("nodes", OK, f"{count(len(groups), 'node')} ({names}), {count(usual, 'rank')}{each}")
