"""Which GPUs the ranks see, who would drive which, and whether MPI takes their memory."""

from __future__ import annotations

from collections.abc import Iterator

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding, count
from mpistrategy.cli.doctor.facts import fabric
from mpistrategy.cli.doctor.facts.facts import Facts, Job
from mpistrategy.errors import DeviceError, MpiStrategyError
from mpistrategy.mpi.gpu.cuda_aware import VARIABLE
from mpistrategy.mpi.gpu.device_selection import bind
from mpistrategy.mpi.gpu.inventory import Sight
from mpistrategy.objects.shown import ranks_in_words


def gpus(job: Job) -> Iterator[Finding]:
    """Find GPUs that are hidden from the ranks, ranks that would share one, and ranks that see only their own."""
    sights = [Sight.read(each.sight) if each.sight else Sight(host=each.host) for each in job.facts]
    hidden = [each for each, sight in zip(job.facts, sights, strict=True) if _is_hidden(each, sight)]
    if hidden:
        yield _hidden(hidden, sights[job.facts.index(hidden[0])])
        return
    if not any(sight.gpus for sight in sights):
        amd = any(each.amd for each in job.facts)
        yield Finding("gpus", OK, f"none{' that this library can use (AMD)' * amd}: the ranks work on CPUs")
        return
    try:
        bound = bind(sights)
    except DeviceError as error:
        found, fix = parts_of(error)
        yield Finding("gpus", BAD, found, fix)
        return
    drives = [f"rank {rank} drives GPU:{n} ({sights[rank].gpus[n].name})" for rank, n in enumerate(bound[:4])]
    shown = ", ".join(drives) + (f" and {len(bound) - 4} more" if len(bound) > 4 else "")
    alone = [each.rank for each, sight in zip(job.facts, sights, strict=True) if _is_alone(each, sight, job, sights)]
    if alone:
        yield Finding(
            "gpus",
            NOTE,
            f"{shown}; {ranks_in_words(alone)} see{'s' if len(alone) == 1 else ''} only their own, so that no GPU can "
            "copy from another one directly",
            "Let every rank see all GPUs of its node: --gpus-per-node=N, and no --gpus-per-task or --gpu-bind",
            tuple(alone),
        )
        return
    yield Finding("gpus", OK, shown)


def _is_hidden(each: Facts, sight: Sight) -> bool:
    return not sight.gpus and (each.gpu_devices > 0 or (each.gpus_promised > 0 and not each.amd))


def _hidden(hidden: list[Facts], sight: Sight) -> Finding:
    each = hidden[0]
    there = f"{count(each.gpu_devices, 'GPU')} on {each.host}" if each.gpu_devices else ""
    told = f"Slurm gave the job {each.gpus_promised} on {each.host}" if each.gpus_promised else ""
    found = f"{' and '.join(filter(None, (told, there)))}, but {ranks_in_words([one.rank for one in hidden])} "
    found += f"{'see' if len(hidden) > 1 else 'sees'} none"
    if each.visible in ("", "-1", "NoDevFiles"):
        fix = "unset CUDA_VISIBLE_DEVICES; in Slurm ask with --gpus-per-node=N, and start without --gpu-bind=none"
        found += f": CUDA_VISIBLE_DEVICES={each.visible!r} hides them"
    else:
        fix = sight.fix or "Ask for them with --gpus-per-node=N"
        found += f": {sight.reason}" if sight.reason else ""
    # Where Slurm promised no GPU, the user may want CPUs.
    verdict = BAD if each.gpus_promised else NOTE
    return Finding("gpus", verdict, found, fix, tuple(one.rank for one in hidden))


def _is_alone(each: Facts, sight: Sight, job: Job, sights: list[Sight]) -> bool:
    """Return whether a rank sees one GPU, and another rank of its node another one."""
    others = [other for one, other in zip(job.facts, sights, strict=True) if one.leader == each.leader]
    return len(sight.gpus) == 1 and len({gpu.name for other in others for gpu in other.gpus}) > 1


def cuda_aware(job: Job) -> Iterator[Finding]:
    """Find an MPI that says that it takes GPU memory and does not."""
    if not _sees_gpus(job):
        yield Finding("cuda-aware", OK, "not applicable: no rank sees a GPU")
        return
    trial, path = job.trial, "without NCCL arrays travel through the host (staged)"
    refused = next((each.cuda_refused for each in job.facts if each.cuda_refused), "")
    if trial is not None and trial.outcome == "wrong":
        yield Finding(
            "cuda-aware",
            BAD,
            f"GPU memory that was given to MPI came back wrong: {trial.reason}",
            f"export {VARIABLE}=0; or load the module of an MPI that was built with CUDA (for Cray MPICH: the GTL "
            "library, and MPICH_GPU_SUPPORT_ENABLED=1)",
        )
    elif trial is not None and trial.outcome == "right":
        found = path if trial.is_slower else "without NCCL arrays travel by MPI (mpi)"
        yield Finding("cuda-aware", OK, f"yes, tried: {trial.reason}; {found}")
    elif refused:
        cure = "Faster with NCCL, or an MPI that was built with CUDA: ask for your cluster's module of one"
        yield Finding("cuda-aware", NOTE, f"no, {refused}: {path}", cure)
    else:
        why = "one rank alone" if trial is None else trial.reason
        yield Finding("cuda-aware", NOTE, f"not tried, {why}: {path}", f"If you know it: export {VARIABLE}=1, or 0")


def _sees_gpus(job: Job) -> bool:
    return any(Sight.read(each.sight).gpus for each in job.facts if each.sight)


def network(job: Job) -> Iterator[Finding]:
    """Find a fast network that NCCL needs a plugin for, and has none."""
    if len(job.nodes) < 2 or not _sees_gpus(job):
        return
    there = sorted({each.fabric for each in job.facts} - {""})
    name = there[0] if there else ""
    if name in fabric.BY_PLUGIN and (
        without := [each.rank for each in job.facts if each.fabric == name and not each.has_net_plugin]
    ):
        found = f"{name} is here, and NCCL has no plugin for it: it would talk between nodes through sockets"
        yield Finding("nccl", NOTE, found, fabric.CURE, tuple(without))
    elif name:
        plugin = ", by a plugin" if name in fabric.BY_PLUGIN else ""
        yield Finding("nccl", OK, f"{name} is here, which NCCL can use{plugin}; not measured")


def parts_of(error: MpiStrategyError) -> tuple[str, str]:
    """Return what an error of this library found, and its fix."""
    return error.found or str(error), error.fix or (f"Expected {error.expected}" if error.expected else "")
