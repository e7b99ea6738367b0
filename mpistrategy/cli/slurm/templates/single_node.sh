#!/bin/bash
# {{file}}: a program on one node, one rank for each GPU; or, without any, for each task.
#
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# The job ends with the status of the program. Logs and checkpoints are written to the folder of submission.
{{notes}}

{{directives}}

{{environment}}

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
{{enter}}
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node

{{launch}}

{{count_ranks}}
echo "job {{job}} on {{where}}: $ranks ranks, $(command -v python3), $(date -Is)"
status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job {{job}}: the program ended with status $status"
exit "$status"
