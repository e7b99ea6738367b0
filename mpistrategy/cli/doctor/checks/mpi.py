"""Which MPI is in these processes, are all ranks made of the same parts, and do they add up right?"""

from __future__ import annotations

import os
import re

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, Finding, Job, in_words, odd_ones, ranks_of
from mpistrategy.objects.shown import ranks_in_words

_PARTS = {name: name for name in ("python", "mpistrategy", "numpy", "mpi4py")} | {"library": "the MPI library"}


def versions(job: Job) -> list[Finding]:
    """Find ranks that run other versions than the rest."""
    findings = []
    for part, name in _PARTS.items():
        if found := job.with_several(part):
            odd = odd_ones(found)
            host = next(each["host"] for each in job.facts if each["rank"] in odd)
            told = f"different versions of {name}: {in_words(found)} ({host})"
            fix = "Give all nodes one environment: the same venv, container or modules; on "
            fix += f"{host}: which python3; echo $PYTHONPATH"
            findings.append(Finding("versions", BAD, told, fix, odd))
    shown = "Python {python}, mpistrategy {mpistrategy}, NumPy {numpy}, mpi4py {mpi4py}".format_map(job.facts[0])
    return findings or [Finding("versions", OK, shown)]


def library(job: Job) -> list[Finding]:
    """Find two MPIs in one process, an mpi4py for another MPI, and another library than MPI4PY_LIBMPI names."""
    findings = []
    mixed = [each for each in job.facts if len({os.path.dirname(path) for path in each["libraries"]}) > 1]
    if mixed:
        paths = mixed[0]["libraries"]
        found = f"two MPIs in one process on {ranks_in_words(ranks_of(mixed))}: {' and '.join(paths)}"
        fix = "Something loads a second one (an LD_PRELOAD, another package that is linked with MPI). Find it with: "
        fix += f"LD_DEBUG=libs python3 program.py 2>&1 | grep {os.path.basename(paths[-1])}; and build all with one MPI"
        findings.append(Finding("mpi", BAD, found, fix, tuple(ranks_of(mixed))))
    foreign = [each for each in job.facts if _is_open_mpi(each["built_for"]) != _is_open_mpi(each["library"])]
    if foreign:
        built, loaded = foreign[0]["built_for"], foreign[0]["library"]
        found = f"mpi4py was built for {built}, and {loaded} is loaded on {ranks_in_words(ranks_of(foreign))}"
        fix = "Build it for this one: pip install --force-reinstall --no-binary=mpi4py mpi4py; or load the module of "
        findings.append(Finding("mpi", BAD, found, f"{fix}{built}", tuple(ranks_of(foreign))))
    unheard = [each for each in job.facts if each["libraries"] and not _is_heeded(each["wanted"], each["libraries"])]
    if unheard:
        found = f"MPI4PY_LIBMPI={unheard[0]['wanted']}, but {unheard[0]['libraries'][0]} is loaded on "
        fix = "Set it before Python starts, to a library that is there; or take it away: unset MPI4PY_LIBMPI. "
        fix += "An mpi4py that was built for one MPI does not heed it"
        ranks = ranks_of(unheard)
        findings.append(Finding("mpi", BAD, found + ranks_in_words(ranks), fix, tuple(ranks)))
    first = job.facts[0]
    place = f" ({first['libraries'][0]})" if first["libraries"] else ""
    return findings or [Finding("mpi", OK, f"{first['library']}{place}; mpi4py is built for {first['built_for']}")]


def _is_open_mpi(name: str) -> bool:
    """Return whether a library is of Open MPI's family: those of one family stand in for each other."""
    return re.match(r"Open MPI|IBM Spectrum|HPC-X", name, re.IGNORECASE) is not None


def _is_heeded(wanted: str, libraries: list[str]) -> bool:
    """Return whether the library that MPI4PY_LIBMPI names, if it names one, is among those that are loaded."""
    if "/" in wanted:
        return wanted in libraries
    return any(os.path.basename(path).startswith(wanted.removesuffix(".so")) for path in libraries)


def thread_level(job: Job) -> list[Finding]:
    """Find an MPI that several threads must not call."""
    name = "thread level"
    if found := job.with_several("thread_level"):
        fix = "Set MPI4PY_RC_THREAD_LEVEL, or mpi4py.rc.thread_level, for all ranks alike, or for none"
        return [Finding(name, BAD, f"the ranks started MPI differently: {in_words(found)}", fix, odd_ones(found))]
    level = job.facts[0]["thread_level"]
    if level == "multiple":
        return [Finding(name, OK, "multiple: all_reduce_async works behind the program's back")]
    told = f"{level}: only one thread may call MPI, so that all_reduce_async overlaps with nothing"
    if level == "single":
        told += ", and a program with threads is against the rules of MPI"
    fix = "unset MPI4PY_RC_THREAD_LEVEL, and no mpi4py.rc.thread_level or rc.threads in the program; else the library "
    fix += "was built without: ask for one with MPI_THREAD_MULTIPLE"
    return [Finding(name, BAD if level == "single" else NOTE, told, fix)]


def sums(job: Job) -> list[Finding]:
    """Find ranks that do not add up right."""
    if job.untried:
        return [Finding("sums", NOTE, f"not tried: {job.untried}", "Fix what is bad above first")]
    if job.sums_right is False:
        fix = "Do not compute with this: another MPI, or other nodes (srun --exclude=NODE); tell your cluster's support"
        return [Finding("sums", BAD, "an all-reduce of known numbers came out wrong", fix)]
    if job.sums_right is None:
        return []
    return [Finding("sums", OK, f"{job.facts[0]['size']} ranks meet and add up right")]
