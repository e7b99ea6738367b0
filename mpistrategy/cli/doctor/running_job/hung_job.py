"""`mpistrategy doctor --job ID`: what the ranks of a running job are doing, and which have not come or come late."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from mpistrategy.cli.doctor.checks.finding import count
from mpistrategy.cli.doctor.report.privacy import covered, veil
from mpistrategy.cli.doctor.running_job import all_nodes, last_calls, node_view, slurm_job
from mpistrategy.cli.doctor.running_job.node_view import View
from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.mpi.watchdog.local_process import node_name
from mpistrategy.mpi.watchdog.roll_call import RollCall, as_data
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.text import printable

#: Waits of so many seconds, or of a tenth of the timeout, are reported.
_LONG_SECONDS = 10.0
#: Watchdogs write once a second.
_OLD_SECONDS = 2.0
_MOST_ROWS = 64
_MOST_TROUBLES = 8
_HANGS, _COULD_NOT = 1, 2


def run(options: argparse.Namespace) -> int:
    """Tell about the job that the options name; return 0 when nothing hangs, 1 when something does, 2 if unknown."""
    if options.pid:
        view, title, number = node_view.of_processes([options.pid]), f"the job of process {options.pid}", ""
    else:
        job = slurm_job.ask(options.job)
        view, title, number = _of(job), f"job {options.job}" + (f" ({job.state})" if job.state else ""), job.number
    for trouble in view.troubles[:_MOST_TROUBLES]:
        sys.stderr.write(f"mpistrategy doctor: {title}: not seen: {printable(trouble)}\n")
    if not view.seen:
        return _COULD_NOT
    cover = veil(os.environ)
    if options.json:
        late = [{**asdict(each), "slow": each.slow()} for each in last_calls.compare(view.calls)]
        shown = {"format": 1, "job": title, "hangs": hangs(view.seen), "ranks": as_data(view.seen), "last_calls": late}
        print(json.dumps(covered(shown, cover), indent=1))
    else:
        print(printable(cover("\n".join(lines(title, view, number)))))
    return _HANGS if hangs(view.seen) else 0


def _of(job: slurm_job.SlurmJob) -> View:
    """Return what is to be seen of a Slurm job: on its nodes, or else on this one."""
    live = all_nodes.look(job.number, job.nodes) if job.state == "RUNNING" and job.nodes else View()
    if live.seen:
        return live
    here = node_view.of_slurm_job(job.number)
    troubles = [*filter(None, [job.trouble]), *live.troubles, *here.troubles]
    if not here.seen:
        above = os.environ.get(run_directory.VARIABLE) or job.folder
        file = os.path.join(above, f"{run_directory.PREFIX}{job.number}-*", run_directory.ROLL_CALL)
        troubles.append(f"if it has ended because a collective was late, its roll call is {file}")
    return View(here.seen, here.calls, troubles)


def hangs(seen: Sequence[RankStatus]) -> bool:
    """Return whether a rank waits for long, or no longer answers."""
    return any(_waits(each) > min(_LONG_SECONDS, each.limit / 10) or each.silent for each in seen)


def _waits(each: RankStatus) -> float:
    """Return for how long a rank has waited by now."""
    return each.waited + each.age if each.waited and not each.silent else each.waited


def lines(title: str, view: View, number: str = "") -> list[str]:
    """Return the report.

    Args:
        title: what the job is called.
        view: what is to be seen of it.
        number: of the Slurm job; "" for none.
    """
    seen, late = view.seen, last_calls.compare(view.calls)
    nodes = count(len({each.host for each in seen}), "node")
    shown = [f"{title}: {count(len(seen), 'rank')} heard of, in the memory that its ranks share on {nodes}"]
    most = seen if len(seen) <= _MOST_ROWS else sorted(seen, key=lambda each: bool(each.waited))[:_MOST_ROWS]
    shown += map(_row, most)
    if len(seen) > _MOST_ROWS:
        shown.append(f"  and {len(seen) - _MOST_ROWS} more")
    for each in late:
        shown += last_calls.lines(each, {rank.rank: rank.host for rank in seen})
    if not hangs(seen):
        slow = {each.slow() for each in late}
        cures = [line for each in seen if each.rank in slow for line in _cure(each, number)]
        return [*shown, *cures, "No rank has waited for long: nothing hangs."]
    called, unheard = RollCall(seen, [each.rank for each in seen]), max((each.missing for each in late), default=0)
    shown.append(called.summary)
    if unheard > 0:
        shown.append(f"Of these ranks alone: {count(unheard, 'rank')} of the job are on nodes that were not looked at.")
    longest = max(seen, key=_waits)
    away = [each for each in seen if each.rank in called.missing] or [longest]
    shown += next((cure for each in away if (cure := _cure(each, number))), [])
    if 0 < longest.waited < longest.limit - longest.age:
        left, limit = longest.limit - _waits(longest), longest.limit
        shown.append(f"The job ends by itself, with a roll call, {left:.0f} s from now (timeout {limit:g} s).")
    return shown


def _row(each: RankStatus) -> str:
    silent = f"does not answer: {each.silent}; it said: " if each.silent else ""
    return f"  rank {each.rank:<4} {silent}{each.text}" + (f"; {each.age:.0f} s ago" if each.age > _OLD_SECONDS else "")


def _cure(each: RankStatus, number: str) -> list[str]:
    """Return the lines that say how a rank can be made to print its stacks, to be pasted where doctor was called."""
    if each.silent or not each.signal:
        return []
    command = ["kill", "-QUIT", str(each.process)]
    if number and each.host:
        command = [*all_nodes.step(number), "--nodes=1", "--ntasks=1", "-w", each.host, *command]
    elif each.host != node_name():
        command = ["ssh", each.host, *command]
    where = f"  -> where rank {each.rank} is, in full, in the job's stderr (the job goes on):"
    return [where, f"     {shlex.join(command)}"]
