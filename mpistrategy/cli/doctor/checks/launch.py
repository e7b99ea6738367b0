"""Is this one job of as many ranks as were started, made of the same parts on all ranks, which add up right?"""

from __future__ import annotations

import os
import re

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, Finding, Job, by, count, in_words, odd_ones, ranks_of
from mpistrategy.objects.shown import ranks_in_words

#: What to type to a launcher for so many ranks; for others as for srun.
_LINES = {"": "srun --ntasks={0}, mpiexec -n {0}", "jsrun": "jsrun -n {0} -a 1", "flux run": "flux run -n {0}"}
#: How a launcher is told to offer a kind of PMI: for an MPI that speaks PMIx, and for others.
_SPEAK = {
    "srun": tuple(
        f"srun --mpi={kind}, or for all steps: export SLURM_MPI_TYPE={kind} (srun --mpi=list shows what there is)"
        for kind in ("pmix", "pmi2")
    ),
    "flux run": ("flux run -o pmi=pmix, which needs flux-pmix", "flux run -o pmi=simple"),
}
_PARTS = {name: name for name in ("python", "mpistrategy", "numpy", "mpi4py")} | {"library": "the MPI library"}


def launch(job: Job) -> list[Finding]:
    """Find programs of one rank each, ranks that are missing, and another number than was asked for."""
    first, name = job.facts[0], "launch"
    if job.missing:
        found = f"no answer from {ranks_in_words(job.missing)} of {first['size']} within {job.patience:.0f} s"
        fix = "Do they start at all? Look for their errors above, and at their nodes: srun --ntasks-per-node=1 hostname"
        return [Finding(name, BAD, found, fix, tuple(job.missing))]
    if first["refusal"]:
        found, fix = first["refusal"]
        return [Finding(name, BAD, f"{first['tasks']} programs of one rank each, not one job: {found}", fix)]
    ranks = count(first["size"], "rank")
    if job.wanted_ranks not in (0, first["size"]):
        start = _LINES.get(first["launcher"], _LINES[""])
        fix = f"Start {job.wanted_ranks}: {start.format(job.wanted_ranks)}"
        return [Finding(name, BAD, f"{ranks} where {job.wanted_ranks} were asked for", fix)]
    started = f"started by {first['launcher']} ({first['said']})" if first["launcher"] else "started by no launcher"
    return [Finding(name, OK, f"{ranks} in one job, {started}")]


def pmi(job: Job) -> list[Finding]:
    """Find a launcher that offers another kind of PMI than the MPI library speaks."""
    first, spoken = job.facts[0], speaks(job.facts[0]["library"])
    offered = " and ".join(first["pmi"])
    if first["refusal"] and not set(first["pmi"]) & set(spoken):
        library = first["library"] or "this MPI"
        offers = f"offers {offered} only" if offered else "offers none (--mpi=none?)"
        of_pmix, of_pmi = _SPEAK.get(first["launcher"], (f"Use the mpiexec that comes with {library}",) * 2)
        found = f"{first['launcher']} {offers}; {library} speaks {' or '.join(spoken)}"
        return [Finding("pmi", BAD, found, of_pmix if "PMIx" in spoken else of_pmi)]
    if first["size"] > 1 or offered:
        return [Finding("pmi", OK, f"the launcher offers {offered or 'a way of its own'}; the ranks met")]
    return []


def speaks(library: str) -> tuple[str, ...]:
    """Return how an MPI library lets its ranks meet."""
    found = re.match(r"Open MPI v?(\d+)", library)
    if found is None:
        return ("PMI",)
    return ("PMIx",) if int(found[1]) >= 5 else ("PMIx", "PMI")


def nodes(job: Job) -> list[Finding]:
    """Find ranks of one host that share no memory."""
    hosts, name = by(job.facts, "host"), "nodes"
    for host, ranks in hosts.items():
        parts = list(by(ranks, "leader").values())
        if len(parts) > 1:
            shown = " and ".join(ranks_in_words(ranks_of(part)) for part in parts[:4])
            found = f"{shown} are all on {host}, but share no memory: they would talk through the network"
            fix = (
                "Start one container for all ranks of a node, or let them share: docker run --ipc=host, apptainer "
                "without --containall; and a host name of its own for every node"
            )
            return [Finding(name, BAD, found, fix, tuple(ranks_of(ranks)))]
    named = [f"{count(len(ranks), 'rank')} on {host}" for host, ranks in hosts.items()]
    more = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    return [Finding(name, OK, f"{count(len(hosts), 'node')}: {', '.join(named[:4])}{more}")]


def versions(job: Job) -> list[Finding]:
    """Find ranks that run other versions than the rest."""
    findings = []
    for part, name in _PARTS.items():
        if found := job.with_several(part):
            odd = odd_ones(found)
            host = next(each["host"] for each in job.facts if each["rank"] in odd)
            told = f"different versions of {name}: {in_words(found)} ({host})"
            fix = (
                "Give all nodes one environment: the same venv, container or modules; on "
                f"{host}: which python3; echo $PYTHONPATH"
            )
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
        fix = (
            "Something loads a second one (an LD_PRELOAD, another package that is linked with MPI). Find it with: "
            f"LD_DEBUG=libs python3 program.py 2>&1 | grep {os.path.basename(paths[-1])}; and build all with one MPI"
        )
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
        fix = (
            "Set it before Python starts, to a library that is there; or take it away: unset MPI4PY_LIBMPI. "
            "An mpi4py that was built for one MPI does not heed it"
        )
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
    fix = (
        "unset MPI4PY_RC_THREAD_LEVEL, and no mpi4py.rc.thread_level or rc.threads in the program; else the library "
        "was built without: ask for one with MPI_THREAD_MULTIPLE"
    )
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
