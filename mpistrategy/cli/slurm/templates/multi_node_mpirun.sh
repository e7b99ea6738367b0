#!/bin/bash
# {{file}}: a program on several nodes, started by Open MPI's mpirun in place of srun.
#
#     sbatch {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# The Open MPI team recommends it, and it is the way where srun offers no PMIx. mpirun asks Slurm for the nodes itself.
# With MPICH or Intel MPI write instead: launch=(mpiexec -n "$ranks" -ppn "$SLURM_NTASKS_PER_NODE")
{{notes}}

{{directives}}

{{environment}}

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-{{cpus_per_task}}} # else every rank starts a thread for each core of its node

ranks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
# Each rank gets its cores; on nodes that you share, or with more ranks than cores: --bind-to none
launch=(mpirun -n "$ranks" --map-by "ppr:$SLURM_NTASKS_PER_NODE:node{{cores}}" --bind-to {{bind_to}})
# Variables reach the other nodes only when named: UCX_TLS, NCCL_DEBUG, ... as further -x options.
launch+=(-x OMP_NUM_THREADS -x PATH)
[[ ! ${LD_LIBRARY_PATH-} ]] || launch+=(-x LD_LIBRARY_PATH)

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $ranks ranks, $(command -v python3), $(date -Is)"
status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
