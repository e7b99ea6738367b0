#!/bin/bash
# {{file}}: a program on several nodes, started by the MPI's own mpirun or mpiexec in place of srun.
#
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# The Open MPI team recommends it, and it is the way where srun offers no PMIx. mpirun asks Slurm for the nodes itself.
# This is for Open MPI; for others: mpistrategy slurm multi_node_mpirun mpiexec=mpich (or mpiexec=intel)
{{notes}}

{{directives}}

{{environment}}

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node

ranks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
{{mpirun}}

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $ranks ranks, $(command -v python3), $(date -Is)"
status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
