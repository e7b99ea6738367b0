"""`mpistrategy doctor --job ID`: what the ranks of a running job are doing, for how long, and which have not come."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from mpistrategy.cli.doctor.checks.finding import count
from mpistrategy.cli.doctor.report.privacy import covered, veil
from mpistrategy.cli.doctor.running_job import node_view, run_files, slurm_job
from mpistrategy.cli.doctor.running_job.run_files import SILENT_SECONDS, Seen
from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.own_files import printable

#: Waits of so many seconds, or of a tenth of the timeout, are reported.
_LONG_SECONDS = 10.0
_MOST_ROWS = 64
_MOST_LEFT_OUT = 8
_HANGS, _COULD_NOT = 1, 2


def run(options: argparse.Namespace) -> int:
    """Tell about the job that the options name; return 0 when nothing hangs, 1 when something does, 2 if unknown."""
    seen: Sequence[Seen] = ()
    roll_call, hint, trouble = "", "", ""
    left_out: Sequence[str] = ()
    if options.run_dir:
        if not os.path.isdir(options.run_dir):
            return _fail(f"there is no folder {options.run_dir}")
        title, source = "the job", options.run_dir
        files = run_files.read(options.run_dir, time.time(), follow=True)
        seen, roll_call, left_out = files.seen, files.roll_call, files.left_out
    elif options.pid:
        title, source = f"the job of process {options.pid}", "the memory that its ranks share"
        view = node_view.of_process(options.pid)
        seen, trouble = view.seen, view.trouble
    else:
        if not slurm_job.is_id(options.job):
            return _fail(f"{options.job!r} is no number of a job; expected 17, 17.0 or 17_2")
        job = slurm_job.ask(options.job)
        title = f"job {options.job}" + (f" ({job.state})" if job.state else "")
        seen, roll_call, source, trouble, left_out = _of(job)
        if job.nodes and not seen:
            hint = f"srun --jobid={job.number} --overlap --nodes=1 --ntasks=1 {_myself()} --job {job.number}"
    if left_out:
        _say("\n".join(f"mpistrategy doctor: left out {each}" for each in left_out[:_MOST_LEFT_OUT]))
    if not seen and not roll_call:
        return _fail(f"{title}: {trouble or f'nothing is known of its ranks in {source}'}", hint)
    cover = veil(os.environ)
    if options.json:
        told = {"format": 1, "job": title, "source": source, "hangs": hangs(seen), "ranks": [asdict(e) for e in seen]}
        print(json.dumps(covered({**told, "roll_call": roll_call}, cover), indent=1))
    else:
        print(printable(cover("\n".join(lines(title, source, seen, roll_call)))))
    return _HANGS if hangs(seen) or roll_call else 0


def _of(job: slurm_job.SlurmJob) -> tuple[Sequence[Seen], str, str, str, list[str]]:
    """Return the ranks of a Slurm job, its roll call, their source, what prevents more, and what was left out."""
    places = [os.environ.get(run_directory.VARIABLE, ""), job.folder, os.getcwd()]
    left_out: list[str] = []
    for folder in run_files.folders_of(job.number, places):
        files = run_files.read(folder, time.time())
        left_out += files.left_out
        if files.seen or files.roll_call:
            return files.seen, files.roll_call, files.folder, "", left_out
    view = node_view.of_slurm_job(job.number)
    if view.seen:
        return view.seen, "", "the memory that its ranks share on this node", "", left_out
    looked = " and ".join(dict.fromkeys(filter(None, places)))
    trouble = f"no mpistrategy-run-{job.number}-* in {looked} (--run-dir names another); {view.trouble}"
    return (), "", "", f"{job.trouble}; {trouble}" if job.trouble else trouble, left_out


def hangs(seen: Sequence[Seen]) -> bool:
    """Return whether a rank waits for long, or no longer answers."""
    return any(_waits(each) > _long(each) or each.silent or each.age > SILENT_SECONDS for each in seen)


def _long(each: Seen) -> float:
    return min(_LONG_SECONDS, each.limit / 10) if each.limit else _LONG_SECONDS


def _waits(each: Seen) -> float:
    """Return for how long a rank has waited by now."""
    return each.waited + each.age if each.waited and not each.silent else each.waited


def lines(title: str, source: str, seen: Sequence[Seen], roll_call: str) -> list[str]:
    """Return the report."""
    told = [f"{title}: {count(len(seen), 'rank')} heard of, in {source}"]
    missing = [each for each in seen if not each.waited or each.silent]
    shown = seen if len(seen) <= _MOST_ROWS else sorted(seen, key=lambda each: bool(each.waited))[:_MOST_ROWS]
    told += [f"  rank {each.rank:<4} {_state(each):<16} {each.text}{_said(each)}" for each in shown]
    if len(seen) > _MOST_ROWS:
        told.append(f"  and {len(seen) - _MOST_ROWS} more")
    if roll_call:
        told += ["The job has ended because of it; what it said:", *(f"  {line}" for line in roll_call.splitlines())]
        return told
    longest = max(seen, key=_waits)
    if not hangs(seen):
        told.append("No rank has waited for long: nothing hangs.")
        return told
    waiting = [each for each in seen if each not in missing]
    if missing and waiting:
        ranks = ranks_in_words([each.rank for each in missing])
        told.append(f"{len(waiting)} of {len(seen)} ranks wait; not come: {ranks}.")
    elif not missing:
        told.append(
            f"All {len(seen)} ranks wait: in calls that do not fit together, or for a network that has stopped."
        )
    told += _cures(missing or [longest])
    if longest.waited and longest.limit:
        left = longest.limit - _waits(longest)
        if left > 0:
            told.append(
                f"The job ends by itself, with a roll call, {left:.0f} s from now (timeout {longest.limit:g} s)."
            )
    return told


def _cures(missing: Sequence[Seen]) -> list[str]:
    stacks = next((each for each in missing if each.shows_stacks and not each.silent), None)
    if stacks is None:
        return []
    return [
        f"  -> where rank {stacks.rank} is, in full, in the job's stderr: kill -QUIT {stacks.process}, on its node; "
        "the job goes on"
    ]


def _state(each: Seen) -> str:
    if each.silent:
        return "does not answer"
    if each.age > SILENT_SECONDS:
        return f"silent {each.age:.0f} s"
    if each.waited:
        return f"waits {_waits(each):.0f} s"
    return "at its end" if each.text.startswith("at its end") else "elsewhere"


def _said(each: Seen) -> str:
    silent = f"; {each.silent}" if each.silent else ""
    return f"{silent}; {each.age:.0f} s ago" if each.age > 2 else silent


def _myself() -> str:
    return f"{sys.executable} -m mpistrategy doctor"


def _fail(text: str, hint: str = "") -> int:
    _say(f"mpistrategy doctor: {text}" + (f"\n  -> on its nodes: {hint}" if hint else ""))
    return _COULD_NOT


def _say(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")
