"""What a node gives its ranks: cores, memory to share, a network to other nodes, a file system that is quick."""

from __future__ import annotations

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, Facts, Finding, Job, count, finding_of, mebibytes

#: What each rank of Open MPI takes in /dev/shm.
_OPEN_MPI_BYTES = 16 * 2**20
#: What the ranks of a node share in addition for large sums between nodes: per rank, and together at most.
_LARGE_BYTES, _MOST_LARGE_BYTES = 2**24, 2**27
_SLOW_SECONDS = 5.0


def cores(job: Job) -> list[Finding]:
    """Find more threads than cores, and ranks that were all put on the same few cores."""
    findings = [_cores_of(ranks) for ranks in job.nodes.values()]
    return [max(findings, key=lambda finding: (finding.verdict == BAD, finding.verdict == NOTE))]


def _cores_of(ranks: list[Facts]) -> Finding:
    many, threads = count(len(ranks), "rank"), sum(rank["threads"] for rank in ranks)
    available = len({core for rank in ranks for core in rank["cores"]}) or 1
    node_cores = f"{count(available, 'core')} on {ranks[0]['host']}"
    if available < min(len(ranks), ranks[0]["machine_cores"]):
        fix = (
            "Give each its own: srun --cpu-bind=cores --cpus-per-task=N; mpiexec --bind-to none (Open MPI), "
            "-bind-to none (MPICH)"
        )
        return finding_of(
            "cores",
            BAD,
            ranks,
            "{many} share {node_cores}, which has {machine_cores}",
            fix,
            many=many,
            node_cores=node_cores,
        )
    if threads > max(available, len(ranks)):
        most = "{threads} each ({threads_source})".format_map(max(ranks, key=lambda rank: int(rank["threads"])))
        problem = f"{threads} threads of linear algebra on {node_cores}: {many} with up to {most}"
        return finding_of("cores", BAD, ranks, problem, f"export OMP_NUM_THREADS={max(1, available // len(ranks))}")
    if len(ranks) > available:
        fix = f"Start at most {available} ranks on a node, or ask for more cores: --cpus-per-task"
        return finding_of("cores", NOTE, ranks, f"{many} on {node_cores}: they take turns", fix)
    threads_of = f"{count(threads, 'thread')} ({ranks[0]['threads_source']})"
    return Finding("cores", OK, f"{many}, {threads_of} on {node_cores}")


def shared_memory(job: Job) -> list[Finding]:
    """Find too little shared memory for the ranks of a node."""
    shared_nodes = [ranks for ranks in job.nodes.values() if len(ranks) > 1]
    if not shared_nodes:
        return [Finding("shared memory", OK, "one rank on each node: nothing to share")]
    tightest = min(shared_nodes, key=lambda ranks: int(ranks[0]["room_free"]))
    room = _room(tightest, len(job.nodes) > 1)
    of_open_mpi = [rank for ranks in shared_nodes for rank in ranks if rank["library"].startswith("Open MPI")]
    short = [rank for rank in of_open_mpi if 0 <= rank["shm_free"] < _OPEN_MPI_BYTES]
    if not short:
        return [room]
    node_ranks = [rank for rank in short if rank["leader"] == short[0]["leader"]]
    problem = (
        "{free} are free in /dev/shm on {host}, and {library} wants 16 MiB for each rank: its own calls go by TCP in "
        "the node, far slower, or end the job"
    )
    fix = (
        "Give a container more: docker run --shm-size=1g, or --ipc=host; or another folder: export "
        "OMPI_MCA_btl_sm_backing_directory=/tmp"
    )
    bad = finding_of("shared memory", BAD, node_ranks, problem, fix, free=mebibytes(short[0]["shm_free"]))
    return [bad] if room.verdict == OK else [bad, room]


def _room(ranks: list[Facts], has_others: bool) -> Finding:
    """Return whether a node has room for this library's shared memory."""
    size, free = len(ranks), ranks[0]["room_free"]
    needed = size * _bytes_of_a_rank(size)
    large = min(size * _LARGE_BYTES, _MOST_LARGE_BYTES) if has_others else 0
    text = (
        "{free} are free ({room_of}) on {host}; the strategies of {size} ranks share {needed} each, {large} more for "
    )
    text += "large sums between nodes"
    fix = ""
    if not ranks[0]["room_of"] or free >= max(2 * needed, needed + large):
        verdict = OK
    else:
        verdict = BAD if free < needed else NOTE
        text += ": there is no room, or too little for large arrays, and they go through MPI, slower"
        fix = "Ask for more: srun --mem=16G; docker run --memory=16g; if it names /dev/shm: docker run --shm-size=8g"
    sizes = {"free": mebibytes(free), "needed": mebibytes(needed), "large": mebibytes(large)}
    return finding_of("shared memory", verdict, ranks, text, fix, size=size, **sizes)


def _bytes_of_a_rank(ranks: int) -> int:
    """Return what each of the ranks of a node shares for a strategy."""
    from mpistrategy.mpi.shared_memory.node_sum import bytes_for  # here, since the doctor starts quickly
    from mpistrategy.mpi.tuning.thresholds import DEFAULT
    from mpistrategy.mpi.watchdog import status_board

    return status_board.BYTES + bytes_for(ranks, DEFAULT)


def network(job: Job) -> list[Finding]:
    """Find TCP where there is a faster network, and an MPI that knows no other."""
    first = job.facts[0]
    if len(job.nodes) == 1:
        return [Finding("network", OK, "none: one node")]
    fabric = next((rank["fabric"] for rank in job.facts if rank["fabric"]), "")
    text = "between nodes {library} talks by {network}".format_map(first)
    if first["network"] == "TCP" and fabric:
        fix = (
            "Unset variables that choose a network (FI_PROVIDER, UCX_TLS, OMPI_MCA_btl, ...). The cluster's own MPI "
            "knows its network: load its module and name it, export MPI4PY_LIBMPI=/path/to/its/libmpi.so "
            "(mpistrategy guide mpi)"
        )
        return [Finding("network", BAD, f"{text}, beside {fabric}", fix)]
    return [Finding("network", OK, text)]


def start(job: Job) -> list[Finding]:
    """Find imports that take long."""
    slowest = max(job.facts, key=lambda rank: float(rank["start_seconds"]))
    text = "imports took {start_seconds:.1f} s on rank {rank} ({host}), MPI {mpi_seconds:.1f} s; from {home}"
    if slowest["start_seconds"] < _SLOW_SECONDS:
        return [Finding("start", OK, text.format_map(slowest))]
    fix = (
        "Is that a shared file system (findmnt -T {home})? Copy the environment to the nodes' own disks first: "
        "mpistrategy slurm staged_env; or use a container. On a local disk: is the node busy?"
    )
    return [finding_of("start", NOTE, [slowest], text, fix)]


def leftovers(job: Job) -> list[Finding]:
    """Find what killed jobs have left on a node: memory that nobody else can have; folders that keep mpiexec off."""
    text = (
        "{leftovers} on {host}, of jobs of yours that were killed; no running job uses them. Where ompi.* is among "
        "them, an mpiexec that gets the number of such a job does not start"
    )
    fix = "On {host}: mpistrategy doctor --remove-leftovers"
    groups = [[rank for rank in ranks if rank["leftovers"]] for ranks in job.nodes.values()]
    return [finding_of("leftovers", NOTE, ranks, text, fix) for ranks in groups if ranks]
