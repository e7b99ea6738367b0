"""The lines of shell that depend on the statement, for the marks in the templates."""

from __future__ import annotations

from collections.abc import Callable

from mpistrategy.cli.slurm import directives
from mpistrategy.cli.slurm.spec import JobSpec
from mpistrategy.cli.slurm.values import shell


def notes(spec: JobSpec) -> list[str]:
    """Return the notes about the site."""
    site = spec.site
    if not site.name:
        return []
    return ["#", f"# Site {site.name}: {site.summary}", *(f"# {line}" for line in site.notes)]


def environment(spec: JobSpec) -> list[str]:
    """Return the lines that make Python and MPI available."""
    lines = ["# EDIT 2: the Python environment, with mpistrategy and the MPI that your launcher can start."]
    modules, venv = spec["modules"], spec["venv"]
    lines.append(f"module load {' '.join(modules)}" if modules else "# module load python openmpi")
    if "venv" in spec.values:
        activate = "/bin/activate"
        lines += (
            ["# shellcheck disable=SC1090,SC1091", f"source {shell(venv + activate)}"]
            if venv
            else ['# source "$HOME/venv/bin/activate"']
        )
    return [*lines, *spec.site.setup]


def program(spec: JobSpec) -> list[str]:
    """Return the line that names the program."""
    named = " ".join(shell(part) for part in (spec["program"], *spec["arguments"]))
    return ["# EDIT 3: the program and its arguments, as they would stand behind `python`.", f"program=({named})"]


def launch(spec: JobSpec) -> list[str]:
    """Return the lines that start the ranks."""
    return _LAUNCHERS[spec.site.launcher](spec)


def _srun(spec: JobSpec) -> list[str]:
    options = ["--kill-on-bad-exit=1"]
    lines = ["# The end of one rank ends them all; and srun of Slurm 22.05 to 23.02 must be told of --cpus-per-task."]
    if "cpus_per_task" not in spec.site.skip:
        options.append('--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"')
    if spec["gpus_per_node"] and spec.site.gpu_option:
        # Not --gpu-bind=none: in a step of Slurm 22.05 that leaves CUDA_VISIBLE_DEVICES unset.
        lines.append(
            "# No GPU is bound to a rank: a rank that sees its own one only cannot copy from others' directly."
        )
    options += spec.site.launcher_options
    if spec["mpi"]:
        options.append(f"--mpi={spec['mpi']}")
    else:
        lines.append(
            "# If every rank says that it is the only one: add --mpi=pmi2 (MPICH, Intel MPI) or --mpi=pmix (Open MPI)."
        )
    return [*lines, f"launch=(srun {' '.join(options)})"]


def _ibrun(spec: JobSpec) -> list[str]:
    return [
        "# ibrun knows nodes and ranks from the job.",
        " ".join(["launch=(ibrun", *spec.site.launcher_options]) + ")",
    ]


def _mpiexec(spec: JobSpec) -> list[str]:
    options = [f'-n "$((nodes * {spec["tasks_per_node"]}))"', f"--ppn {spec['tasks_per_node']}"]
    options += [f"--depth={spec['cpus_per_task']}", "--cpu-bind=depth", *spec.site.launcher_options]
    return ['nodes=$(sort -u "$PBS_NODEFILE" | wc -l)', f"launch=(mpiexec {' '.join(options)})"]


_LAUNCHERS: dict[str, Callable[[JobSpec], list[str]]] = {"srun": _srun, "ibrun": _ibrun, "mpiexec": _mpiexec}


def apptainer(spec: JobSpec) -> list[str]:
    """Return the lines that enter a container with Apptainer."""
    image = shell(spec["image"] or "image.sif")
    options = ["--nv"] if spec["gpus_per_node"] else []
    options += [f"--bind {shell(mount)}" for mount in spec["mounts"] or ()]
    lines = [f"image={image}", f"container=(apptainer exec {' '.join([*options, chr(34) + '$image' + chr(34)])})"]
    return lines if options else [*lines, "# container+=() takes further options in front of the image: --nv with GPUs"]


def pyxis(spec: JobSpec) -> list[str]:
    """Return the lines that say how a container is entered with pyxis, whose options are srun's."""
    image = spec["image"] or "image.sqsh"
    if image.endswith(".sqsh") and "/" not in image:
        image = f"./{image}"  # pyxis takes a path that does not begin with . or / for a name in a registry
    image = shell(image)
    lines = [f"image={image}", 'launch+=(--container-image="$image")']
    mounts = ",".join(spec["mounts"] or ())
    if mounts:
        return [*lines, f"launch+=(--container-mounts={shell(mounts)})"]
    return [*lines, 'launch+=(--container-mounts="$PWD:$PWD" --container-workdir="$PWD")']


BLOCKS: dict[str, Callable[[JobSpec], list[str]]] = {
    "directives": directives.lines,
    "notes": notes,
    "environment": environment,
    "program": program,
    "launch": launch,
    "apptainer": apptainer,
    "pyxis": pyxis,
}


def values_of(spec: JobSpec) -> dict[str, str]:
    """Return the values for marks inside lines."""
    numbers = ("cpus_per_task", "tasks_per_node", "max_restarts", "max_links", "bind_to")
    told = {key: str(spec[key]) for key in numbers}
    told |= {key: shell(spec[key]) for key in ("archive", "local") if spec[key]}
    cores = ":PE=$SLURM_CPUS_PER_TASK" if spec["bind_to"] == "core" else ""
    return told | {"cores": cores}
