#!/bin/bash
# {{file}}: a program on several nodes, one rank for each GPU; or, without any, for each task.
#
#     sbatch {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# First a step that takes seconds: do all ranks start, meet, and add up right? The program comes only after that. The
# job ends with the status of the program, or of the first step, if that fails.
{{notes}}

{{directives}}

{{environment}}

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-{{cpus_per_task}}} # else every rank starts a thread for each core of its node

{{launch}}

ranks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $ranks ranks, $(command -v python3), $(date -Is)"

preflight='
import sys, numpy as np, mpistrategy as ms
strategy = ms.MirroredStrategy()
ranks, wanted = strategy.num_replicas_in_sync, int(sys.argv[1])
total = strategy.reduce("SUM", np.ones(1 << 18), axis=None)
if not (ranks == wanted and (total == ranks).all()):
    sys.exit(f"preflight: found {ranks} ranks and a sum of {total.min()}; expected {wanted} ranks")
if strategy.replica_id_in_sync_group == 0:
    print(f"preflight: {ranks} ranks meet and add up right", flush=True)
'
status=0
"${launch[@]}" python3 -m mpistrategy run --timeout 120 -c "$preflight" "$ranks" || status=$?
if ((status != 0)); then
    echo "job $SLURM_JOB_ID: the preflight ended with status $status; the program was not started" >&2
    exit "$status"
fi

status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
