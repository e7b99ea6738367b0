"""`mpistrategy doctor --job ID`: what the ranks of a running job are doing, and which have not come or come late."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mpistrategy.cli.doctor.checks.finding import count
from mpistrategy.cli.doctor.report.privacy import covered, veil
from mpistrategy.cli.doctor.running_job import all_nodes, last_calls, node_view, slurm_job
from mpistrategy.cli.doctor.running_job.last_calls import Lateness, NodeCalls
from mpistrategy.cli.doctor.running_job.node_view import Seen
from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.mpi.watchdog.local_process import node_name
from mpistrategy.mpi.watchdog.roll_call import absent_in_words
from mpistrategy.objects.text import printable

#: Waits of so many seconds, or of a tenth of the timeout, are reported.
_LONG_SECONDS = 10.0
#: Watchdogs write once a second: a shorter wait may be over.
_SHORT_SECONDS = 2.0
_MOST_ROWS = 64
_MOST_TROUBLES = 8
_HANGS, _COULD_NOT = 1, 2
_MEMORY = "the memory that its ranks share"
_MYSELF = (sys.executable, "-m", "mpistrategy", "doctor")


@dataclass
class Told:
    """What is known of a job.

    Attributes:
        title: what it is called.
        source: where that is from.
        seen: its ranks.
        calls: when they came to their last collectives.
        trouble: why nothing more is known.
        troubles: what was not seen, and why.
        job: its number for Slurm; "" for none.
        one_node: whether other nodes than this one were not looked at.
    """

    title: str
    source: str
    seen: Sequence[Seen] = ()
    calls: Sequence[NodeCalls] = ()
    trouble: str = ""
    troubles: Sequence[str] = ()
    job: str = ""
    one_node: bool = False

    @property
    def unheard(self) -> int:
        """How many ranks the job's largest strategy has of which nothing is known, as far as its collectives tell."""
        return max(0, max((each.ranks for each in self.calls), default=0) - len(self.seen))


def run(options: argparse.Namespace) -> int:
    """Tell about the job that the options name; return 0 when nothing hangs, 1 when something does, 2 if unknown."""
    hint = ""
    if options.pid:
        view = node_view.of_process(options.pid)
        title = f"the job of process {options.pid}"
        told = Told(title, _MEMORY, view.seen, view.calls, trouble=view.trouble, one_node=True)
    else:
        if not slurm_job.is_id(options.job):
            return _fail(f"{options.job!r} is not the number of a job; expected 17, 17.0 or 17_2")
        job = slurm_job.ask(options.job)
        told = _of(job)
        told.title = f"job {options.job}" + (f" ({job.state})" if job.state else "")
        if job.nodes and not told.seen:
            hint = shlex.join([*all_nodes.step(job.number), "--nodes=1", "--ntasks=1", *_MYSELF, "--job", job.number])
    if told.troubles:
        _say("\n".join(f"mpistrategy doctor: not seen: {each}" for each in told.troubles[:_MOST_TROUBLES]))
    if not told.seen:
        return _fail(f"{told.title}: {told.trouble or f'nothing is known of its ranks in {told.source}'}", hint)
    cover = veil(os.environ)
    late = last_calls.compare(told.calls)
    if options.json:
        shown = {"format": 1, "job": told.title, "source": told.source, "hangs": hangs(told.seen)}
        ranks, slow = [asdict(each) for each in told.seen], [{**asdict(each), "slow": each.slow()} for each in late]
        shown |= {"ranks": ranks, "last_calls": slow}
        print(json.dumps(covered(shown, cover), indent=1))
    else:
        print(printable(cover("\n".join(lines(told, late)))))
    return _HANGS if hangs(told.seen) else 0


def _of(job: slurm_job.SlurmJob) -> Told:
    """Return what is known of a Slurm job."""
    troubles: Sequence[str] = ()
    if job.state == "RUNNING" and job.count:
        live = all_nodes.look(job.number, job.count)
        troubles = live.troubles
        if live.seen:
            nodes = f"{_MEMORY} on {count(job.count, 'node')}"
            return Told("", nodes, live.seen, live.calls, troubles=troubles, job=job.number)
    view = node_view.of_slurm_job(job.number)
    if view.seen:
        here = f"{_MEMORY} on this node"
        return Told("", here, view.seen, view.calls, troubles=troubles, job=job.number, one_node=True)
    why = "; ".join(filter(None, (job.trouble, view.trouble)))
    folder = os.path.join(os.environ.get(run_directory.VARIABLE) or job.folder, f"{run_directory.PREFIX}{job.number}-*")
    ended = f"If it has ended because a collective was late, its roll call is {folder}/{run_directory.ROLL_CALL}"
    return Told("", "", trouble=f"{why}. {ended}", troubles=troubles)


def hangs(seen: Sequence[Seen]) -> bool:
    """Return whether a rank waits for long, or no longer answers."""
    return any(_waits(each) > _long(each) or each.silent for each in seen)


def _long(each: Seen) -> float:
    return min(_LONG_SECONDS, each.limit / 10) if each.limit else _LONG_SECONDS


def _waits(each: Seen) -> float:
    """Return for how long a rank has waited by now."""
    return each.waited + each.age if each.waited and not each.silent else each.waited


def lines(told: Told, late: Sequence[Lateness] = ()) -> list[str]:
    """Return the report."""
    seen = told.seen
    shown = [f"{told.title}: {count(len(seen), 'rank')} heard of, in {told.source}"]
    missing = [each for each in seen if not each.waited or each.silent]
    most = seen if len(seen) <= _MOST_ROWS else sorted(seen, key=lambda each: bool(each.waited))[:_MOST_ROWS]
    shown += [f"  rank {each.rank:<4} {_state(each):<16} {each.text}{_said(each)}" for each in most]
    if len(seen) > _MOST_ROWS:
        shown.append(f"  and {len(seen) - _MOST_ROWS} more")
    hosts = {each.rank: each.host for each in seen}
    for each in late:
        shown += last_calls.lines(each, hosts)
        slow = each.slow()
        if not hangs(seen):
            shown += _cures([rank for rank in seen if rank.rank == slow], told.job)
    if not hangs(seen):
        return [*shown, "No rank has waited for long: nothing hangs."]
    longest = max(seen, key=_waits)
    waiting = [each for each in seen if each.waited and not each.silent]
    here = " of this node" if told.one_node and (told.unheard or not told.calls) else ""
    if missing:
        absent = absent_in_words([each.rank for each in missing], [each.rank for each in missing if each.silent])
        shown.append(f"{len(waiting)} of {len(seen)} ranks{here} wait{absent}.")
    elif here or told.unheard:
        shown.append(f"{len(waiting)} of {len(seen)} ranks{here} wait: for ranks that are not known to have come.")
    else:
        shown.append(
            f"All {len(seen)} ranks wait: in calls that do not fit together, or for a network that has stopped."
        )
    if told.unheard or here:
        others = count(told.unheard, "rank") if told.unheard else "ranks"
        shown.append(f"Nothing is known of {others} on other nodes: call `mpistrategy doctor --pid` there.")
    shown += _cures(missing or [longest], told.job)
    if longest.waited and longest.limit:
        left = longest.limit - _waits(longest)
        if left > 0:
            shown.append(
                f"The job ends by itself, with a roll call, {left:.0f} s from now (timeout {longest.limit:g} s)."
            )
    return shown


def _cures(ranks: Sequence[Seen], job: str) -> list[str]:
    """Return the line that shows the stacks of the first of these ranks that can."""
    stacks = next((each for each in ranks if each.shows_stacks and not each.silent), None)
    if stacks is None:
        return []
    return [
        f"  -> where rank {stacks.rank} is, in full, in the job's stderr (the job goes on):",
        f"     {line_for_stacks(stacks, job)}",
    ]


def line_for_stacks(rank: Seen, job: str) -> str:
    """Return the command that makes a rank print its stacks, to be pasted where doctor was called.

    Args:
        rank: the rank.
        job: the number of its Slurm job; "" for none.
    """
    signal = ["kill", "-QUIT", str(rank.process)]
    if job and rank.host:
        return shlex.join([*all_nodes.step(job), "--nodes=1", "--ntasks=1", "-w", rank.host, *signal])
    if rank.host == node_name():
        return shlex.join(signal)
    return shlex.join(["ssh", rank.host, *signal])


def _state(each: Seen) -> str:
    if each.silent:
        return "does not answer"
    if each.waited:
        return f"waits {_waits(each):.0f} s" if each.waited + each.age > _SHORT_SECONDS else "in a collective"
    return "at its end" if each.text.startswith("at its end") else "elsewhere"


def _said(each: Seen) -> str:
    silent = f"; {each.silent}" if each.silent else ""
    return f"{silent}; {each.age:.0f} s ago" if each.age > 2 else silent


def _fail(text: str, hint: str = "") -> int:
    _say(f"mpistrategy doctor: {text}" + (f"\n  -> on its nodes: {hint}" if hint else ""))
    return _COULD_NOT


def _say(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")
