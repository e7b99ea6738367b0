# shellcheck shell=bash
# Sourced by the scripts/bench_* beside this file: starts scripts/bench on several ranks.

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# bench SUITES ARGUMENT...: takes --mpi and -n, and passes everything else to scripts/bench.
bench() {
    local suites=$1 ranks=2 arguments=()
    shift
    while (($#)); do
        case $1 in
            --mpi) MPI=${2:?--mpi needs a name} && shift 2 ;;
            -n) ranks=${2:?-n needs a number of ranks} && shift 2 ;;
            -h | --help) show_help && exit ;;
            *) arguments+=("$1") && shift ;;
        esac
    done
    choose_mpi "$MPI"
    prepare bench
    # Where every rank has a core, waiting ranks need not yield: MPI is measured with its default settings.
    if ((ranks <= $(nproc))); then
        export MPIR_CVAR_ENABLE_HEAVY_YIELD=0 OMPI_MCA_mpi_yield_when_idle=0
    fi
    run_ranks "$ranks" "${LIMIT:-3600}" "$ROOT/scripts/bench" --only "$suites" "${arguments[@]}"
}
