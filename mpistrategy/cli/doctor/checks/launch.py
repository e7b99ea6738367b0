"""Is this one job of as many ranks as were started, made of the same parts on all ranks, which add up right?"""

from __future__ import annotations

import os
import re

from mpistrategy.cli.doctor.findings import (
    BAD,
    NOTE,
    OK,
    Finding,
    Job,
    by,
    count,
    finding_of,
    ranks_of,
)
from mpistrategy.objects.shown import ranks_in_words

#: The command of a launcher for so many ranks; other launchers as srun.
_LINES = {"": "srun --ntasks={0}, mpiexec -n {0}", "jsrun": "jsrun -n {0} -a 1", "flux run": "flux run -n {0}"}
_PARTS = {name: name for name in ("python", "mpistrategy", "numpy", "mpi4py")} | {"library": "the MPI library"}


def launch(job: Job) -> list[Finding]:
    """Find programs of one rank each, missing ranks, and a wrong number of ranks."""
    first, expected = job.facts[0], job.wanted_ranks
    if job.missing:
        problem = f"no answer from {ranks_in_words(job.missing)} of {first['size']} within {job.patience:.0f} s"
        fix = "Do they start at all? Look for their errors above, and at their nodes: srun --ntasks-per-node=1 hostname"
        return [Finding("launch", BAD, problem, fix, tuple(job.missing))]
    offered = " and ".join(first["pmi"])
    if first["refusal"]:
        problem, fix = first["refusal"]
        spoken = _kinds_of_pmi(first["library"])
        if not {*first["pmi"]} & {*spoken}:
            problem += (
                f"; it offers {offered or 'no PMI'}, and {first['library'] or 'this MPI'} speaks {' or '.join(spoken)}"
            )
        if first["launcher"] == "srun":
            fix += " For all steps: export SLURM_MPI_TYPE with that kind; srun --mpi=list shows the kinds."
        return [Finding("launch", BAD, f"{first['tasks']} programs of one rank each, not one job: {problem}", fix)]
    ranks = count(first["size"], "rank")
    if expected not in (0, first["size"]):
        fix = _LINES.get(first["launcher"], _LINES[""]).format(expected)
        return [Finding("launch", BAD, f"{ranks} where {expected} were asked for", f"Start {expected}: {fix}")]
    started = "started by {launcher} ({said})" if first["launcher"] else "started by no launcher"
    meeting = f", which offers {offered}" if offered else ""
    return [Finding("launch", OK, f"{ranks} in one job, {started.format_map(first)}{meeting}")]


def _kinds_of_pmi(library: str) -> tuple[str, ...]:
    """Return how an MPI library lets its ranks meet."""
    match = re.match(r"Open MPI v?(\d+)", library)
    if match is None:
        return ("PMI",)
    return ("PMIx",) if int(match[1]) >= 5 else ("PMIx", "PMI")


def nodes(job: Job) -> list[Finding]:
    """Find ranks of one host that share no memory."""
    hosts = by(job.facts, "host")
    for ranks in hosts.values():
        parts = list(by(ranks, "leader").values())
        if len(parts) > 1:
            problem = "{parts} are all on {host}, but share no memory: they would talk through the network"
            fix = (
                "Start one container for all ranks of a node, or let them share: docker run --ipc=host, apptainer "
                "without --containall; and a host name of its own for every node"
            )
            groups = " and ".join(ranks_in_words(ranks_of(part)) for part in parts[:4])
            return [finding_of("nodes", BAD, ranks, problem, fix, parts=groups)]
    host_texts = [f"{count(len(ranks), 'rank')} on {host}" for host, ranks in hosts.items()][:4]
    more = " ..." if len(hosts) > len(host_texts) else ""
    return [Finding("nodes", OK, f"{count(len(hosts), 'node')}: {', '.join(host_texts)}{more}")]


def versions(job: Job) -> list[Finding]:
    """Find ranks that run other versions than the rest."""
    findings = []
    for part, name in _PARTS.items():
        words, odd = job.differing(part)
        if words:
            odd_facts = [rank for rank in job.facts if rank["rank"] in odd]
            fix = (
                "Give all nodes one environment: the same venv, container or modules; on {host}: which python3; echo "
                "$PYTHONPATH"
            )
            found = "different versions of {name}: {words} ({host})"
            findings.append(finding_of("versions", BAD, odd_facts, found, fix, name=name, words=words))
    text = "Python {python}, mpistrategy {mpistrategy}, NumPy {numpy}, mpi4py {mpi4py}".format_map(job.facts[0])
    return findings or [Finding("versions", OK, text)]


def library(job: Job) -> list[Finding]:
    """Find two MPIs in one process."""
    mixed = [rank for rank in job.facts if len(set(map(os.path.dirname, rank["libraries"]))) > 1]
    if not mixed:
        return [Finding("mpi", OK, " ".join((job.facts[0]["library"], *job.facts[0]["libraries"][:1])))]
    problem = "two MPIs in one process on {these_ranks}: {paths}"
    fix = (
        "Something loads a second one (an LD_PRELOAD, another package that is linked with MPI). Find it with: "
        "LD_DEBUG=libs python3 program.py 2>&1 | grep libmpi; and build all with one MPI"
    )
    return [finding_of("mpi", BAD, mixed, problem, fix, paths=" and ".join(mixed[0]["libraries"]))]


def thread_level(job: Job) -> list[Finding]:
    """Find an MPI that several threads must not call."""
    words, odd = job.differing("thread_level")
    if words:
        fix = "Set MPI4PY_RC_THREAD_LEVEL, or mpi4py.rc.thread_level, for all ranks alike, or for none"
        return [Finding("thread level", BAD, f"the ranks started MPI differently: {words}", fix, odd)]
    level = job.facts[0]["thread_level"]
    if level == "multiple":
        return [Finding("thread level", OK, "multiple: all_reduce_async works behind the program's back")]
    lower = f"{level}: only one thread may call MPI, so that all_reduce_async overlaps with nothing"
    fix = (
        "unset MPI4PY_RC_THREAD_LEVEL, and no mpi4py.rc.thread_level or rc.threads in the program; else the library "
        "was built without: ask for one with MPI_THREAD_MULTIPLE"
    )
    if level == "single":
        against = ", and a program with threads is against the rules of MPI"
        return [Finding("thread level", BAD, lower + against, fix)]
    return [Finding("thread level", NOTE, lower, fix)]


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
