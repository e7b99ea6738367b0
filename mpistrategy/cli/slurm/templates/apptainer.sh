#!/bin/bash
# {{file}}: a program in an Apptainer (or Singularity) container, one container for each rank.
#
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# srun is outside and starts the ranks; Python, mpistrategy and the MPI are those of the image. That MPI must speak what
# srun offers (--mpi=pmix or pmi2).
{{notes}}

{{directives}}

{{environment}}
# EDIT, too: the image, which all nodes must see.
{{apptainer}}

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node
export APPTAINERENV_OMP_NUM_THREADS=$OMP_NUM_THREADS
export PMIX_MCA_psec=native # PMIx inside and outside must agree on who vouches for a rank; munge is outside only

{{launch}}

ranks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $ranks ranks, in $image, $(date -Is)"
status=0
"${launch[@]}" "${container[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
