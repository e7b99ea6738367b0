#!/bin/bash
# {{file}}: a program that needs longer than a job may take. Before the time is up the program saves a checkpoint
# and ends; the job goes back to the queue, and goes on from there when it starts again.
#
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# What the program has to do: restore the newest checkpoint of a CheckpointManager when it starts; and when it is sent
# SIGUSR2 save, and end with status 75. example.py, which `mpistrategy slurm --all FOLDER` writes, does both. A program
# that knows nothing of SIGUSR2 is ended by it, and goes on from the last checkpoint that it had saved: they are whole
# or not there.
#
# Status 0 ends the job, and so does a mistake: an exception, another status, a signal of the program's own fault, too
# little memory. What comes from outside (a lost node, a more urgent job, the time limit) is tried again. Where jobs
# cannot be requeued, use the template chain.
{{notes}}

{{directives}}

{{environment}}

{{program}}
max_restarts={{max_restarts}} # then the job gives up; Slurm counts restarts after failures of nodes, too

set -euo pipefail # from here on: modules and activation scripts are not written for it
{{enter}}
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node

{{launch}}

{{restarts}}
echo "job {{job}}, restart $restarts of $max_restarts, on {{where}}: $(command -v python3), $(date -Is)"

{{signalled_run}}

if [[ ! $again ]]; then
    if [[ $why == 'is done' ]]; then
        echo "job {{job}}: the program is done"
    else
        echo "job {{job}}: the program $why; not requeued" >&2
        ((status != 0)) || status=1
    fi
elif ((restarts >= max_restarts)); then
    echo "job {{job}}: not done after $restarts restarts; not requeued" >&2
else
    echo "job {{job}}: the program $why; back to the queue"
    {{requeue}} || echo "job {{job}}: cannot be requeued here; use chain" >&2
fi
exit "$status"
