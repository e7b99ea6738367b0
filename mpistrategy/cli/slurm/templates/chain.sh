#!/bin/bash
# {{file}}: a program that needs longer than a job may take, as a chain of jobs. Each job submits the next one when
# it starts, to begin after it has ended; a job whose program is done, or fails, takes the next one back.
#
#     sbatch {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# For clusters where a job cannot be requeued. What the program has to do: restore the newest checkpoint of a
# CheckpointManager when it starts; and when it is sent SIGUSR2 save, and end with status 75 (example.py beside this
# file does both). A program that knows nothing of SIGUSR2 is ended by it; the next job goes on from its last one.
#
# Options given to sbatch on the command line count for the first job only: write them into this file.
{{notes}}

{{directives}}

{{environment}}

{{program}}
max_links={{max_links}} # how many jobs the chain may have

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-{{cpus_per_task}}} # else every rank starts a thread for each core of its node

{{launch}}

link=${1:-1}
echo "job $SLURM_JOB_ID, link $link of $max_links, on $SLURM_JOB_NODELIST: $(command -v python3), $(date -Is)"

# The job before has ended: what it left if it was killed (see below) goes.
[[ ! ${2-} ]] || rm -f -- ".mpistrategy-$2.unfinished"

# Now, and not at the end: a job that is killed gets no further. $0 is Slurm's copy of this script.
next=
if ((link < max_links)); then
    next=$(sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" "$0" "$((link + 1))" "$SLURM_JOB_ID")
    next=${next%%;*}
    echo "job $SLURM_JOB_ID: job $next goes on after it"
fi

{{signalled_run}}

if [[ $status == 75 || ($status != 0 && $told) ]]; then
    echo "job $SLURM_JOB_ID: the program stopped with status $status; ${next:+job }${next:-nothing} goes on"
else
    [[ ! $next ]] || scancel "$next"
    echo "job $SLURM_JOB_ID: the program ended with status $status; the chain ends here"
fi
exit "$status"
