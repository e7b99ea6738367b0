#!/bin/bash
# select_gpu.sh: lets each rank see one GPU of its node, for programs that cannot choose one by themselves.
#
#     srun ... ./select_gpu.sh python program.py
#
# Programs of mpistrategy do not need it, and are better off without: a rank that sees its own GPU only cannot copy from
# those of its neighbours directly. GPUs are taken in the order of the ranks on the node, or in that of
# MPISTRATEGY_GPU_MAP. Where the first cores are next to the last GPU (Perlmutter, Polaris): MPISTRATEGY_GPU_MAP=3,2,1,0

set -euo pipefail

# Who am I on this node? Slurm's own answer comes last: it is 0 for all ranks that mpiexec starts inside a job.
for rank in "${OMPI_COMM_WORLD_LOCAL_RANK-}" "${MPI_LOCALRANKID-}" "${PALS_LOCAL_RANKID-}" "${PMI_LOCAL_RANK-}" \
    "${MV2_COMM_WORLD_LOCAL_RANK-}" "${JSM_NAMESPACE_LOCAL_RANK-}" "${FLUX_TASK_LOCAL_ID-}" "${SLURM_LOCALID-}"; do
    [[ ! $rank ]] || break
done
if [[ ! $rank =~ ^[0-9]+$ ]]; then
    echo "select_gpu.sh: no launcher said which rank of its node this is; start it with srun or mpiexec" >&2
    exit 2
fi

# What may be used: the map, else what the batch system gave to the job, else what the driver shows.
map=${MPISTRATEGY_GPU_MAP:-${CUDA_VISIBLE_DEVICES:-}}
if [[ -z $map ]] && command -v nvidia-smi >/dev/null; then
    map=$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)
fi
IFS=, read -ra gpus <<<"$map"
if ((${#gpus[@]} == 0)); then
    echo "select_gpu.sh: no GPUs in MPISTRATEGY_GPU_MAP, in CUDA_VISIBLE_DEVICES, nor shown by nvidia-smi" >&2
    exit 2
fi
if ((rank >= ${#gpus[@]})); then
    echo "select_gpu.sh: rank $rank of this node, but only ${#gpus[@]} GPUs ($map): start fewer ranks on a node" >&2
    exit 2
fi

export CUDA_VISIBLE_DEVICES=${gpus[rank]}
exec "$@" # not $*, which would take quoted arguments apart
