"""Is this one job of as many ranks as were started, and do launcher and MPI use the same PMI?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding, count
from mpistrategy.cli.doctor.checks.launch_lines import line
from mpistrategy.cli.doctor.facts.facts import Facts, Job
from mpistrategy.objects.shown import ranks_in_words


def launch(job: Job) -> Iterator[Finding]:
    """Find programs of one rank each, ranks that are missing, and another number than was asked for."""
    first = job.facts[0]
    if job.missing:
        yield Finding(
            "launch",
            BAD,
            f"no answer from {ranks_in_words(job.missing)} of {first.size} within {job.patience:g} s",
            "Do they start at all? Look for their errors above, and at their nodes: "
            + line(first.launcher, "one each"),
            tuple(job.missing),
        )
        return
    if first.refusal:
        found, fix = first.refusal
        yield Finding("launch", BAD, f"{first.tasks} programs of one rank each, not one job: {found}", fix)
        return
    if job.wanted_ranks and first.size != job.wanted_ranks:
        yield Finding(
            "launch",
            BAD,
            f"{count(first.size, 'rank')} where {job.wanted_ranks} were asked for",
            f"Start {job.wanted_ranks}: {line(first.launcher, 'start', ranks=job.wanted_ranks)}",
        )
        return
    if first.size == 1:
        alone = f"one rank, started by {first.launcher}" if first.launcher else "one process, started by no launcher"
        yield Finding("launch", OK, alone)
        return
    by = f", started by {first.launcher} ({first.said})" if first.launcher else ""
    yield Finding("launch", OK, f"{first.size} ranks in one job{by}")


def pmi(job: Job) -> Iterator[Finding]:
    """Find a launcher that offers another kind of PMI than the MPI library speaks."""
    first = job.facts[0]
    offered, spoken = tuple(first.pmi), speaks(first.library)
    if first.refusal and not set(offered) & set(spoken):
        offers = f"offers {' and '.join(offered)} only" if offered else "offers none (--mpi=none?)"
        kind = "pmix" if "PMIx" in spoken else "pmi2"
        yield Finding(
            "pmi",
            BAD,
            f"{first.launcher} {offers}; {first.library or 'this MPI'} speaks {' or '.join(spoken)}",
            _speak(first.launcher, kind) or f"Use the mpiexec that comes with {first.library or 'the library'}",
        )
    elif first.size > 1 or offered:
        yield Finding("pmi", OK, f"the launcher offers {' and '.join(offered) or 'a way of its own'}; the ranks met")


def _speak(launcher: str, kind: str) -> str:
    """Return how a launcher is told to offer this kind of PMI; "" where it cannot be told."""
    if launcher == "srun":
        return (
            f"srun --mpi={kind}, or for all steps: export SLURM_MPI_TYPE={kind} (srun --mpi=list shows what there is)"
        )
    if launcher == "flux run":
        return "flux run -o pmi=pmix, which needs flux-pmix" if kind == "pmix" else "flux run -o pmi=simple"
    return ""


def speaks(library: str) -> tuple[str, ...]:
    """Return how an MPI library lets its ranks meet."""
    found = re.match(r"Open MPI v?(\d+)", library)
    if found:
        return ("PMIx",) if int(found[1]) >= 5 else ("PMIx", "PMI")
    return ("PMI",)


_KNOWN_WRONG = "Programs that choose a GPU or a file by it all take the same."


def local_rank(job: Job) -> Iterator[Finding]:
    """Find local ranks that the launcher's variables give wrongly, such as 0 on every rank."""
    told = sorted({name for each in job.facts for name in each.local_hints})
    wrong: dict[str, list[Facts]] = {}
    for name in told:
        off = [each for each in job.facts if each.local_hints.get(name, each.local_rank) != each.local_rank]
        if off:
            wrong[name] = off
    if not wrong:
        most = max(each.local_size for each in job.facts)
        shown = f" ({', '.join(told)} say{'s' * (len(told) == 1)} the same)" if told else ""
        yield Finding("local rank", OK, f"0 to {most - 1} on each node{shown}" if most > 1 else f"0 everywhere{shown}")
        return
    right = next((name for name in told if name not in wrong), None)
    for name, off in wrong.items():
        values = {each.local_hints[name] for each in job.facts if name in each.local_hints}
        all_zero = values == {0}
        found = (
            f"{name} is 0 in all ranks, of which a node has up to {max(each.local_size for each in job.facts)}"
            if all_zero
            else f"{name} is not the place on the node, on {ranks_in_words([each.rank for each in off])}"
        )
        others = f"take {right} in its place, or " if right else ""
        yield Finding(
            "local rank",
            NOTE,
            f"{found}: mpiexec inside of a Slurm job? {_KNOWN_WRONG} This library asks MPI instead"
            if name == "SLURM_LOCALID"
            else f"{found}. {_KNOWN_WRONG} This library asks MPI instead",
            f"In programs and wrappers of yours {others}ask MPI: COMM_WORLD.Split_type(COMM_TYPE_SHARED).rank",
            tuple(each.rank for each in off),
        )
