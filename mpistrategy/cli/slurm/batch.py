"""Batch systems: what the same thing is called in the script of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """A batch system.

    Attributes:
        name: as people call it.
        submit: the command that takes a script from its standard input.
        suffix: of its scripts.
        words: the values of marks inside the lines of a template.
        lines: the lines for marks that stand alone.
    """

    name: str
    submit: str
    suffix: str
    words: dict[str, str]
    lines: dict[str, list[str]]


_SLURM = Batch(
    "Slurm",
    "sbatch",
    "sbatch",
    words={
        "submit": "sbatch",
        "job": "$SLURM_JOB_ID",
        "where": "$SLURM_JOB_NODELIST",
        "unfinished": ".mpistrategy-$SLURM_JOB_ID.unfinished",
        "array_job": "$SLURM_ARRAY_JOB_ID",
        "index": "$SLURM_ARRAY_TASK_ID",
        "array_name": "$SLURM_JOB_NAME",
        "index_name": "SLURM_ARRAY_TASK_ID",
        "requeue": 'scontrol requeue "$SLURM_JOB_ID"',
        "cancel": "scancel",
        "all_nodes_answer": 'timeout 60 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true 2>/dev/null',
        "before": "$2",
        "has_before": "${2-}",
    },
    lines={
        "enter": [],
        "count_ranks": ["ranks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))"],
        "restarts": ["restarts=${SLURM_RESTART_COUNT:-0}"],
        "link": ["link=${1:-1}"],
        "successor": [
            '    next=$(sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" "$0" "$((link + 1))" "$SLURM_JOB_ID")',
            "    next=${next%%;*}",
        ],
    },
)

_PBS = Batch(
    "PBS",
    "qsub",
    "pbs",
    words={
        "submit": "qsub",
        "job": "$PBS_JOBID",
        "where": "$nodes nodes",
        "unfinished": ".mpistrategy-$PBS_JOBID.unfinished",
        "array_job": "$PBS_ARRAY_ID",
        "index": "$PBS_ARRAY_INDEX",
        "array_name": "${PBS_JOBNAME%%[*}",
        "index_name": "PBS_ARRAY_INDEX",
        "requeue": 'qrerun "$PBS_JOBID"',
        "cancel": "qdel",
        "all_nodes_answer": "true",  # PBS ends the job when it misses a node
        "before": "$CHAIN_BEFORE",
        "has_before": "${CHAIN_BEFORE-}",
    },
    lines={
        "enter": ['cd -- "$PBS_O_WORKDIR"', 'nodes=$(sort -u "$PBS_NODEFILE" | wc -l)'],
        "count_ranks": [],  # the launcher's lines need them before
        "restarts": [
            "# How often this job was started, which no variable says.",
            'runs=$(qstat -f "$PBS_JOBID" | sed -n "s/^ *run_count = //p")',
            "restarts=$((${runs:-1} - 1))",
        ],
        "link": ["link=${CHAIN_LINK:-1}"],
        "successor": [
            '    handed_on="CHAIN_LINK=$((link + 1)),CHAIN_BEFORE=$PBS_JOBID"',
            '    next=$(qsub -W "depend=afterany:$PBS_JOBID" -v "$handed_on" "$0")',
        ],
    },
)

#: By the name in a site's profile.
BATCHES = {"slurm": _SLURM, "pbs": _PBS}
