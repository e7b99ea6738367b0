"""Which GPUs the ranks see, who would drive which, and whether MPI takes their memory."""

from __future__ import annotations

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, Facts, Finding, Job, finding_of, parts_of
from mpistrategy.errors import DeviceError
from mpistrategy.mpi.gpu.cuda_aware import VARIABLE
from mpistrategy.mpi.gpu.device_selection import Sight, bind


def _sight(rank: Facts) -> Sight:
    return Sight.read(rank["sight"]) if rank["sight"] else Sight(host=rank["host"])


def gpus(job: Job) -> list[Finding]:
    """Find GPUs that are hidden from the ranks, ranks that would share one, and ranks that see only their own."""
    sights = [_sight(rank) for rank in job.facts]
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
    first, sight = hidden[0], _sight(hidden[0])
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
    if not any(_sight(rank).gpus for rank in job.facts):
        return [Finding(name, OK, "not applicable: no rank sees a GPU")]
    refused = next((rank["cuda_refused"] for rank in job.facts if rank["cuda_refused"]), "")
    if trial is not None and trial.outcome == "wrong":
        fix = (
            f"export {VARIABLE}=0; or load the module of an MPI that was built with CUDA (for Cray MPICH: the GTL "
            "library, and MPICH_GPU_SUPPORT_ENABLED=1)"
        )
        return [Finding(name, BAD, f"GPU memory that was given to MPI came back wrong: {trial.reason}", fix)]
    if trial is not None and trial.outcome == "right":
        way = path if trial.is_slower else "without NCCL arrays travel by MPI (mpi)"
        return [Finding(name, OK, f"yes, tried: {trial.reason}; {way}")]
    if refused:
        fix = "Faster with NCCL, or an MPI that was built with CUDA: ask for your cluster's module of one"
        return [Finding(name, NOTE, f"no, {refused}: {path}", fix)]
    why = (trial.reason if trial is not None else job.untried) or "one rank alone"
    return [Finding(name, NOTE, f"not tried, {why}: {path}", f"If you know it: export {VARIABLE}=1, or 0")]
