"""The lines of a script that the batch system reads."""

from __future__ import annotations

from collections.abc import Callable

from mpistrategy.cli.slurm.spec import JobSpec

#: A directive that is switched off: ``##SBATCH`` is a comment.
_OFF = "#"


def slurm(spec: JobSpec) -> list[str]:
    """Return the ``#SBATCH`` lines, with comments between them."""
    wanted = ", ".join(spec.site.requires)
    lines = [
        *_one(spec, "job_name", "--job-name={}"),
        *_one(spec, "output", "--output={}"),
        *(["#SBATCH --open-mode=append"] if spec.template in ("requeue", "chain") else []),
        *_one(spec, "mail_user", "--mail-user={}"),
        *_one(spec, "mail_type", "--mail-type={}"),
        "",
        "# EDIT 1: who pays for the job and where it runs. A line with ## is off; take one # away to use it.",
        *([f"# {spec.site.name} wants: {wanted}."] if wanted else []),
        *_one(spec, "account", "--account={}", "ACCOUNT"),
        *_one(spec, "partition", "--partition={}", "PARTITION"),
        *_one(spec, "qos", "--qos={}"),
        *_one(spec, "constraint", "--constraint={}"),
        *_one(spec, "reservation", "--reservation={}"),
        *(f"#SBATCH {directive}" for directive in spec.site.directives),
        *(f"#SBATCH {option}" for option in spec["extra"] or ()),
        "",
        *_size(spec),
        *_one(spec, "time", "--time={}"),
    ]
    if spec["array"] is not None:
        lines += ["", "# One job for each index; %2 behind the indices lets two run at a time."]
        lines += _one(spec, "array", "--array={}")
    if spec["signal_lead"] is not None:
        lines += ["", "# This script (B:) is told this many seconds before the time is up, or up to a minute earlier."]
        lines += _one(spec, "signal_lead", "--signal=B:USR2@{}")
    if spec.template == "requeue":
        lines += ["# Back to the queue, too, when a node fails or a more urgent job needs the nodes."]
        lines += ["#SBATCH --requeue"]
    if spec.template == "chain":
        lines += [
            "# Not back to the queue when a node fails: the next job of the chain goes on, and there is only one."
        ]
        lines += ["#SBATCH --no-requeue"]
    return lines


def _size(spec: JobSpec) -> list[str]:
    gpu_option = spec.gpu_option
    written = "--gres=gpu:{}" if gpu_option == "gres" else f"--{gpu_option}={{}}"
    lines = [f"#SBATCH --nodes={spec.nodes}", *_one(spec, "tasks_per_node", "--ntasks-per-node={}")]
    lines += _one(spec, "cpus_per_task", "--cpus-per-task={}")
    if spec.gpus and gpu_option:
        lines += ["# One rank for each GPU: the same number as above. Every rank sees all GPUs of its node."]
        lines += _one(spec, "gpus_per_node", written)
    elif gpu_option and spec.site.gpus:
        lines += ["# With GPUs: as many ranks on a node as GPUs. Every rank then sees all GPUs of its node."]
        lines += [f"{_OFF}#SBATCH {written.format(4)}"]
    lines += _one(spec, "memory", "--mem={}")
    return lines + (["#SBATCH --exclusive"] if spec["exclusive"] and "exclusive" not in spec.site.skip else [])


def _one(spec: JobSpec, key: str, written: str, example: str = "") -> list[str]:
    """Return the line of a key; without a value it is switched off, or left out."""
    value = spec[key]
    if key in spec.site.skip:
        return []
    if value is None:
        return [f"{_OFF}#SBATCH {written.format(example)}"] if example else []
    text = str(value)
    return [f"#SBATCH {written.format(_quoted(text))}"]


def _quoted(text: str) -> str:
    """Return a value as sbatch reads it; no value has quotes or backslashes in it."""
    return f'"{text}"' if set(text) & set(" ;()[]|&*!,#") else text


def pbs(spec: JobSpec) -> list[str]:
    """Return the ``#PBS`` lines: all of them together, since comments between them can break the submission."""
    chunk = [f"select={spec.nodes}"]
    if "cpus_per_task" not in spec.site.skip:  # where it is left out, jobs get whole nodes
        chunk += [f"ncpus={spec['tasks_per_node'] * spec['cpus_per_task']}", f"mpiprocs={spec['tasks_per_node']}"]
        chunk += [f"ngpus={spec.gpus}"] if spec.gpus else []
    chunk += [f"mem={_bytes(spec['memory'])}"] if spec["memory"] else []
    chunk += [spec["constraint"]] if spec["constraint"] else []
    requeue = {"requeue": "y", "chain": "n"}.get(spec.template)
    lines = [
        f"#PBS -N {spec['job_name']}",
        f"#PBS -l {':'.join(chunk)}",
        "#PBS -l place=scatter" + (":excl" if spec["exclusive"] else ""),
        f"#PBS -l walltime={_hours(spec['time'])}",
        f"#PBS -q {spec['partition']}" if spec["partition"] else "##PBS -q QUEUE",
        f"#PBS -A {spec['account']}" if spec["account"] else "##PBS -A ACCOUNT",
        "#PBS -j oe",
        f"#PBS -o {spec['output']}" if spec["output"] else "",
        f"#PBS -J {spec['array']}" if spec["array"] else "",
        f"#PBS -M {spec['mail_user']}" if spec["mail_user"] else "",
        f"#PBS -m {_MAIL[spec['mail_type']]}" if spec["mail_type"] else "",
        f"#PBS -r {requeue}" if requeue else "",
        *(f"#PBS {directive}" for directive in spec.site.directives if not (requeue and directive.startswith("-r "))),
    ]
    head = "# EDIT 1: who pays for the job and where it runs: a line with ## is off. No comments between the lines."
    return [head, *(line for line in lines if line)]


#: What PBS calls the occasions at which Slurm writes a mail.
_MAIL = {"NONE": "n", "BEGIN": "b", "END": "e", "FAIL": "a", "ALL": "abe"}


def _bytes(memory: str) -> str:
    """Return an amount of memory as PBS reads it; Slurm's number without a letter is megabytes."""
    return f"{memory}b".lower() if memory[-1].isalpha() else f"{memory}mb"


def _hours(limit: str) -> str:
    days, _, clock = limit.rpartition("-")
    hours, rest = clock.split(":", 1)
    return f"{int(days or 0) * 24 + int(hours):02}:{rest}"


def lines(spec: JobSpec) -> list[str]:
    """Return the lines for the site's batch system."""
    made: dict[str, Callable[[JobSpec], list[str]]] = {"slurm": slurm, "pbs": pbs}
    return made[spec.site.batch](spec)
