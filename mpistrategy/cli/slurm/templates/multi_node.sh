#!/bin/bash
# {{file}}: a program on several nodes, one rank for each GPU; or, without any, for each task.
#
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# First mpistrategy doctor, for some seconds: do all ranks start, meet, and add up right, is anything in their way? If
# something is BAD it says what to type, and the job ends with its status. Else the program runs, and gives the status.
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
"${launch[@]}" python3 -m mpistrategy doctor --ranks "$ranks" --timeout 120 || status=$?
if ((status != 0)); then
    echo "job {{job}}: mpistrategy doctor ended with status $status; the program was not started" >&2
    exit "$status"
fi

status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job {{job}}: the program ended with status $status"
exit "$status"
