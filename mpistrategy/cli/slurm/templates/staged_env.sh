#!/bin/bash
# {{file}}: copies the Python environment to every node's own disk first. Thousands of ranks that import from
# one shared folder wait minutes for it, and slow it down for all others.
#
#     tar -C path/to/venv -czf environment.tar.gz .        (once; of a conda environment: conda-pack)
#     {{submit}} {{file}}        (from the folder that the program is in; edit what is marked EDIT before)
#
# What lies in the environment is taken from the copy; only the program and its data stay where they are.
{{notes}}

{{directives}}

{{environment}}
archive={{archive}} # the packed environment, which this node must see
local={{local}}     # a folder on every node's own disk; some centres name it in $SLURM_TMPDIR or $TMPDIR

{{program}}

set -euo pipefail # from here on: modules and activation scripts are not written for it
export OMP_NUM_THREADS={{threads}} # else every rank starts a thread for each core of its node

{{launch}}
each_node=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1)

stage=$(mktemp -u "$local/mpistrategy-$SLURM_JOB_ID-XXXXXXXXXX") # one name for all nodes; nobody knows it beforehand
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $archive goes to $stage on each node, $(date -Is)"
# Whatever happens, the disks are left as they were.
trap '"${each_node[@]}" find "$stage" -maxdepth 0 -type d -user "$UID" -exec rm -rf -- {} + || true' EXIT
# Other users may write to $local, too. The folder is made here: one that is there already ends the job, and so does a
# $local in which others could replace it.
# shellcheck disable=SC2016 # for the shells on the nodes
make='if [[ ! -d $1 ]]; then
    echo "$1 on $HOSTNAME: no such folder; name another one in local=" >&2
    exit 1
fi
read -r link owner mode <<<"$(stat -c %u -- "$1") $(stat -L -c "%u %a" -- "$1")"
if [[ " 0 $UID " != *" $link "* || " 0 $UID " != *" $owner "* ]] || ((8#$mode & 8#22 && !(8#$mode & 8#1000))); then
    echo "$1 on $HOSTNAME (mode $mode): other users can replace what is in it; name another in local=" >&2
    exit 1
fi
mkdir -m 700 -- "$2"'
"${each_node[@]}" bash -ec "$make" make "$local" "$stage"
sbcast -- "$archive" "$stage/environment.tar.gz" # with set -e a copy that fails ends the job: it may be a part
# shellcheck disable=SC2016 # for the shells on the nodes
unpack='tar -C "$1" -xf "$1/environment.tar.gz"
if [[ -x $1/bin/conda-unpack ]]; then "$1/bin/python3" "$1/bin/conda-unpack"; fi'
"${each_node[@]}" bash -ec "$unpack" unpack "$stage"

# What libraries write while they run goes to the node's disk as well.
export CUPY_CACHE_DIR=$stage/cupy MPLCONFIGDIR=$stage/matplotlib XDG_CACHE_HOME=$stage/cache

echo "job $SLURM_JOB_ID: the environment is in place, $(date -Is)"
status=0
"${launch[@]}" "$stage/bin/python3" -m mpistrategy run "${program[@]}" || status=$?
echo "job $SLURM_JOB_ID: the program ended with status $status"
exit "$status"
