"""Is this one job of as many ranks as were started, do launcher and MPI use the same PMI, and who is on which node?"""

from __future__ import annotations

import re

from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, Finding, Job, by, count, ranks_of
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


def local_rank(job: Job) -> list[Finding]:
    """Find local ranks that the launcher's variables give wrongly, such as 0 on every rank."""
    findings = []
    for name in sorted({name for each in job.facts for name in each["local_hints"]}):
        off = [each for each in job.facts if each["local_hints"].get(name, each["local_rank"]) != each["local_rank"]]
        if off:
            one = off[0]
            found = f"{name} is {one['local_hints'][name]} on rank {one['rank']}, of which the place on its node is "
            found += f"{one['local_rank']}. Programs that choose a GPU by it share one; this library asks MPI instead"
            fix = "In programs and wrappers of yours ask MPI: COMM_WORLD.Split_type(COMM_TYPE_SHARED).rank"
            findings.append(Finding("local rank", NOTE, found, fix, tuple(ranks_of(off))))
    most = max(each["local_size"] for each in job.facts)
    return findings or [Finding("local rank", OK, f"0 to {most - 1} on each node" if most > 1 else "0 everywhere")]
