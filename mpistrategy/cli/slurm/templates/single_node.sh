#!/bin/bash
# {{file}}: a program on one node, one rank for each GPU; or, without any, for each task.
#
#     sbatch {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# The job ends with the status of the program. Logs and checkpoints are written to the folder of submission.
{{notes}}

{{directives}}

{{environment}}

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-{{cpus_per_task}}} # else every rank starts a thread for each core of its node

{{launch}}

ranks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $ranks ranks, $(command -v python3), $(date -Is)"
status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
