"""What to type to the launcher that started the ranks: srun, jsrun (LSF), flux run; where it is unknown, srun."""

from __future__ import annotations

_LINES = {
    "": {
        "start": "srun --ntasks={ranks}, mpiexec -n {ranks}",
        "evenly": "srun --ntasks-per-node={each} (Open MPI: --map-by ppr:{each}:node; MPICH: -ppn {each})",
        "one each": "srun --nodes=N --ntasks-per-node=1 hostname",
        "without": "srun --exclude={host}",
        "cores": "srun --cpu-bind=cores --cpus-per-task=N; mpiexec --bind-to none (Open MPI), -bind-to none (MPICH)",
        "more cores": "--cpus-per-task",
    },
    "jsrun": {
        "start": "jsrun -n {ranks} -a 1",
        "evenly": "jsrun -a 1 -r {each}",
        "one each": "jsrun -n NODES -r 1 hostname",
        "without": 'bsub -R "select[hname!={host}]"',
        "cores": "jsrun --bind=packed:N --cpu_per_rs=N, N cores for each rank",
        "more cores": "jsrun --cpu_per_rs",
    },
    "flux run": {
        "start": "flux run -n {ranks}",
        "evenly": "flux run --tasks-per-node={each}",
        "one each": "flux run -N NODES -n NODES hostname",
        "without": "flux run --requires=-host:{host}",
        "cores": "flux run --cores-per-task=N -o cpu-affinity=per-task",
        "more cores": "flux run --cores-per-task",
    },
}


def line(launcher: str, what: str, **values: object) -> str:
    """Return what to type.

    Args:
        launcher: as `mpistrategy.mpi.job.launcher.Claim` names it.
        what: "start" (`ranks`), "evenly" (`each` on every node), "one each" (one process on each
            node), "without" (a `host`), "cores" (its own ones for each rank) or "more cores" (for each rank).
        values: what stands in the line.
    """
    return _LINES.get(launcher, _LINES[""])[what].format(**values)
