#!/bin/bash
# {{file}}: the same program with several settings, one job for each index of an array.
#
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# Each job has its own index, output and checkpoints. The status of each is that of its program; the failure of one
# leaves the others alone.
{{notes}}

{{directives}}

{{environment}}

{{program}}
# What differs: by the index, or by a list such as rates=(0.3 0.1 0.03 0.01) with "${rates[{{index_name}}]}".
program+=(--seed "{{index}}" --folder "checkpoints/{{array_name}}-{{index}}")

set -euo pipefail # from here on: modules and activation scripts are not written for it
{{enter}}
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node

{{launch}}

echo "job {{array_job}}, index {{index}}, on {{where}}: $(command -v python3), $(date -Is)"
mkdir -p checkpoints
status=0
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" || status=$?
echo "job {{job}}: the program ended with status $status"
exit "$status"
