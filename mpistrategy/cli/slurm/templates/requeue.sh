#!/bin/bash
# {{file}}: a program that needs longer than a job may take. Before the time is up the program saves a checkpoint
# and ends; the job goes back to the queue, and goes on from there when it starts again.
#
#     sbatch {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# What the program has to do: restore the newest checkpoint of a CheckpointManager when it starts; and when it is sent
# SIGUSR2 save, and end with status 75 (example.py beside this file does both). A program that knows nothing of SIGUSR2
# is ended by it, and goes on from the last checkpoint that it had saved: they are whole or not there.
#
# Status 0 ends the job, and so does any other status that comes before the signal: a mistake is not tried again. Where
# jobs cannot be requeued, use chain.sbatch.
{{notes}}

{{directives}}

{{environment}}

{{program}}
max_restarts={{max_restarts}} # then the job gives up; Slurm counts restarts after failures of nodes, too

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-{{cpus_per_task}}} # else every rank starts a thread for each core of its node

{{launch}}

restarts=${SLURM_RESTART_COUNT:-0}
echo "job $SLURM_JOB_ID, restart $restarts of $max_restarts, on $SLURM_JOB_NODELIST: $(command -v python3), $(date -Is)"

{{signalled_run}}

if [[ $status == 0 ]]; then
    echo "job $SLURM_JOB_ID: the program is done"
elif [[ $status != 75 && ! $told ]]; then
    echo "job $SLURM_JOB_ID: the program failed with status $status; not requeued" >&2
elif ((restarts >= max_restarts)); then
    echo "job $SLURM_JOB_ID: not done after $restarts restarts; not requeued" >&2
    ((status != 0)) || status=75
else
    echo "job $SLURM_JOB_ID: the program stopped with status $status; back to the queue"
    scontrol requeue "$SLURM_JOB_ID" || echo "job $SLURM_JOB_ID: cannot be requeued here; use chain.sbatch" >&2
fi
exit "$status"
