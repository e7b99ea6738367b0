"""Looks at a Slurm job on all its nodes, from any machine that Slurm's commands work on: one step beside the job's own.

On each node the step runs this file, which prints what is to be seen there in short lines: srun mixes the lines of
several nodes, and the pieces of long ones.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import zlib
from dataclasses import asdict

from mpistrategy.cli.doctor.running_job import node_view
from mpistrategy.cli.doctor.running_job.last_calls import NodeCalls
from mpistrategy.cli.doctor.running_job.node_view import View
from mpistrategy.cli.doctor.running_job.slurm_job import answer_of
from mpistrategy.mpi.watchdog.local_process import node_name
from mpistrategy.mpi.watchdog.roll_call import as_data, statuses_in
from mpistrategy.mpi.watchdog.status_board import RankStatus

_PATIENCE_SECONDS = 40
_MOST_LETTERS = 700
_LINE = re.compile(r"^mpistrategy-view (\S+) (\d+)/(\d+) ([A-Za-z0-9+/=]*)$", re.M)


def look(number: str, nodes: int) -> View:
    """Return what is to be seen on the nodes of a running job; never raises.

    Args:
        number: of the job.
        nodes: how many it has.
    """
    command = [*step(number), f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none"]
    told, trouble = answer_of([*command, sys.executable, "-m", __spec__.name, number], _PATIENCE_SECONDS)
    view = read(told)
    missing = nodes - len({name for name, *_ in _LINE.findall(told)})
    troubles = [f"{missing} of {nodes} nodes: {trouble or 'no answer'}"] if missing else []
    return View(view.seen, view.calls, [*view.troubles, *troubles])


def step(number: str) -> list[str]:
    """Return the beginning of the command that runs something beside a job."""
    return ["srun", f"--jobid={number}", "--overlap"]


def read(output: str) -> View:
    """Return what the nodes have printed."""
    pieces: dict[str, dict[int, str]] = {}
    for name, number, count, text in _LINE.findall(output):
        pieces.setdefault(name, dict.fromkeys(range(1, int(count) + 1), "?"))[int(number)] = text
    seen, calls, troubles = list[RankStatus](), list[NodeCalls](), list[str]()
    for name, parts in pieces.items():
        try:
            told = json.loads(zlib.decompress(base64.b64decode("".join(parts.values()), validate=True)))
            seen += statuses_in(told["ranks"])
            calls += map(NodeCalls.read, told["calls"])
            troubles += [f"{name}: {each}" for each in told["troubles"]]
        except (ValueError, TypeError, KeyError, zlib.error) as error:
            troubles.append(f"{name}: its answer cannot be read ({error})")
    return View(sorted(seen, key=lambda each: each.rank), calls, troubles)


def answer(view: View) -> list[str]:
    """Return the lines by which a node tells what it has seen."""
    told = {"ranks": as_data(view.seen), "calls": [asdict(each) for each in view.calls], "troubles": view.troubles}
    text = base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()
    pieces = [text[start : start + _MOST_LETTERS] for start in range(0, len(text), _MOST_LETTERS)]
    name = node_name()
    return [f"mpistrategy-view {name} {part}/{len(pieces)} {piece}" for part, piece in enumerate(pieces, 1)]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in answer(node_view.of_slurm_job(sys.argv[1]))))
