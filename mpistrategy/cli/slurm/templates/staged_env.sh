#!/bin/bash
# {{file}}: copies the Python environment to every node's own disk first. Thousands of ranks that import from
# one shared folder wait minutes for it, and slow it down for all others.
#
#     tar -C path/to/venv -czf {{archive}} .        (once; of a conda environment: conda-pack)
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# What lies in the environment is taken from the copy; only the program and its data stay where they are.
#
# The copy is removed when the job ends. After scancel, a time limit, preemption and the loss of another node, it is
# removed if the ranks have ended before Slurm's SIGKILL (KillWait, mostly 30 s). What is left after a SIGKILL, or on a
# node that was lost, is removed by this user's next job with this script on that node. Needs Slurm 20.11 or newer.
{{notes}}

{{directives}}

{{environment}}
archive={{archive}} # the packed environment, which this node must see
local={{local}}     # a folder on every node's own disk; some centres name it in $SLURM_TMPDIR or $TMPDIR

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node

{{launch}}
each_node=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1
    --overlap --mpi=none)

stage=$(mktemp -u "$local/mpistrategy-stage-$SLURM_JOB_ID-XXXXXXXXXX") # for all nodes; nobody knows it beforehand
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $archive goes to $stage on each node, $(date -Is)"

# A step of its own makes the folder on each node and removes it at the end: once a job is cancelled, no step can be
# started. Its processes and the ranks hold a lock on the folder (flock), which the kernel frees however they end. So a
# folder without a lock was left behind by a job that was killed.
# Other users may write to $local, too. A folder of that name that is there already ends the job, and so does a $local
# in which others could replace it.
# shellcheck disable=SC2016 # for the shells on the nodes
keep='if [[ ! -d $1 ]]; then
    echo "$1 on $SLURMD_NODENAME: no such folder; name another one in local=" >&2
    exit 1
fi
read -r link owner mode <<<"$(stat -c %u -- "$1") $(stat -L -c "%u %a" -- "$1")"
if [[ " 0 $UID " != *" $link "* || " 0 $UID " != *" $owner "* ]] || ((8#$mode & 8#22 && !(8#$mode & 8#1000))); then
    echo "$1 on $SLURMD_NODENAME (mode $mode): other users can replace what is in it; name another in local=" >&2
    exit 1
fi
for left in "$1"/mpistrategy-stage-*-??????????; do
    [[ -d $left && ! -L $left && -O $left ]] || continue
    { flock -n 8 && rm -rf -- "$left" && echo "$SLURMD_NODENAME: removed $left of a killed job" >&2; } 8<"$left" || true
done
until [[ $2 -ef /proc/self/fd/9 ]]; do # another job may have removed it before it was locked
    mkdir -m 700 -- "$2"
    exec 9<"$2"
    flock -s 9
done
trap : TERM
echo made
cat >/dev/null <&0 &
wait "$!" || true # until the script ends, or Slurm says by SIGTERM that the job does
trap "" TERM
flock 9 # once the ranks of this node have ended
rm -rf -- "$2"'
coproc keeper { exec "${each_node[@]}" bash -ec "$keep" keep "$local" "$stage"; }
# shellcheck disable=SC2154 # coproc sets keeper_PID
step=$keeper_PID made=${keeper[0]} end=${keeper[1]}
trap 'eval "exec $end>&-"; wait "$step" || true' EXIT
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    read -r _ <&"$made" || exit 1 # it has said why
done

sbcast -- "$archive" "$stage/environment.tar.gz" # with set -e a copy that fails ends the job: it may be a part
# shellcheck disable=SC2016 # for the shells on the nodes
unpack='tar -C "$1" -xf "$1/environment.tar.gz"
if [[ -x $1/bin/conda-unpack ]]; then "$1/bin/python3" "$1/bin/conda-unpack"; fi'
"${each_node[@]}" bash -ec "$unpack" unpack "$stage"

# What libraries write while they run goes to the node's disk as well.
export CUPY_CACHE_DIR=$stage/cupy MPLCONFIGDIR=$stage/matplotlib XDG_CACHE_HOME=$stage/cache

echo "job $SLURM_JOB_ID: the environment is in place, $(date -Is)"
# shellcheck disable=SC2016 # for the shells of the ranks
hold='exec 9<"$0" && flock -s 9 && exec "$@"'
status=0
"${launch[@]}" bash -c "$hold" "$stage" "$stage/bin/python3" -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
