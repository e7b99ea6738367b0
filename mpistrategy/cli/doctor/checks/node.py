"""What a node gives its ranks: cores, memory to share, a network to other nodes, a file system that is quick."""

from __future__ import annotations

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, Facts, Finding, Job, count, mebibytes, ranks_of

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
    first, members, name = ranks[0], tuple(ranks_of(ranks)), "cores"
    available = len({core for each in ranks for core in each["cores"]}) or 1
    threads, many = sum(each["threads"] for each in ranks), count(len(ranks), "rank")
    there = f"{count(available, 'core')} on {first['host']}"
    if available < min(len(ranks), first["machine_cores"]):
        fix = (
            "Give each its own: srun --cpu-bind=cores --cpus-per-task=N; mpiexec --bind-to none (Open MPI), "
            "-bind-to none (MPICH)"
        )
        return Finding(name, BAD, f"{many} share {there}, which has {first['machine_cores']}", fix, members)
    if threads > max(available, len(ranks)):
        most = max(ranks, key=lambda each: int(each["threads"]))
        found = (
            f"{threads} threads of linear algebra on {there}: {many} with up to {most['threads']} each "
            f"({most['threads_source']})"
        )
        return Finding(name, BAD, found, f"export OMP_NUM_THREADS={max(1, available // len(ranks))}", members)
    if len(ranks) > available:
        fix = f"Start at most {available} ranks on a node, or ask for more cores: --cpus-per-task"
        return Finding(name, NOTE, f"{many} on {there}: they take turns", fix, members)
    return Finding(name, OK, f"{many}, {count(threads, 'thread')} ({first['threads_source']}) on {there}")


def shared_memory(job: Job) -> list[Finding]:
    """Find too little memory for what the ranks of a node share."""
    several = [ranks for ranks in job.nodes.values() if len(ranks) > 1]
    if not several:
        return [Finding("shared memory", OK, "one rank on each node: nothing to share")]
    findings = []
    for ranks in several:
        first = ranks[0]
        if first["library"].startswith("Open MPI") and 0 <= first["shm_free"] < _OPEN_MPI_BYTES:
            found = (
                f"{mebibytes(first['shm_free'])} are free in /dev/shm on {first['host']}, and {first['library']} "
                "wants 16 MiB for each rank: its own calls go by TCP within the node, far slower, or end the job"
            )
            fix = (
                "Give a container more: docker run --shm-size=1g, or --ipc=host; or another folder: export "
                "OMPI_MCA_btl_sm_backing_directory=/tmp"
            )
            findings.append(Finding("shared memory", BAD, found, fix, tuple(ranks_of(ranks))))
            break
    tightest = min(several, key=lambda ranks: int(ranks[0]["room_free"]))
    return [*findings, *_room(tightest, len(job.nodes) > 1, bool(findings))]


def _room(ranks: list[Facts], has_others: bool, is_told: bool) -> list[Finding]:
    """Return whether there is room for what this library shares on a node; nothing if that is well and `is_told`."""
    first, size, free = ranks[0], len(ranks), ranks[0]["room_free"]
    needed = size * _bytes_of_a_rank(size)
    large = min(size * _LARGE_BYTES, _MOST_LARGE_BYTES) if has_others else 0
    found = (
        f"{mebibytes(free)} are free ({first['room_of'] or 'unknown'}) on {first['host']}; {size} ranks share "
        f"{mebibytes(needed)} for each strategy"
    )
    if large:
        found += f", and {mebibytes(large)} more from the first large sum between nodes on"
    if not first["room_of"] or free >= max(2 * needed, needed + large):
        return [] if is_told else [Finding("shared memory", OK, found)]
    if free < needed:
        verdict, so = BAD, "there is no room, and everything goes through MPI, slower"
    else:
        verdict, so = NOTE, "less than half of it, or too little for large sums, would stay free: they may be slower"
    fix = "Ask for more: srun --mem=16G; docker run --memory=16g; if it names /dev/shm: docker run --shm-size=8g"
    return [Finding("shared memory", verdict, f"{found}: {so}", fix, tuple(ranks_of(ranks)))]


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
        return [Finding("network", OK, "none: one node")] if first["size"] > 1 else []
    said = f"between nodes {first['library']} talks by {first['network'] or 'a network that cannot be seen'}"
    fabric = next((each["fabric"] for each in job.facts if each["fabric"]), "")
    if first["network"] == "TCP" and fabric:
        fix = (
            "Unset variables that choose a network (FI_PROVIDER, UCX_TLS, OMPI_MCA_btl, ...). The cluster's own MPI "
            "knows its network: load its module and name it, export MPI4PY_LIBMPI=/path/to/its/libmpi.so "
        )
        return [Finding("network", BAD, f"{said}, beside {fabric}", f"{fix}(mpistrategy guide mpi)")]
    return [Finding("network", OK, said)]


def start(job: Job) -> list[Finding]:
    """Find imports that take long."""
    slowest = max(job.facts, key=lambda each: float(each["start_seconds"]))
    took = "imports took {start_seconds:.1f} s on rank {rank} ({host}), MPI {mpi_seconds:.1f} s; from {home}"
    if slowest["start_seconds"] < _SLOW_SECONDS:
        return [Finding("start", OK, took.format_map(slowest))]
    fix = (
        f"Is that a shared file system (findmnt -T {slowest['home']})? Copy the environment to the nodes' own disks "
        "first: mpistrategy slurm staged_env; or use a container. On a local disk: is the node busy?"
    )
    return [Finding("start", NOTE, took.format_map(slowest), fix, (slowest["rank"],))]


def leftovers(job: Job) -> list[Finding]:
    """Find what killed jobs have left on a node: memory that nobody else can have; folders that keep mpiexec off."""
    findings = []
    for ranks in job.nodes.values():
        left = next((each["leftovers"] for each in ranks if each["leftovers"]), "")
        if left:
            host = ranks[0]["host"]
            found = (
                f"{left} on {host}, of jobs of yours that were killed; no running job uses them. Where ompi.* is "
                "among them, an mpiexec that gets the number of such a job does not start"
            )
            fix = f"On {host}: mpistrategy doctor --remove-leftovers"
            findings.append(Finding("leftovers", NOTE, found, fix, tuple(ranks_of(ranks))))
    return findings
