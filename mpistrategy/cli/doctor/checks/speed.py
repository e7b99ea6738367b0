"""Do the ranks add up right, how fast, and do their clocks agree?"""

from __future__ import annotations

from collections.abc import Iterator

from mpistrategy.cli.doctor.checks import layout
from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, OK, Finding
from mpistrategy.cli.doctor.checks.launch_lines import line
from mpistrategy.cli.doctor.checks.node import node_without_room_for_mpi
from mpistrategy.cli.doctor.facts.facts import Job, Speed

#: The measurements are short, and other programs may disturb them: only large differences are reported.
_FAR_OFF = 5.0
_LINK = "to "
_SLOW_LINK = 2.0
_CLOCK_NOTE, _CLOCK_BAD = 0.1, 60.0


def sums(job: Job) -> Iterator[Finding]:
    """Find ranks that do not add up right."""
    if job.sums_right is None:
        if job.untried:
            yield Finding("sums", NOTE, f"not tried: {job.untried}", "Fix what is bad above first")
        return
    size = job.facts[0].size
    if job.sums_right:
        yield Finding("sums", OK, f"{size} ranks meet and add up right")
    else:
        yield Finding(
            "sums",
            BAD,
            "an all-reduce of known numbers came out wrong",
            "Do not compute with this: another MPI, or other nodes "
            f"({line(job.facts[0].launcher, 'without', host='NODE')}); tell your cluster's support",
        )


def speed(job: Job) -> Iterator[Finding]:
    """Find transfers that are much slower than they should be."""
    for each in job.speeds:
        if each.expected and each.seconds > _FAR_OFF * each.expected:
            yield Finding(
                "speed",
                NOTE,
                f"{_in_words(each)}: {each.seconds / each.expected:.0f} times as slow",
                _cause(job),
            )
        elif not each.where.startswith(_LINK):
            yield Finding("speed", OK, _in_words(each))


def _cause(job: Job) -> str:
    """Return what to look at: a network only where there is one between the ranks."""
    if node_without_room_for_mpi(job):
        return "See shared memory above; and is something else running on these cores (top)?"
    network = ", or is it the wrong network (Open MPI: --mca btl_tcp_if_include; UCX_NET_DEVICES)"
    return (
        f"Is something else running on these cores (top){network * (len(job.nodes) > 1)}? "
        "If the machine is so: mpiexec -n N mpistrategy bench --save"
    )


def links(job: Job) -> Iterator[Finding]:
    """Find nodes that are reached much more slowly than the others."""
    links = [each for each in job.speeds if each.where.startswith(_LINK)]
    if not links or (layout.is_arbitrary(job) and layout.has_torn_hosts(job)):
        return
    usual = sorted(each.seconds for each in links)[len(links) // 2]
    worst = max(links, key=lambda each: each.seconds)
    host = worst.where.removeprefix(_LINK)
    if len(links) > 2 and worst.seconds > _SLOW_LINK * usual:  # two say nothing about each other
        yield Finding(
            "links",
            NOTE,
            f"{host} is {worst.seconds / usual:.1f} times as slow to reach as most nodes ({_rate(worst)})",
            f"Leave it out: {line(job.facts[0].launcher, 'without', host=host)}; and tell your cluster's support",
        )
    else:
        yield Finding("links", OK, f"from rank 0 to {len(links)} other node{'s' * (len(links) > 1)}: {_rate(worst)}")


def clock(job: Job) -> Iterator[Finding]:
    """Find nodes whose clocks are off."""
    if not job.clocks:
        return
    worst = max(job.clocks, key=lambda each: abs(each.offset))
    host = next((each.host for each in job.facts if each.rank == worst.rank), "?")
    ahead = "ahead of" if worst.offset > 0 else "behind"
    away = abs(worst.offset)
    text = f"{away * 1e3:.1f} ms" if away < 1 else f"{away:.1f} s"
    exact = f"(to {worst.error * 1e3:.2f} ms)"
    if away - worst.error < _CLOCK_NOTE:
        yield Finding("clock", OK, f"nodes agree within {text} {exact}")
        return
    yield Finding(
        "clock",
        BAD if away > _CLOCK_BAD else NOTE,
        f"the clock of {host} (rank {worst.rank}) is {text} {ahead} that of rank 0's node {exact}: file times, traces "
        "and the watchdogs' excuses between nodes are off by as much",
        f"Leave it out: {line(job.facts[0].launcher, 'without', host=host)}; its administrators: chronyc tracking",
        (worst.rank,),
    )


def _in_words(each: Speed) -> str:
    where = f", {each.where}" if each.where else ""
    expected = f" (expected {_in_units(each.nbytes / each.expected)})" if each.expected else ""
    return f"{each.what} of {each.nbytes / 2**20:g} MiB{where}: {_rate(each)}{expected}"


def _rate(each: Speed) -> str:
    return _in_units(each.nbytes / max(each.seconds, 1e-9))


def _in_units(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
