"""What a node gives its ranks: cores, memory to share, a network to other nodes."""

from __future__ import annotations

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, VERDICTS, Facts, Finding, Job, count, finding_of
from mpistrategy.objects.shown import size_in_words

#: What each rank of Open MPI takes in /dev/shm.
_OPEN_MPI_BYTES = 16 * 2**20
#: What the ranks of a node share in addition for large sums between nodes: per rank, and together at most.
_LARGE_BYTES, _MOST_LARGE_BYTES = 2**24, 2**27


def cores(job: Job) -> list[Finding]:
    """Find more threads than cores, and ranks that were all put on the same few cores."""
    findings = [_cores_of(ranks) for ranks in job.nodes.values()]
    return [max(findings, key=lambda finding: VERDICTS.index(finding.verdict))]


def _cores_of(ranks: list[Facts]) -> Finding:
    threads = sum(rank["threads"] for rank in ranks)
    available = len({core for rank in ranks for core in rank["cores"]}) or 1
    verdict, found, fix = OK, "{many}, {threads_of} ({threads_source}) on {node_cores}", ""
    if available < min(len(ranks), ranks[0]["machine_cores"]):
        verdict, found = BAD, "{many} share {node_cores}, which has {machine_cores}"
        fix = (
            "Give each its own: srun --cpu-bind=cores --cpus-per-task=N; mpiexec --bind-to none (MPICH: -bind-to none)"
        )
    elif threads > max(available, len(ranks)):
        verdict, found = BAD, "{threads_of} of linear algebra on {node_cores}: {many} ({threads_source})"
        fix = f"export OMP_NUM_THREADS={max(1, available // len(ranks))}"
    elif len(ranks) > available:
        verdict, found = NOTE, "{many} on {node_cores}: they take turns"
        fix = f"Start at most {available} ranks on a node, or ask for more cores: --cpus-per-task"
    words = {"many": count(len(ranks), "rank"), "threads_of": count(threads, "thread")}
    words["threads_source"] = max(ranks, key=lambda rank: int(rank["threads"]))["threads_source"]
    node_cores = f"{count(available, 'core')} on {ranks[0]['host']}"
    return finding_of("cores", verdict, ranks, found, fix, node_cores=node_cores, **words)


def shared_memory(job: Job) -> list[Finding]:
    """Find too little shared memory for the ranks of a node."""
    shared_nodes = [ranks for ranks in job.nodes.values() if len(ranks) > 1]
    if not shared_nodes:
        return [Finding("shared memory", OK, "one rank on each node: nothing to share")]
    for ranks in shared_nodes:
        if ranks[0]["library"].startswith("Open MPI") and 0 <= ranks[0]["shm_free"] < _OPEN_MPI_BYTES:
            problem = (
                "{free} are free in /dev/shm on {host}, and {library} wants 16 MiB for each rank: its own calls go by "
                "TCP in the node, far slower, or end the job"
            )
            fix = (
                "Give a container more: docker run --shm-size=1g, or --ipc=host; or another folder: export "
                "OMPI_MCA_btl_sm_backing_directory=/tmp"
            )
            return [finding_of("shared memory", BAD, ranks, problem, fix, free=size_in_words(ranks[0]["shm_free"]))]
    return [_room(min(shared_nodes, key=lambda ranks: int(ranks[0]["room_free"])), len(job.nodes) > 1)]


def _room(ranks: list[Facts], has_others: bool) -> Finding:
    """Return whether a node has room for this library's shared memory."""
    from mpistrategy.mpi.shared_memory.node_sum import bytes_for  # here, since the doctor starts quickly
    from mpistrategy.mpi.tuning.thresholds import DEFAULT
    from mpistrategy.mpi.watchdog import status_board

    size, free = len(ranks), ranks[0]["room_free"]
    needed = size * (status_board.BYTES + bytes_for(size, DEFAULT))
    large = min(size * _LARGE_BYTES, _MOST_LARGE_BYTES) if has_others else 0
    verdict, fix = OK, ""
    text = "{free} are free ({room_of}) on {host}; the strategies of {size} ranks share {needed}"
    if ranks[0]["room_of"] and free < max(2 * needed, needed + large):
        verdict = NOTE
        text += ": there is no room, or too little for large arrays, and they go through MPI, slower"
        fix = "Ask for more: srun --mem=16G; docker run --memory=16g; if it names /dev/shm: docker run --shm-size=8g"
    sizes = {"free": size_in_words(free), "needed": size_in_words(needed + large)}
    return finding_of("shared memory", verdict, ranks, text, fix, size=size, **sizes)


def network(job: Job) -> list[Finding]:
    """Find TCP where there is a faster network, and an MPI that knows no other."""
    if len(job.nodes) == 1:
        return [Finding("network", OK, "none: one node")]
    fabric = next((rank["fabric"] for rank in job.facts if rank["fabric"]), "")
    text = "between nodes {library} talks by {network}".format_map(job.facts[0])
    if job.facts[0]["network"] == "TCP" and fabric:
        fix = (
            "Unset variables that choose a network (FI_PROVIDER, UCX_TLS, OMPI_MCA_btl, ...). The cluster's own MPI "
            "knows its network: load its module and name it, export MPI4PY_LIBMPI=/path/to/its/libmpi.so "
            "(mpistrategy guide mpi)"
        )
        return [Finding("network", BAD, f"{text}, beside {fabric}", fix)]
    return [Finding("network", OK, text)]


def leftovers(job: Job) -> list[Finding]:
    """Find what killed jobs have left on a node: memory that nobody else can have; folders that keep mpiexec off."""
    text = (
        "{leftovers} on {host}, of jobs of yours that were killed; no running job uses them. Where ompi.* is among "
        "them, an mpiexec that gets the number of such a job does not start"
    )
    fix = "On {host}: mpistrategy doctor --remove-leftovers"
    groups = [[rank for rank in ranks if rank["leftovers"]] for ranks in job.nodes.values()]
    return [finding_of("leftovers", NOTE, ranks, text, fix) for ranks in groups if ranks]
