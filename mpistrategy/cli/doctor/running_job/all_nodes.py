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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpistrategy.cli.doctor.running_job import node_view
from mpistrategy.cli.doctor.running_job.last_calls import NodeCalls
from mpistrategy.cli.doctor.running_job.node_view import Seen
from mpistrategy.cli.doctor.running_job.slurm_job import answer_of
from mpistrategy.mpi.watchdog.local_process import node_name
from mpistrategy.objects.text import printable

_PATIENCE_SECONDS = 40
_MOST_LETTERS = 700
_LINE = re.compile(r"^mpistrategy-view (\S+) (\d+)/(\d+) ([A-Za-z0-9+/=]*)$", re.M)
_MOST_BYTES = 2**26


@dataclass(frozen=True)
class JobView:
    """What is to be seen on the nodes of a job.

    Attributes:
        seen: the ranks.
        calls: when they came to their last collectives, for each node and strategy.
        troubles: what was not seen, and why.
    """

    seen: tuple[Seen, ...] = ()
    calls: tuple[NodeCalls, ...] = ()
    troubles: tuple[str, ...] = ()


def look(number: str, nodes: int) -> JobView:
    """Return what is to be seen on the nodes of a running job; never raises.

    Args:
        number: of the job.
        nodes: how many it has.
    """
    command = [*step(number), f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none"]
    command += [sys.executable, "-m", __spec__.name, number]
    try:
        done = answer_of(command, _PATIENCE_SECONDS)
    except OSError as error:
        return JobView((), (), (f"its nodes: {error.strerror or error}",))
    view = read(done.stdout)
    missing = nodes - len({name for name, *_ in _LINE.findall(done.stdout)})
    if not missing:
        return view
    why = printable((done.stderr.strip().splitlines() or ["no answer"])[-1])
    return JobView(view.seen, view.calls, (*view.troubles, f"{missing} of {nodes} nodes: {why}"))


def step(number: str) -> list[str]:
    """Return the beginning of the command that runs something beside a job."""
    return ["srun", f"--jobid={number}", "--overlap"]


def read(output: str) -> JobView:
    """Return what the nodes have printed."""
    parts: dict[str, dict[int, tuple[int, str]]] = {}
    for name, part, count, text in _LINE.findall(output):
        parts.setdefault(name, {})[int(part)] = int(count), text
    seen: list[Seen] = []
    calls: list[NodeCalls] = []
    troubles = []
    for name, pieces in parts.items():
        try:
            if len(pieces) != pieces[1][0]:
                raise ValueError("a part of it is missing")
            packed = base64.b64decode("".join(pieces[each][1] for each in sorted(pieces)), validate=True)
            told = json.loads(zlib.decompressobj().decompress(packed, _MOST_BYTES))
            here = [_seen(each) for each in told["seen"]]
            of_all = [NodeCalls.read(each) for each in told["calls"]]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, zlib.error) as error:
            troubles.append(f"{name}: its answer cannot be read ({error})")
            continue
        seen += here
        calls += of_all
        if not here:
            troubles.append(f"{name}: {printable(str(told['trouble']))}")
    return JobView(tuple(sorted(seen, key=lambda each: each.rank)), tuple(calls), tuple(troubles))


def _seen(told: Any) -> Seen:
    texts = {name: printable(str(told[name]), "") for name in ("text", "silent", "host")}
    return Seen(**{**told, **texts})


def answer(view: node_view.View) -> list[str]:
    """Return the lines by which a node tells what it has seen."""
    told = {"seen": [asdict(each) for each in view.seen], "calls": _as_json(view.calls), "trouble": view.trouble}
    text = base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()
    pieces = [text[start : start + _MOST_LETTERS] for start in range(0, len(text), _MOST_LETTERS)]
    name = node_name()
    return [f"mpistrategy-view {name} {part}/{len(pieces)} {piece}" for part, piece in enumerate(pieces, 1)]


def _as_json(calls: Sequence[NodeCalls]) -> list[dict[str, Any]]:
    return [asdict(each) | {"arrivals": {number: list(at) for number, at in each.arrivals.items()}} for each in calls]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in answer(node_view.of_slurm_job(sys.argv[1]))))
