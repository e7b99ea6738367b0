#!/bin/bash
# {{file}}: a program that needs longer than a job may take, as a chain of jobs. Each job submits the next one when
# it starts, to begin after it has ended; a job whose program is done, or fails, takes the next one back.
#
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# For clusters where a job cannot be requeued. What the program has to do: restore the newest checkpoint of a
# CheckpointManager when it starts; and when it is sent SIGUSR2 save, and end with status 75. example.py, which
# `mpistrategy slurm --all FOLDER` writes, does both. A program that knows nothing of SIGUSR2 is ended by it; the next
# job goes on from its last checkpoint.
#
# Options given to {{submit}} on the command line count for the first job only: write them into this file.
{{notes}}

{{directives}}

{{environment}}

{{program}}
max_links={{max_links}} # how many jobs the chain may have

set -euo pipefail # from here on: modules and activation scripts are not written for it
{{enter}}
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node

{{launch}}

{{link}}
echo "job {{job}}, link $link of $max_links, on {{where}}: $(command -v python3), $(date -Is)"

# The job before has ended: what it left if it was killed (see below) goes.
[[ ! {{has_before}} ]] || rm -f -- ".mpistrategy-{{before}}.unfinished"

# Now, and not at the end: a job that is killed gets no further. $0 is the batch system's copy of this script.
next=
if ((link < max_links)); then
{{successor}}
    echo "job {{job}}: job $next goes on after it"
fi

{{signalled_run}}

if [[ $again ]]; then
    echo "job {{job}}: the program $why; ${next:+job }${next:-nothing} goes on"
else
    [[ ! $next ]] || {{cancel}} "$next"
    echo "job {{job}}: the program $why; the chain ends here"
    [[ $status != 0 || $why == 'is done' ]] || status=1
fi
exit "$status"
