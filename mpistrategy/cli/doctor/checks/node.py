"""What a node gives its ranks: cores, memory to share, a network to other nodes, a file system that is quick."""

from __future__ import annotations

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, Facts, Finding, Job, count, mebibytes, told

#: What each rank of Open MPI takes in /dev/shm.
_OPEN_MPI_BYTES = 16 * 2**20
#: What the ranks of a node share besides for large sums between nodes: each, and together at most.
_LARGE_BYTES, _MOST_LARGE_BYTES = 2**24, 2**27
_SLOW_SECONDS = 5.0


def cores(job: Job) -> list[Finding]:
    """Find more threads than cores, and ranks that were all put on the same few cores."""
    findings = [_cores_of(ranks) for ranks in job.nodes.values()]
    return [max(findings, key=lambda each: (each.verdict == BAD, each.verdict == NOTE))]


def _cores_of(ranks: list[Facts]) -> Finding:
    many, threads = count(len(ranks), "rank"), sum(each["threads"] for each in ranks)
    available = len({core for each in ranks for core in each["cores"]}) or 1
    there = f"{count(available, 'core')} on {ranks[0]['host']}"
    if available < min(len(ranks), ranks[0]["machine_cores"]):
        fix = (
            "Give each its own: srun --cpu-bind=cores --cpus-per-task=N; mpiexec --bind-to none (Open MPI), "
            "-bind-to none (MPICH)"
        )
        return told("cores", BAD, ranks, "{many} share {there}, which has {machine_cores}", fix, many=many, there=there)
    if threads > max(available, len(ranks)):
        each = "{threads} each ({threads_source})".format_map(max(ranks, key=lambda each: int(each["threads"])))
        found = f"{threads} threads of linear algebra on {there}: {many} with up to {each}"
        return told("cores", BAD, ranks, found, f"export OMP_NUM_THREADS={max(1, available // len(ranks))}")
    if len(ranks) > available:
        fix = f"Start at most {available} ranks on a node, or ask for more cores: --cpus-per-task"
        return told("cores", NOTE, ranks, f"{many} on {there}: they take turns", fix)
    threads_of = f"{count(threads, 'thread')} ({ranks[0]['threads_source']})"
    return Finding("cores", OK, f"{many}, {threads_of} on {there}")


def shared_memory(job: Job) -> list[Finding]:
    """Find too little memory for what the ranks of a node share."""
    several = [ranks for ranks in job.nodes.values() if len(ranks) > 1]
    if not several:
        return [Finding("shared memory", OK, "one rank on each node: nothing to share")]
    tightest = min(several, key=lambda ranks: int(ranks[0]["room_free"]))
    room = _room(tightest, len(job.nodes) > 1)
    of_open_mpi = [each for ranks in several for each in ranks if each["library"].startswith("Open MPI")]
    short = [each for each in of_open_mpi if 0 <= each["shm_free"] < _OPEN_MPI_BYTES]
    if not short:
        return [room]
    there = [each for each in short if each["leader"] == short[0]["leader"]]
    found = (
        "{free} are free in /dev/shm on {host}, and {library} wants 16 MiB for each rank: its own calls go by TCP in "
        "the node, far slower, or end the job"
    )
    fix = (
        "Give a container more: docker run --shm-size=1g, or --ipc=host; or another folder: export "
        "OMPI_MCA_btl_sm_backing_directory=/tmp"
    )
    bad = told("shared memory", BAD, there, found, fix, free=mebibytes(short[0]["shm_free"]))
    return [bad] if room.verdict == OK else [bad, room]


def _room(ranks: list[Facts], has_others: bool) -> Finding:
    """Return whether there is room for what this library shares on a node."""
    size, free = len(ranks), ranks[0]["room_free"]
    needed = size * _bytes_of_a_rank(size)
    large = min(size * _LARGE_BYTES, _MOST_LARGE_BYTES) if has_others else 0
    found = (
        "{free} are free ({room_of}) on {host}; the strategies of {size} ranks share {needed} each, {large} more for "
    )
    found += "large sums between nodes"
    fix = ""
    if not ranks[0]["room_of"] or free >= max(2 * needed, needed + large):
        verdict = OK
    else:
        verdict = BAD if free < needed else NOTE
        found += ": there is no room, or too little for large arrays, and they go through MPI, slower"
        fix = "Ask for more: srun --mem=16G; docker run --memory=16g; if it names /dev/shm: docker run --shm-size=8g"
    sizes = {"free": mebibytes(free), "needed": mebibytes(needed), "large": mebibytes(large)}
    return told("shared memory", verdict, ranks, found, fix, size=size, **sizes)


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
    fabric = next((each["fabric"] for each in job.facts if each["fabric"]), "")
    said = "between nodes {library} talks by {network}".format_map(first)
    if first["network"] == "TCP" and fabric:
        fix = (
            "Unset variables that choose a network (FI_PROVIDER, UCX_TLS, OMPI_MCA_btl, ...). The cluster's own MPI "
            "knows its network: load its module and name it, export MPI4PY_LIBMPI=/path/to/its/libmpi.so "
            "(mpistrategy guide mpi)"
        )
        return [Finding("network", BAD, f"{said}, beside {fabric}", fix)]
    return [Finding("network", OK, said)]


def start(job: Job) -> list[Finding]:
    """Find imports that take long."""
    slowest = max(job.facts, key=lambda each: float(each["start_seconds"]))
    found = "imports took {start_seconds:.1f} s on rank {rank} ({host}), MPI {mpi_seconds:.1f} s; from {home}"
    if slowest["start_seconds"] < _SLOW_SECONDS:
        return [Finding("start", OK, found.format_map(slowest))]
    fix = (
        "Is that a shared file system (findmnt -T {home})? Copy the environment to the nodes' own disks first: "
        "mpistrategy slurm staged_env; or use a container. On a local disk: is the node busy?"
    )
    return [told("start", NOTE, [slowest], found, fix)]


def leftovers(job: Job) -> list[Finding]:
    """Find what killed jobs have left on a node: memory that nobody else can have; folders that keep mpiexec off."""
    found = (
        "{leftovers} on {host}, of jobs of yours that were killed; no running job uses them. Where ompi.* is among "
        "them, an mpiexec that gets the number of such a job does not start"
    )
    fix = "On {host}: mpistrategy doctor --remove-leftovers"
    left = [[each for each in ranks if each["leftovers"]] for ranks in job.nodes.values()]
    return [told("leftovers", NOTE, ranks, found, fix) for ranks in left if ranks]
