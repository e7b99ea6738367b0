"""With which cores do the ranks of a node work, and with how much memory to share?"""

from __future__ import annotations

from collections.abc import Iterator

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding, count, mebibytes
from mpistrategy.cli.doctor.checks.launch_lines import line
from mpistrategy.cli.doctor.facts.facts import Facts, Job


def cores(job: Job) -> Iterator[Finding]:
    """Find more threads than cores, and ranks that were all put on the same few cores."""
    worst: Finding | None = None
    for ranks in job.nodes.values():
        found = _cores_of(ranks)
        if found is not None and (worst is None or found.verdict == BAD != worst.verdict):
            worst = found
    if worst is not None:
        yield worst
        return
    first = job.nodes[job.facts[0].leader]
    available = len({core for each in first for core in each.cores})
    threads = f", {count(first[0].threads, 'thread')} each ({first[0].threads_source})" if first[0].threads else ""
    yield Finding("cores", OK, f"{count(len(first), 'rank')} on {count(available, 'core')}{threads}")


def _cores_of(ranks: list[Facts]) -> Finding | None:
    available = len({core for each in ranks for core in each.cores}) or 1
    threads, where = sum(max(each.threads, 1) for each in ranks), f"on {ranks[0].host}"
    members = tuple(each.rank for each in ranks)
    if available < len(ranks) and available < ranks[0].machine_cores:
        return Finding(
            "cores",
            BAD,
            f"{count(len(ranks), 'rank')} {where} share {count(available, 'core')} of {ranks[0].machine_cores}",
            f"Give each its own: {line(ranks[0].launcher, 'cores')}",
            members,
        )
    if threads > available and max(each.threads for each in ranks) > 1:
        share = max(1, available // len(ranks))
        most = max(ranks, key=lambda each: each.threads)
        return Finding(
            "cores",
            BAD,
            f"{threads} threads of linear algebra on {count(available, 'core')} {where}: "
            f"{count(len(ranks), 'rank')} with up to {most.threads} each ({most.threads_source})",
            f"export OMP_NUM_THREADS={share}",
            members,
        )
    if len(ranks) > available:
        return Finding(
            "cores",
            NOTE,
            f"{len(ranks)} ranks on {count(available, 'core')} {where}: they take turns",
            f"Start at most {available} ranks on a node, or ask for more cores: "
            f"{line(ranks[0].launcher, 'more cores')}",
            members,
        )
    return None


def shared_memory(job: Job) -> Iterator[Finding]:
    """Find too little memory for what the ranks of a node share."""
    needing = [ranks for ranks in job.nodes.values() if len(ranks) > 1]
    if not needing:
        yield Finding("shared memory", OK, "one rank on each node: nothing to share")
        return
    short = node_without_room_for_mpi(job)
    if short:
        first = short[0]
        yield Finding(
            "shared memory",
            BAD,
            f"{mebibytes(first.shm_free)} are free in /dev/shm on {first.host}, and {first.library} wants 16 MiB for "
            "each rank: its own calls go by TCP within the node, far slower, or end the job",
            "Give a container more: docker run --shm-size=1g, or --ipc=host; or another folder: export "
            "OMPI_MCA_btl_sm_backing_directory=/tmp",
            tuple(each.rank for each in short),
        )
    tight: Finding | None = None
    later = _later_bytes(job)
    for ranks in needing:
        first = ranks[0]
        members = tuple(each.rank for each in ranks)
        state = f"{_room_in_words(first, later)} on {first.host}"
        if first.room_of and first.room_free < first.room_needed:
            yield Finding(
                "shared memory",
                BAD,
                f"{state}: there is no room, and everything goes through MPI, slower",
                _MORE_MEMORY,
                members,
            )
            return
        if tight is None and first.room_of and first.room_free < 2 * first.room_needed:
            tight = Finding(
                "shared memory",
                NOTE,
                f"{state}; less than half of it would stay free, so that large arrays and arenas are not shared",
                _MORE_MEMORY,
                members,
            )
        if tight is None and first.room_of and first.room_free < first.room_needed + first.local_size * later:
            tight = Finding(
                "shared memory",
                NOTE,
                f"{state}, for which there is no room: these sums would go through one rank of each node, slower",
                _MORE_MEMORY,
                members,
            )
    least = min((ranks[0] for ranks in needing), key=lambda each: each.room_free)
    if tight or not short:
        yield tight or Finding("shared memory", OK, _room_in_words(least, later))


def node_without_room_for_mpi(job: Job) -> list[Facts]:
    """Return the ranks of the first node whose /dev/shm is too small for Open MPI; none where there is room."""
    for ranks in job.nodes.values():
        first = ranks[0]
        if len(ranks) > 1 and first.library.startswith("Open MPI") and 0 <= first.shm_free < _OPEN_MPI_BYTES:
            return ranks
    return []


#: What each rank takes in /dev/shm.
_OPEN_MPI_BYTES = 16 * 2**20
_MORE_MEMORY = (
    "Ask for more: srun --mem=16G; docker run --memory=16g; if the message names /dev/shm: docker run --shm-size=8g"
)


def _later_bytes(job: Job) -> int:
    """Return what each rank of a node shares besides from the first large sum between nodes on; 0 on one node."""
    from mpistrategy.mpi.multi_node.two_level import shared_bytes  # here, since the doctor starts quickly

    leaders = list(job.nodes)
    node_of = [leaders.index(each.leader) for each in job.facts]
    return shared_bytes(node_of) if len(leaders) > 1 else 0


def _room_in_words(facts: Facts, later: int) -> str:
    known = f"{mebibytes(facts.room_free)} are free ({facts.room_of}); " if facts.room_of else ""
    text = f"{known}{facts.local_size} ranks share {mebibytes(facts.room_needed)} for each strategy"
    if later:
        from mpistrategy.mpi.multi_node.two_level import NODE_BYTES  # here, since the doctor starts quickly

        text += f", and {mebibytes(facts.local_size * later)} more from the first large sum between nodes on"
        text += f"; all_reduce_async takes up to {mebibytes(NODE_BYTES)} for itself"
    return text
