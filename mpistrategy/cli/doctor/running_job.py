"""`mpistrategy doctor --job ID`: what the ranks of a running job are doing, and which have not come or come late.

A Slurm job is looked at on all its nodes, from any machine that Slurm's commands work on: one step beside the job's own
runs this file on each node, which prints what is to be seen there in short lines: srun mixes the lines of several
nodes, and the pieces of long ones.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace

from mpistrategy.cli.doctor import last_calls, node_view
from mpistrategy.cli.doctor.findings import count
from mpistrategy.cli.doctor.last_calls import NodeCalls
from mpistrategy.cli.doctor.node_view import View
from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.mpi.watchdog.local_process import node_name
from mpistrategy.mpi.watchdog.roll_call import RollCall, as_data, statuses_in
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.text import decoded, printable

#: Waits of so many seconds, or of a tenth of the timeout, are reported.
_LONG_SECONDS = 10.0
#: Watchdogs write once a second.
_OLD_SECONDS = 2.0
_MOST_ROWS = 64
_MOST_TROUBLES = 8
_HANGS, _COULD_NOT = 1, 2
_PATIENCE_SECONDS = 40
_MOST_LETTERS = 700
_LINE = re.compile(r"^mpistrategy-view (\S+) (\d+)/(\d+) ([A-Za-z0-9+/=]*)$", re.M)


def run(options: argparse.Namespace) -> int:
    """Tell about the job that the options name; return 0 when nothing hangs, 1 when something does, 2 if unknown."""
    number, title = "", f"the job of process {options.pid}"
    if options.pid:
        view = node_view.of_processes([options.pid])
    else:
        number, title = options.job, f"job {options.job}"
        view = of_slurm_job(number)
    for trouble in view.troubles[:_MOST_TROUBLES]:
        sys.stderr.write(f"mpistrategy doctor: {title}: not seen: {printable(trouble)}\n")
    if not view.seen:
        return _COULD_NOT
    if options.json:
        late = [{**asdict(each), "slow": each.slow()} for each in last_calls.compare(view.calls)]
        shown = {"format": 1, "job": title, "hangs": hangs(view.seen), "ranks": as_data(view.seen), "last_calls": late}
        print(json.dumps(shown, indent=1))
    else:
        print(printable("\n".join(lines(title, view, number))))
    return _HANGS if hangs(view.seen) else 0


def of_slurm_job(named: str) -> View:
    """Return what is to be seen of a Slurm job on its nodes; never raises.

    Args:
        named: ``17``, or ``17_2`` of an array.
    """
    told, trouble = _answer_of(["squeue", "--noheader", "--format=%A %D", "--states=running", f"--jobs={named}"])
    jobs = [line.split() for line in told.splitlines()]
    if len(jobs) == 1:
        return _on_nodes(*jobs[0])
    if jobs:
        return View(troubles=[f"{named} is an array of {len(jobs)} jobs: name one, such as {named}_0"])
    above = os.environ.get(run_directory.VARIABLE) or "FOLDER OF THE JOB"
    file = os.path.join(above, f"{run_directory.PREFIX}{named}-*", run_directory.ROLL_CALL)
    # Slurm soon forgets a job that has ended.
    ended = f"if it has ended because a collective was late, its roll call is {file}"
    return View(troubles=[trouble or "it does not run", ended])


def step(number: str) -> list[str]:
    """Return the beginning of the command that runs something beside a job."""
    return ["srun", f"--jobid={number}", "--overlap"]


def _on_nodes(number: str, nodes: str) -> View:
    command = [*step(number), f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none"]
    told, trouble = _answer_of([*command, sys.executable, "-m", __name__, number])
    missing = int(nodes) - len({name for name, *_ in _LINE.findall(told)})
    view = read(told)
    if missing:
        return replace(view, troubles=[*view.troubles, f"{missing} of {nodes} nodes: {trouble or 'no answer'}"])
    return view


def _answer_of(command: Sequence[str]) -> tuple[str, str]:
    """Return what a command of Slurm prints, and why it fails; "" where it does not.  Never raises."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} cannot be asked here ({error})"
    trouble = f"{command[0]}: {decoded(done.stderr).strip()[-_MOST_LETTERS:]}" if done.returncode else ""
    return decoded(done.stdout), trouble


def read(output: str) -> View:
    """Return what the nodes have printed."""
    pieces: dict[str, dict[int, str]] = {}
    for name, number, parts, text in _LINE.findall(output):
        pieces.setdefault(name, dict.fromkeys(range(1, int(parts) + 1), "?"))[int(number)] = text
    seen, calls, troubles = list[RankStatus](), list[NodeCalls](), list[str]()
    for name, texts in pieces.items():
        try:
            told = json.loads(zlib.decompress(base64.b64decode("".join(texts.values()), validate=True)))
            seen += statuses_in(told["ranks"])
            for each in told["calls"]:
                arrivals = {int(number): tuple(arrival) for number, arrival in each.pop("arrivals").items()}
                calls.append(NodeCalls(**each, arrivals=arrivals))
            troubles += [f"{name}: {each}" for each in told["troubles"]]
        except (ValueError, TypeError, KeyError, zlib.error) as error:
            troubles.append(f"{name}: its answer cannot be read ({error})")
    return View(sorted(seen, key=lambda each: each.rank), calls, troubles)


def answer(view: View) -> list[str]:
    """Return the lines by which a node tells what it has seen."""
    told = {"ranks": as_data(view.seen), "calls": [asdict(each) for each in view.calls], "troubles": view.troubles}
    text = base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()
    pieces = [text[start : start + _MOST_LETTERS] for start in range(0, len(text), _MOST_LETTERS)]
    return [f"mpistrategy-view {node_name()} {part}/{len(pieces)} {piece}" for part, piece in enumerate(pieces, 1)]


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
    shown += map(_row, sorted(seen, key=lambda each: bool(each.waited) and len(seen) > _MOST_ROWS)[:_MOST_ROWS])
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
    shown += next(filter(None, (_cure(each, number) for each in away)), [])
    left = longest.limit - _waits(longest)
    if longest.waited and left > 0:
        shown.append(f"The job ends by itself, with a roll call, {left:.0f} s from now (timeout {longest.limit:g} s).")
    return shown


def _row(each: RankStatus) -> str:
    silent = f"does not answer: {each.silent}; it said: " if each.silent else ""
    ago = f"; {each.age:.0f} s ago" if each.age > _OLD_SECONDS else ""
    return f"  rank {each.rank:<4} {silent}{each.text}{ago}"


def _cure(each: RankStatus, number: str) -> list[str]:
    """Return the lines that say how a rank can be made to print its stacks, to be pasted where doctor was called."""
    if each.silent or not each.signal:
        return []
    command = ["kill", "-QUIT", str(each.process)]
    if number and each.host:
        command = [*step(number), "--nodes=1", "--ntasks=1", "-w", each.host, *command]
    elif each.host != node_name():
        command = ["ssh", each.host, *command]
    where = f"  -> where rank {each.rank} is, in full, in the job's stderr (the job goes on):"
    return [where, f"     {shlex.join(command)}"]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in answer(node_view.of_slurm_job(sys.argv[1]))))
