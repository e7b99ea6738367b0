#!/bin/bash
{{directives}}
#
# {{file}}: a program on several nodes, one rank for each GPU, under PBS and the mpiexec of PALS.
#
#     qsub {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# EDIT 1: who pays and where it runs, above. No comments between the #PBS lines: they can break the submission.
# The job ends with the status of the program.
{{notes}}

{{environment}}

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
cd -- "$PBS_O_WORKDIR"
export OMP_NUM_THREADS={{cpus_per_task}} # else every rank starts a thread for each core of its node

{{launch}}

echo "job $PBS_JOBID: $nodes nodes, {{tasks_per_node}} ranks on a node, $(command -v python3), $(date -Is)"
status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job $PBS_JOBID: the program ended with status $status"
exit "$status"
