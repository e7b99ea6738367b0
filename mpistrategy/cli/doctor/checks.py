"""The checks of the doctor: each is a function from a `Job`, the known facts, to findings.

To add a check, write one, and name it in `ALONE` or `TOGETHER`.
"""

from __future__ import annotations

import os
import re

from mpistrategy.cli.doctor.findings import (
    BAD,
    NOTE,
    OK,
    VERDICTS,
    Facts,
    Finding,
    Job,
    by,
    count,
    finding_of,
    parts_of,
    ranks_of,
)
from mpistrategy.errors import DeviceError
from mpistrategy.mpi.gpu.cuda_aware import VARIABLE
from mpistrategy.mpi.gpu.device_selection import Sight, bind
from mpistrategy.objects.shown import ranks_in_words, size_in_words

#: The command of a launcher for so many ranks; other launchers as srun.
_LINES = {"": "srun --ntasks={0}, mpiexec -n {0}", "jsrun": "jsrun -n {0} -a 1", "flux run": "flux run -n {0}"}
_PARTS = {name: name for name in ("python", "mpistrategy", "numpy", "mpi4py")} | {"library": "the MPI library"}
#: What each rank of Open MPI takes in /dev/shm.
_OPEN_MPI_BYTES = 16 * 2**20
#: What the ranks of a node share in addition for large sums between nodes: per rank, and together at most.
_LARGE_BYTES, _MOST_LARGE_BYTES = 2**24, 2**27


def launch(job: Job) -> list[Finding]:
    """Find programs of one rank each, missing ranks, and a wrong number of ranks."""
    first, expected = job.facts[0], job.wanted_ranks
    if job.missing:
        problem = f"no answer from {ranks_in_words(job.missing)} of {first['size']} within {job.patience:.0f} s"
        fix = "Do they start at all? Look for their errors above, and at their nodes: srun --ntasks-per-node=1 hostname"
        return [Finding("launch", BAD, problem, fix, tuple(job.missing))]
    offered = " and ".join(first["pmi"])
    if first["refusal"]:
        problem, fix = first["refusal"]
        spoken = _kinds_of_pmi(first["library"])
        if not {*first["pmi"]} & {*spoken}:
            problem += (
                f"; it offers {offered or 'no PMI'}, and {first['library'] or 'this MPI'} speaks {' or '.join(spoken)}"
            )
        if first["launcher"] == "srun":
            fix += " For all steps: export SLURM_MPI_TYPE with that kind; srun --mpi=list shows the kinds."
        return [Finding("launch", BAD, f"{first['tasks']} programs of one rank each, not one job: {problem}", fix)]
    ranks = count(first["size"], "rank")
    if expected not in (0, first["size"]):
        fix = _LINES.get(first["launcher"], _LINES[""]).format(expected)
        return [Finding("launch", BAD, f"{ranks} where {expected} were asked for", f"Start {expected}: {fix}")]
    started = "started by {launcher} ({said})" if first["launcher"] else "started by no launcher"
    meeting = f", which offers {offered}" if offered else ""
    return [Finding("launch", OK, f"{ranks} in one job, {started.format_map(first)}{meeting}")]


def _kinds_of_pmi(library: str) -> tuple[str, ...]:
    """Return how an MPI library lets its ranks meet."""
    match = re.match(r"Open MPI v?(\d+)", library)
    if match is None:
        return ("PMI",)
    return ("PMIx",) if int(match[1]) >= 5 else ("PMIx", "PMI")


def nodes(job: Job) -> list[Finding]:
    """Find ranks of one host that share no memory."""
    hosts = by(job.facts, "host")
    for ranks in hosts.values():
        parts = list(by(ranks, "leader").values())
        if len(parts) > 1:
            problem = "{parts} are all on {host}, but share no memory: they would talk through the network"
            fix = (
                "Start one container for all ranks of a node, or let them share: docker run --ipc=host, apptainer "
                "without --containall; and a host name of its own for every node"
            )
            groups = " and ".join(ranks_in_words(ranks_of(part)) for part in parts[:4])
            return [finding_of("nodes", BAD, ranks, problem, fix, parts=groups)]
    host_texts = [f"{count(len(ranks), 'rank')} on {host}" for host, ranks in hosts.items()][:4]
    more = " ..." if len(hosts) > len(host_texts) else ""
    return [Finding("nodes", OK, f"{count(len(hosts), 'node')}: {', '.join(host_texts)}{more}")]


def versions(job: Job) -> list[Finding]:
    """Find ranks that run other versions than the rest."""
    findings = []
    for part, name in _PARTS.items():
        words, odd = job.differing(part)
        if words:
            odd_facts = [rank for rank in job.facts if rank["rank"] in odd]
            fix = (
                "Give all nodes one environment: the same venv, container or modules; on {host}: which python3; echo "
                "$PYTHONPATH"
            )
            found = "different versions of {name}: {words} ({host})"
            findings.append(finding_of("versions", BAD, odd_facts, found, fix, name=name, words=words))
    text = "Python {python}, mpistrategy {mpistrategy}, NumPy {numpy}, mpi4py {mpi4py}".format_map(job.facts[0])
    return findings or [Finding("versions", OK, text)]


def library(job: Job) -> list[Finding]:
    """Find two MPIs in one process."""
    mixed = [rank for rank in job.facts if len(set(map(os.path.dirname, rank["libraries"]))) > 1]
    if not mixed:
        return [Finding("mpi", OK, " ".join((job.facts[0]["library"], *job.facts[0]["libraries"][:1])))]
    problem = "two MPIs in one process on {these_ranks}: {paths}"
    fix = (
        "Something loads a second one (an LD_PRELOAD, another package that is linked with MPI). Find it with: "
        "LD_DEBUG=libs python3 program.py 2>&1 | grep libmpi; and build all with one MPI"
    )
    return [finding_of("mpi", BAD, mixed, problem, fix, paths=" and ".join(mixed[0]["libraries"]))]


def thread_level(job: Job) -> list[Finding]:
    """Find an MPI that several threads must not call."""
    words, odd = job.differing("thread_level")
    if words:
        fix = "Set MPI4PY_RC_THREAD_LEVEL, or mpi4py.rc.thread_level, for all ranks alike, or for none"
        return [Finding("thread level", BAD, f"the ranks started MPI differently: {words}", fix, odd)]
    level = job.facts[0]["thread_level"]
    if level == "multiple":
        return [Finding("thread level", OK, "multiple: all_reduce_async works behind the program's back")]
    lower = f"{level}: only one thread may call MPI, so that all_reduce_async overlaps with nothing"
    fix = (
        "unset MPI4PY_RC_THREAD_LEVEL, and no mpi4py.rc.thread_level or rc.threads in the program; else the library "
        "was built without: ask for one with MPI_THREAD_MULTIPLE"
    )
    if level == "single":
        against = ", and a program with threads is against the rules of MPI"
        return [Finding("thread level", BAD, lower + against, fix)]
    return [Finding("thread level", NOTE, lower, fix)]


def sums(job: Job) -> list[Finding]:
    """Find ranks that do not add up right."""
    if job.untried:
        return [Finding("sums", NOTE, f"not tried: {job.untried}", "Fix what is bad above first")]
    if job.sums_right is False:
        fix = "Do not compute with this: another MPI, or other nodes (srun --exclude=NODE); tell your cluster's support"
        return [Finding("sums", BAD, "an all-reduce of known numbers came out wrong", fix)]
    if job.sums_right is None:
        return []
    return [Finding("sums", OK, f"{job.facts[0]['size']} ranks meet and add up right")]


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


def gpus(job: Job) -> list[Finding]:
    """Find GPUs that are hidden from the ranks, ranks that would share one, and ranks that see only their own."""
    sights = [Sight.read(rank["sight"]) for rank in job.facts]
    hidden = [
        rank
        for rank, sight in zip(job.facts, sights, strict=True)
        if not sight.gpus and (rank["gpu_devices"] or (rank["gpus_promised"] and not rank["amd"]))
    ]
    if hidden:
        return [_hidden(hidden)]
    if not any(sight.gpus for sight in sights):
        amd = " that this library can use (AMD)" if any(rank["amd"] for rank in job.facts) else ""
        return [Finding("gpus", OK, f"none{amd}: the ranks work on CPUs")]
    try:
        bound = bind(sights)
    except DeviceError as error:
        return [Finding("gpus", BAD, *parts_of(error))]
    drives = [f"rank {rank} drives GPU:{n} ({sights[rank].gpus[n].name})" for rank, n in enumerate(bound[:4])]
    shown = ", ".join(drives) + (" and so on" if len(bound) > 4 else "")
    for ranks in job.nodes.values():
        views = [sights[rank["rank"]].gpus for rank in ranks]
        if max(map(len, views)) == 1 < len({gpu.name for gpus in views for gpu in gpus}):
            text = "{shown}; the ranks on {host} see only their own, so that no GPU can copy from another directly"
            fix = "Let every rank see all GPUs of its node: --gpus-per-node=N, and no --gpus-per-task or --gpu-bind"
            return [finding_of("gpus", NOTE, ranks, text, fix, shown=shown)]
    return [Finding("gpus", OK, shown)]


def _hidden(hidden: list[Facts]) -> Finding:
    first, sight = hidden[0], Sight.read(hidden[0]["sight"])
    # Where Slurm promised no GPU, the user may want CPUs.
    verdict, problem = NOTE, "{gpu_devices} GPUs are on {host}, but {these_ranks} see none: "
    if first["gpus_promised"]:
        verdict, problem = BAD, "Slurm gave the job {gpus_promised} on {host}, but {these_ranks} see none: "
    if first["visible"] in ("", "-1", "NoDevFiles"):
        fix = "unset CUDA_VISIBLE_DEVICES; in Slurm ask with --gpus-per-node=N, and start without --gpu-bind=none"
        return finding_of("gpus", verdict, hidden, problem + "CUDA_VISIBLE_DEVICES={visible!r} hides them", fix)
    fix = sight.fix or "Ask for them with --gpus-per-node=N"
    return finding_of("gpus", verdict, hidden, problem + "{reason}", fix, reason=sight.reason)


def cuda_aware(job: Job) -> list[Finding]:
    """Find an MPI that says that it takes GPU memory and does not."""
    trial, name, path = job.trial, "cuda-aware", "without NCCL arrays travel through the host (staged)"
    if not any(Sight.read(rank["sight"]).gpus for rank in job.facts):
        return [Finding(name, OK, "not applicable: no rank sees a GPU")]
    refused = next((rank["cuda_refused"] for rank in job.facts if rank["cuda_refused"]), "")
    if trial is not None and trial.outcome == "wrong":
        fix = (
            f"export {VARIABLE}=0; or load the module of an MPI that was built with CUDA (for Cray MPICH: the GTL "
            "library, and MPICH_GPU_SUPPORT_ENABLED=1)"
        )
        return [Finding(name, BAD, f"GPU memory that was given to MPI came back wrong: {trial.reason}", fix)]
    if trial is not None and trial.outcome in ("right", "slower"):
        way = path if trial.outcome == "slower" else "without NCCL arrays travel by MPI (mpi)"
        return [Finding(name, OK, f"yes, tried: {trial.reason}; {way}")]
    if refused:
        fix = "Faster with NCCL, or an MPI that was built with CUDA: ask for your cluster's module of one"
        return [Finding(name, NOTE, f"no, {refused}: {path}", fix)]
    why = (trial.reason if trial is not None else job.untried) or "one rank alone"
    return [Finding(name, NOTE, f"not tried, {why}: {path}", f"If you know it: export {VARIABLE}=1, or 0")]


#: For jobs whose ranks all answered, also where the library refuses to start.
ALONE = (launch, versions, library)
#: For jobs that the library can start on.
TOGETHER = (
    thread_level,
    nodes,
    cores,
    shared_memory,
    gpus,
    cuda_aware,
    network,
    sums,
    leftovers,
)


def examine(job: Job) -> list[Finding]:
    """Return the findings of all checks."""
    if job.missing:
        return launch(job)
    checks = ALONE if job.facts[0]["refusal"] else (*ALONE, *TOGETHER)
    return [finding for check in checks for finding in check(job)]
