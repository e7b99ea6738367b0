"""Which MPI is in these processes, and are all ranks made of the same parts?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding, groups, in_words, odd_ones
from mpistrategy.cli.doctor.checks.launch_lines import line
from mpistrategy.cli.doctor.facts.facts import Facts, Job
from mpistrategy.objects.shown import ranks_in_words

_ONE_ENVIRONMENT = "Give all nodes one environment: the same venv, container or modules"
_PARTS = ("python", "mpistrategy", "numpy", "mpi4py", "library")


def versions(job: Job) -> Iterator[Finding]:
    """Find ranks that run other versions than the rest."""
    differ = False
    for part in _PARTS:
        found = groups(job.facts, lambda each, part=part: str(getattr(each, part)))  # type: ignore[misc]
        if len(found) > 1:
            differ = True
            name = "the MPI library" if part == "library" else part
            nodes = sorted({each.host for each in job.facts if each.rank in odd_ones(found)})
            yield Finding(
                "versions",
                BAD,
                f"different versions of {name}: {in_words(found)} ({', '.join(nodes[:4])})",
                f"{_ONE_ENVIRONMENT}; on {nodes[0]}: which python3; echo $PYTHONPATH",
                odd_ones(found),
            )
    if not differ:
        first = job.facts[0]
        shown = f"Python {first.python}, mpistrategy {first.mpistrategy}, NumPy {first.numpy}, mpi4py {first.mpi4py}"
        yield Finding("versions", OK, shown + (" on all ranks" if len(job.facts) > 1 else ""))


def library(job: Job) -> Iterator[Finding]:
    """Find two MPIs in one process, an mpi4py for another MPI, and another library than MPI4PY_LIBMPI names."""
    bad = False
    mixed = {each.rank: places for each in job.facts if len(places := _places(each.libraries)) > 1}
    if mixed:
        bad = True
        places = next(iter(mixed.values()))
        yield Finding(
            "mpi",
            BAD,
            f"two MPIs in one process on {ranks_in_words(list(mixed))}: {' and '.join(places)}",
            f"Something loads a second one (an LD_PRELOAD, another package that is linked with MPI). Find it with: "
            f"LD_DEBUG=libs python3 program.py 2>&1 | grep {os.path.basename(places[1])}; and build all with one MPI",
            tuple(mixed),
        )
    foreign = [each for each in job.facts if not _fits(each.built_for, each.library)]
    if foreign:
        bad = True
        yield Finding(
            "mpi",
            BAD,
            f"mpi4py was built for {foreign[0].built_for}, and {foreign[0].library} is loaded on "
            f"{ranks_in_words([each.rank for each in foreign])}",
            "Build it for this one: pip install --force-reinstall --no-binary=mpi4py mpi4py; or load the module of "
            f"{foreign[0].built_for}",
            tuple(each.rank for each in foreign),
        )
    unheard = [each for each in job.facts if each.wanted and each.libraries and not _is_named(each)]
    if unheard:
        bad = True
        each = unheard[0]
        yield Finding(
            "mpi",
            BAD,
            f"MPI4PY_LIBMPI={each.wanted}, but {each.libraries[0]} is loaded on "
            f"{ranks_in_words([each.rank for each in unheard])}",
            "Set it before Python starts, to a library that is there; or take it away: unset MPI4PY_LIBMPI. "
            "An mpi4py that was built for one MPI does not heed it",
            tuple(each.rank for each in unheard),
        )
    if not bad:
        first = job.facts[0]
        paths = f" ({first.libraries[0]})" if first.libraries else ""
        yield Finding("mpi", OK, f"{first.library}{paths}; mpi4py is built for {first.built_for or 'it'}")


def thread_level(job: Job) -> Iterator[Finding]:
    """Find an MPI that several threads must not call."""
    found = groups(job.facts, lambda each: each.thread_level)
    if len(found) > 1:
        yield Finding(
            "thread level",
            BAD,
            f"the ranks started MPI differently: {in_words(found)}",
            "Set mpi4py.rc.thread_level, or MPI4PY_RC_THREAD_LEVEL, for all ranks alike, or for none",
            odd_ones(found),
        )
        return
    level = next(iter(found))
    if level == "multiple":
        yield Finding("thread level", OK, "multiple: all_reduce_async works behind the program's back")
        return
    yield Finding(
        "thread level",
        BAD if level == "single" else NOTE,
        f"{level}: only one thread may call MPI, so that all_reduce_async overlaps with nothing"
        + (", and a program with threads is against the rules of MPI" if level == "single" else ""),
        "unset MPI4PY_RC_THREAD_LEVEL, and no mpi4py.rc.thread_level or rc.threads in the program; else the library "
        "was built without: ask for one with MPI_THREAD_MULTIPLE",
    )


def start(job: Job) -> Iterator[Finding]:
    """Find imports that take long."""
    slowest = max(job.facts, key=lambda each: each.start_seconds)
    slowest_mpi = max(job.facts, key=lambda each: each.mpi_seconds)
    rank = f" (rank {slowest.rank} on {slowest.host})" if len(job.facts) > 1 else ""
    took = f"imports took {slowest.start_seconds:.1f} s{rank}, MPI {slowest_mpi.mpi_seconds:.1f} s; from {slowest.home}"
    if slowest.start_seconds < _SLOW_SECONDS:
        yield Finding("start", OK, took)
        return
    fix = f"Is that a shared file system (findmnt -T {slowest.home})? Copy the environment to the nodes' own disks "
    fix += "first: mpistrategy slurm staged_env; or use a container. On a local disk: is the node busy?"
    yield Finding("start", NOTE, took, fix, (slowest.rank,))


_SLOW_SECONDS = 5.0


def sums(job: Job) -> Iterator[Finding]:
    """Find ranks that do not add up right."""
    if job.sums_right is None:
        if job.untried:
            yield Finding("sums", NOTE, f"not tried: {job.untried}", "Fix what is bad above first")
        return
    if job.sums_right:
        yield Finding("sums", OK, f"{job.facts[0].size} ranks meet and add up right")
        return
    elsewhere = line(job.facts[0].launcher, "without", host="NODE")
    yield Finding(
        "sums",
        BAD,
        "an all-reduce of known numbers came out wrong",
        f"Do not compute with this: another MPI, or other nodes ({elsewhere}); tell your cluster's support",
    )


def leftovers(job: Job) -> Iterator[Finding]:
    """Find what killed jobs have left on a node: memory that nobody else can have; folders that keep mpiexec off."""
    for ranks in job.nodes.values():
        first = ranks[0]
        left = next((each.leftovers for each in ranks if each.leftovers), "")
        if left:
            found = f"{left} on {first.host}, of jobs of yours that were killed; no running job uses them"
            if "Open MPI" in left:
                found += ". An mpiexec that gets the number of such a job does not start"
            fix = "mpistrategy doctor --remove-leftovers"
            if first.host != job.facts[0].host:
                by_slurm = first.launcher == "srun"
                fix = f"{f'srun --overlap -N1 -n1 -w {first.host}' if by_slurm else f'ssh {first.host}'} {fix}"
            yield Finding("leftovers", NOTE, found, fix, tuple(each.rank for each in ranks))


def _places(libraries: Sequence[str]) -> list[str]:
    """Return one file for each folder that MPI libraries were loaded from."""
    found: dict[str, str] = {}
    for path in libraries:
        found.setdefault(os.path.dirname(path), path)
    return list(found.values())


_FAMILIES = (r"Open MPI|IBM Spectrum|HPC-X", r"MPICH|Intel|CRAY MPICH|MVAPICH|ParaStation")


def _fits(built_for: str, loaded: str) -> bool:
    """Return whether a library can serve an mpi4py that was built for another one: those of one family can."""
    family, other = (
        next((each for each in _FAMILIES if re.search(each, name, re.IGNORECASE)), None) for name in (built_for, loaded)
    )
    return family is None or other is None or family == other


def _is_named(each: Facts) -> bool:
    """Return whether the library that MPI4PY_LIBMPI names is the one that is loaded."""
    if "/" in each.wanted:
        return each.wanted in each.libraries
    return any(os.path.basename(path).startswith(each.wanted.removesuffix(".so")) for path in each.libraries)
