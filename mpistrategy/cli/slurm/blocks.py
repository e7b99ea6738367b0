"""The lines of shell that depend on the statement, for the marks in the templates."""

from __future__ import annotations

from collections.abc import Callable

from mpistrategy.cli.slurm import directives
from mpistrategy.cli.slurm.batch import BATCHES
from mpistrategy.cli.slurm.spec import JobSpec
from mpistrategy.cli.slurm.values import in_seconds, shell


def notes(spec: JobSpec) -> list[str]:
    """Return the notes about the site."""
    site = spec.site
    if not site.name:
        return []
    lines = ["#", f"# Site {site.name}: {site.summary}", *(f"# {line}" for line in site.notes)]
    if site.pages:
        lines.append(f"# Not tried on the machine itself; held on {site.checked} against copies of these pages:")
        lines += [f"#   {page.split()[0]}" for page in site.pages]
    return lines + [f"# {line}" for line in site.unchecked]


def environment(spec: JobSpec) -> list[str]:
    """Return the lines that make Python and MPI available."""
    lines = ["# EDIT 2: the Python environment, with mpistrategy and the MPI that your launcher can start."]
    modules, venv = spec["modules"], spec["venv"]
    if spec.site.module_use:
        lines.append(f"module use {' '.join(map(shell, spec.site.module_use))}")
    lines.append(f"module load {' '.join(map(shell, modules))}" if modules else "# module load python openmpi")
    if "venv" in spec.values:
        activate = "/bin/activate"
        lines += (
            ["# shellcheck disable=SC1090,SC1091", f"source {shell(venv + activate)}"]
            if venv
            else ['# source "$HOME/venv/bin/activate"']
        )
    return [*lines, *spec.site.setup, *(_cray(spec) if spec.site.cray else [])]


def _cray(spec: JobSpec) -> list[str]:
    """Return what has to be known of Cray MPICH; the guide's page `which-mpi` says more."""
    return [*_WHEELS, *(_TRANSPORT if spec.gpus else ())]


_WHEELS = (
    "# The mpi4py of cray-python has Cray MPICH, and so has one that is built here:",
    "#     MPICC='cc -shared' pip install --no-binary=mpi4py mpi4py",
    "# One of a wheel needs the ABI module, and its libraries before all others, or it talks by TCP: for that use",
    "# module load cray-mpich-abi",
    '# export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:${LD_LIBRARY_PATH-}"',
)
_TRANSPORT = (
    "# MPICH_GPU_SUPPORT_ENABLED=1 wants the accelerator's transport library in the process, too: build mpi4py with",
    "# the accelerator's module (craype-accel-nvidia80, ...) loaded, or preload the library:",
    '# export LD_PRELOAD="$CRAY_MPICH_ROOTDIR/gtl/lib/libmpi_gtl_cuda.so"',
)


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
    if spec.gpus and spec.gpu_option:
        # Not --gpu-bind=none: in a step of Slurm 22.05 that leaves CUDA_VISIBLE_DEVICES unset.
        lines.append(
            "# No GPU is bound to a rank: a rank that sees its own one only cannot copy from others' directly."
        )
    options += spec.site.launcher_options
    if spec["mpi"]:
        options.append(f"--mpi={shell(spec['mpi'])}")
    elif spec.site.cray:
        lines.append("# If every rank says that it is the only one, mpi4py has not found Cray MPICH: see above.")
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


def _pbs_mpiexec(spec: JobSpec) -> list[str]:
    tasks = spec["tasks_per_node"]
    return [f"ranks=$((nodes * {tasks}))", *_MPIEXECS[spec["mpiexec"]](spec, str(tasks), ['"$PBS_NODEFILE"'])]


_LAUNCHERS: dict[str, Callable[[JobSpec], list[str]]] = {"srun": _srun, "ibrun": _ibrun, "mpiexec": _pbs_mpiexec}


def mpirun(spec: JobSpec) -> list[str]:
    """Return the lines that start the ranks with an mpiexec inside a job of Slurm, which it asks for the nodes."""
    return _MPIEXECS[spec["mpiexec"]](spec, "$SLURM_NTASKS_PER_NODE", [])


def _pals(spec: JobSpec, tasks: str, hosts: list[str]) -> list[str]:
    options = [f'-n "$ranks" --ppn {tasks} --depth={spec["cpus_per_task"]}', "--cpu-bind=depth"]
    return [f"launch=(mpiexec {' '.join([*options, *spec.site.launcher_options])})"]


def _open_mpi(spec: JobSpec, tasks: str, hosts: list[str]) -> list[str]:
    cpus = "$SLURM_CPUS_PER_TASK" if spec.site.batch == "slurm" else str(spec["cpus_per_task"])
    cores = f":PE={cpus}" if spec["bind_to"] == "core" else ""
    nodes = "".join(f" --hostfile {name}" for name in hosts)
    return [
        "# Each rank gets its cores; on nodes that you share, or with more ranks than cores: --bind-to none",
        f'launch=(mpirun -n "$ranks"{nodes} --map-by "ppr:{tasks}:node{cores}" --bind-to {spec["bind_to"]})',
        "# Variables reach the other nodes only when named: UCX_TLS, NCCL_DEBUG, ... as further -x options.",
        "launch+=(-x OMP_NUM_THREADS -x PATH)",
        "[[ ! ${LD_LIBRARY_PATH-} ]] || launch+=(-x LD_LIBRARY_PATH)",
    ]


def _hydra(spec: JobSpec, tasks: str, hosts: list[str]) -> list[str]:
    """MPICH's mpiexec, and Intel's: all variables reach the other nodes."""
    cpus = '"${SLURM_CPUS_PER_TASK:-1}"' if spec.site.batch == "slurm" else str(spec["cpus_per_task"])
    nodes = "".join(f" -f {name}" for name in hosts)
    count = f'"{tasks}"' if tasks.startswith("$") else tasks
    bound = spec["bind_to"] == "core"
    if spec["mpiexec"] == "intel":
        binding = ["export I_MPI_PIN_DOMAIN=omp # as many cores for a rank as OMP_NUM_THREADS says"]
        binding = binding if bound else ["export I_MPI_PIN=0 # no rank is bound to cores"]
        return [*binding, f'launch=(mpiexec{nodes} -n "$ranks" -ppn {count})']
    option = f"-bind-to core:{cpus}" if bound else "-bind-to none"
    return [
        "# Each rank gets its cores; on nodes that you share, or with more ranks than cores: -bind-to none",
        f'launch=(mpiexec{nodes} -n "$ranks" -ppn {count} {option})',
    ]


_MPIEXECS: dict[str, Callable[[JobSpec, str, list[str]], list[str]]] = {
    "pals": _pals, "openmpi": _open_mpi, "mpich": _hydra, "intel": _hydra,
}  # fmt: skip


def clock(spec: JobSpec) -> list[str]:
    """Return the lines that tell this script that its time is nearly up, where the batch system does not."""
    if spec.site.batch == "slurm":
        return []
    seconds = in_seconds(spec["time"]) - int(spec["signal_lead"])
    return [
        "# PBS sends no signal before the time is up, so a clock of this script's own does.",
        f'(sleep {seconds}; kill -USR2 "$$") 1>&2 &',
        "clock=$!",
    ]


def apptainer(spec: JobSpec) -> list[str]:
    """Return the lines that enter a container with Apptainer."""
    image = shell(spec["image"] or "image.sif")
    options = ["--nv"] if spec.gpus else []
    options += [f"--bind {shell(mount)}" for mount in spec["mounts"] or ()]
    inside = " ".join(["", *options])
    return [
        f"image={image}",
        f'container=(apptainer exec{inside} "$image")',
        "# To use the cluster's MPI instead, where the ABI is the same: bind its folder, and tell mpi4py its library.",
        "# mpi=/path/to/the/mpi",
        f'# container=(apptainer exec{inside} --bind "$mpi" --env MPI4PY_LIBMPI="$mpi/lib/libmpi.so" "$image")',
    ]


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
    "mpirun": mpirun,
    "clock": clock,
    "apptainer": apptainer,
    "pyxis": pyxis,
}


def values_of(spec: JobSpec) -> dict[str, str]:
    """Return the values for marks inside lines."""
    numbers = ("cpus_per_task", "tasks_per_node", "max_restarts", "max_links")
    told = {key: str(spec[key]) for key in numbers}
    told |= {key: shell(spec[key]) for key in ("archive", "local") if spec[key]}
    cpus = spec["cpus_per_task"]
    each = spec.site.threads_per_core
    threads = str(-(-cpus // each))
    if spec.site.batch == "slurm":
        threads = (
            f"${{SLURM_CPUS_PER_TASK:-{cpus}}}" if each == 1 else f"$(((SLURM_CPUS_PER_TASK + {each - 1}) / {each}))"
        )
    # MPICH's mpiexec and Intel's hand SIGTERM on to the ranks, and are ended by SIGUSR2; others the other way round.
    signal = "TERM" if spec.site.batch == "pbs" and spec["mpiexec"] in ("mpich", "intel") else "USR2"
    return told | {"threads": threads, "signal": signal} | BATCHES[spec.site.batch].words
