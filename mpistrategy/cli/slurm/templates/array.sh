#!/bin/bash
# {{file}}: the same program with several settings, one job for each index of an array.
#
#     sbatch {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# Each job has its own index, output and checkpoints. The status of each is that of its program; the failure of one
# leaves the others alone.
{{notes}}

{{directives}}

{{environment}}

{{program}}
# What differs: by the index, or by a list such as rates=(0.3 0.1 0.03 0.01) with "${rates[SLURM_ARRAY_TASK_ID]}".
program+=(--seed "$SLURM_ARRAY_TASK_ID" --folder "checkpoints/$SLURM_JOB_NAME-$SLURM_ARRAY_TASK_ID")

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-{{cpus_per_task}}} # else every rank starts a thread for each core of its node

{{launch}}

echo "job $SLURM_ARRAY_JOB_ID, index $SLURM_ARRAY_TASK_ID, on $SLURM_JOB_NODELIST: $(command -v python3), $(date -Is)"
mkdir -p checkpoints
status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
