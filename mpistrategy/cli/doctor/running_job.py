"""`mpistrategy doctor --job ID`: the states of the ranks of a running job, and which ranks are missing or late.

A node sends only a few numbers a collective: when its first and its last rank came, and the last rank's number.  Nodes
have clocks of their own: a difference of the clocks makes the waits wrong by as much.

The command works on any machine that has Slurm's commands.  An extra job step runs this file on each node of the job;
the file prints the state of the node's ranks.  Its lines are short, since srun mixes pieces of long lines.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from mpistrategy.cli.doctor import node_view
from mpistrategy.cli.doctor.findings import count
from mpistrategy.cli.doctor.node_view import NodeCalls, View
from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.mpi.watchdog.local_process import node_name
from mpistrategy.mpi.watchdog.roll_call import RollCall, as_data, statuses_in
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.shown import time_in_words
from mpistrategy.objects.text import decoded, printable

#: Waits of so many seconds, or of a tenth of the timeout, are reported.
_LONG_SECONDS = 10.0
#: Watchdogs write once a second.
_OLD_SECONDS = 2.0
_MOST_ROWS = 64
_HANGS, _COULD_NOT = 1, 2
_PATIENCE_SECONDS = 40
_MOST_LETTERS = 700
_LINE = re.compile(r"^mpistrategy-view (\S+) (.*)$", re.M)
#: The most calls that are compared, and the fewest from which a rank is called slow.
MOST_CALLS, _FEWEST_CALLS = 64, 5
#: A slow rank came last in this share of the calls, the first rank waited for it during this share of the time, and the
#: median wait has this length.  Shorter waits come from the system's own work.
_SLOW_CALLS, _SLOW_TIME, _SLOW_SECONDS = 2 / 3, 0.05, 1e-4
_MOST_LATE = 8


@dataclass(frozen=True)
class Lateness:
    """Who came last to the last collectives of a strategy.

    Attributes:
        ranks: how many ranks the strategy has.
        missing: how many ranks nothing is known of.
        numbers: of the collectives that were compared.
        seconds: from the first of these collectives to the last.
        waits: for each rank that came last, the most frequent first: how long the first rank waited, each time.
    """

    ranks: int
    missing: int
    numbers: Sequence[int]
    seconds: float
    waits: Mapping[int, Sequence[float]]

    def share(self, rank: int) -> float:
        """Return for what part of the time a rank was waited for."""
        return sum(self.waits[rank]) / max(self.seconds, 1e-9)

    def slow(self) -> int | None:
        """Return the rank that keeps the others waiting; None where there is none, or some ranks are not known."""
        if self.missing or len(self.numbers) < _FEWEST_CALLS:
            return None
        rank, waits = next(iter(self.waits.items()))
        is_slow = len(waits) >= _SLOW_CALLS * len(self.numbers) and self.share(rank) >= _SLOW_TIME
        return rank if is_slow and statistics.median(waits) >= _SLOW_SECONDS else None


def run(options: argparse.Namespace) -> int:
    """Print the state of the job of the options; return 0 if nothing hangs, 1 if something does, 2 if unknown."""
    number, title = options.job or "", f"job {options.job}" if options.job else f"the job of process {options.pid}"
    view = of_slurm_job(number) if number else node_view.of_processes([options.pid])
    for trouble in view.troubles:
        sys.stderr.write(f"mpistrategy doctor: {title}: not seen: {printable(trouble)}\n")
    if not view.statuses:
        return _COULD_NOT
    hang = hangs(view.statuses)
    if options.json:
        late = [{**asdict(lateness), "slow": lateness.slow()} for lateness in compare(view.calls)]
        report = {"format": 1, "job": title, "hangs": hang, "ranks": as_data(view.statuses), "last_calls": late}
        print(json.dumps(report, indent=1))
    else:
        print(printable("\n".join(lines(title, view, number))))
    return _HANGS if hang else 0


def of_slurm_job(job: str) -> View:
    """Return the state of a Slurm job on its nodes; never raises.

    Args:
        job: ``17``, or ``17_2`` of an array.
    """
    output, trouble = _answer_of(["squeue", "--noheader", "--format=%A %D", "--states=running", f"--jobs={job}"])
    jobs = [line.split() for line in output.splitlines()]
    if len(jobs) == 1:
        return _on_nodes(*jobs[0])
    # Slurm soon forgets a job that has ended.
    file = f"{run_directory.PREFIX}{job}-*/{run_directory.ROLL_CALL}"
    ended = f"if it has ended because a collective was late, its roll call is {file} in its folder"
    several = f"it is an array of {len(jobs)} jobs: name one, such as {job}_0"
    return View([], [], [several] if jobs else [trouble or "it does not run", ended])


def _step(number: str, nodes: str) -> list[str]:
    """Return the beginning of the command that runs a program on nodes of a job, once on each."""
    return ["srun", f"--jobid={number}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}"]


def _on_nodes(number: str, nodes: str) -> View:
    command = [*_step(number, nodes), "--ntasks-per-node=1", "--mpi=none", sys.executable, "-m", __name__, number]
    output, trouble = _answer_of(command)
    view = read(output)
    if missing := int(nodes) - len({name for name, _ in _LINE.findall(output)}):
        view.troubles.append(f"{missing} of {nodes} nodes: {trouble or 'no answer'}")
    return view


def _answer_of(command: Sequence[str]) -> tuple[str, str]:
    """Return the output of a command of Slurm, and why it fails; "" where it succeeds.  Never raises."""
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} cannot be asked here ({error})"
    trouble = f"{command[0]}: {decoded(process.stderr).strip()[-_MOST_LETTERS:]}" if process.returncode else ""
    return decoded(process.stdout), trouble


def read(output: str) -> View:
    """Return the view in the output of the nodes."""
    texts: dict[str, str] = {}
    for name, piece in _LINE.findall(output):
        texts[name] = texts.get(name, "") + piece
    view = View([], [], [])
    for name, text in texts.items():
        try:
            message = json.loads(text)
        except ValueError as error:
            view.troubles.append(f"{name}: its answer cannot be read ({error})")
            continue
        view.statuses += statuses_in(message["ranks"])
        view.calls += [NodeCalls(**call) for call in message["calls"]]
        view.troubles += [f"{name}: {trouble}" for trouble in message["troubles"]]
    view.statuses.sort(key=lambda status: status.rank)
    return view


def answer(view: View) -> list[str]:
    """Return the lines in which a node prints its view of the job."""
    calls = [asdict(call) for call in view.calls]
    text = json.dumps({"ranks": as_data(view.statuses), "calls": calls, "troubles": view.troubles})
    starts = range(0, len(text), _MOST_LETTERS)
    return [f"mpistrategy-view {node_name()} {text[start : start + _MOST_LETTERS]}" for start in starts]


def hangs(statuses: Sequence[RankStatus]) -> bool:
    """Return whether a rank waits for long, or no longer answers."""
    return any(_waits(status) > min(_LONG_SECONDS, status.limit / 10) or status.silent for status in statuses)


def _waits(status: RankStatus) -> float:
    """Return for how long a rank has waited by now."""
    return status.waited + status.age if status.waited and not status.silent else status.waited


def lines(title: str, view: View, number: str = "") -> list[str]:
    """Return the report.

    Args:
        title: the job, in words.
        view: the state of its ranks.
        number: of the Slurm job; "" for none.
    """
    statuses, late = view.statuses, compare(view.calls)
    nodes = count(len({status.host for status in statuses}), "node")
    report = [f"{title}: {count(len(statuses), 'rank')} heard of, in the memory that its ranks share on {nodes}"]
    shown = sorted(statuses, key=lambda status: bool(status.waited) and len(statuses) > _MOST_ROWS)[:_MOST_ROWS]
    report += map(_row, shown)
    if len(statuses) > len(shown):
        report.append(f"  and {len(statuses) - len(shown)} more")
    for lateness in late:
        report += lines_about(lateness, {status.rank: status.host for status in statuses})
    if not hangs(statuses):
        slow = {lateness.slow() for lateness in late}
        cures = [line for status in statuses if status.rank in slow for line in _cure(status, number)]
        return [*report, *cures, "No rank has waited for long: nothing hangs."]
    roll_call = RollCall(statuses, [status.rank for status in statuses])
    report.append(roll_call.summary)
    if (unheard := max((lateness.missing for lateness in late), default=0)) > 0:
        report.append(
            f"Of these ranks alone: {count(unheard, 'rank')} of the job are on nodes that were not looked at."
        )
    longest = max(statuses, key=_waits)
    away = [status for status in statuses if status.rank in roll_call.missing] or [longest]
    report += next(filter(None, (_cure(status, number) for status in away)), [])
    remaining = longest.limit - _waits(longest)
    if longest.waited and remaining > 0:
        report.append(
            f"The job ends by itself, with a roll call, {remaining:.0f} s from now (timeout {longest.limit:g} s)."
        )
    return report


def compare(nodes: Sequence[NodeCalls]) -> list[Lateness]:
    """Return who came last, for each strategy of several ranks; the strategy of the most ranks first."""
    results = []
    for strategy in {node.strategy for node in nodes}:
        parts = [node for node in nodes if node.strategy == strategy]
        by_number = [{number: arrival for number, *arrival in part.arrivals} for part in parts]
        numbers = sorted(set.intersection(*map(set, by_number)))[-MOST_CALLS:]
        waits: dict[int, list[float]] = {}
        times: list[float] = []
        for number in numbers:
            last_at, last, _ = max(arrivals[number] for arrivals in by_number)
            first_at = min(arrivals[number][2] for arrivals in by_number)
            waits.setdefault(int(last), []).append(last_at - first_at)
            times += [first_at, last_at]
        ordered = dict(sorted(waits.items(), key=lambda pair: (-len(pair[1]), pair[0])))
        missing = parts[0].ranks - sum(part.here for part in parts)
        results.append(Lateness(parts[0].ranks, missing, numbers, max(times) - min(times) if times else 0.0, ordered))
    return sorted(results, key=lambda lateness: -lateness.ranks)


def lines_about(late: Lateness, hosts: Mapping[int, str]) -> list[str]:
    """Return the report of one strategy.

    Args:
        late: who came last.
        hosts: the node of each rank, where it is known.
    """
    calls, head = len(late.numbers), f"strategy of {count(late.ranks, 'rank')}: "
    if calls < _FEWEST_CALLS:
        return [f"{head}its collectives are too few, or too quick, to compare who came last."]
    head += f"{late.numbers[-1]} collectives so far; who came last in the last {calls}, within "
    report = [f"{head}{time_in_words(late.seconds)}:"]
    for rank, waits in [*late.waits.items()][:_MOST_LATE]:
        usual, most = time_in_words(statistics.median(waits)), time_in_words(max(waits))
        report.append(
            f"  rank {rank:<4} last in {len(waits)} on {hosts.get(rank) or '?'}; the first waited {usual} for it "
            f"(median), at most {most}; {late.share(rank):.0%} of the time"
        )
    if late.missing:
        report.append(f"  Whom they all wait for cannot be said without the other {count(late.missing, 'rank')}.")
    elif late.slow() is not None:
        report.append(f"  Rank {late.slow()} keeps the others waiting.")
    else:
        report.append("  No rank keeps the others waiting for long.")
    return report


def _row(status: RankStatus) -> str:
    silent = f"does not answer: {status.silent}; it said: " if status.silent else ""
    ago = f"; {status.age:.0f} s ago" if status.age > _OLD_SECONDS else ""
    return f"  rank {status.rank:<4} {silent}{status.text}{ago}"


def _cure(status: RankStatus, number: str) -> list[str]:
    """Return the command that makes a rank print its stacks, to be pasted where doctor was called."""
    if status.silent or not status.signal:
        return []
    command = ["kill", "-QUIT", str(status.process)]
    if number and status.host:
        command = [*_step(number, "1"), "-w", status.host, *command]
    elif status.host != node_name():
        command = ["ssh", status.host, *command]
    where = f"  -> where rank {status.rank} is, in full, in the job's stderr (the job goes on):"
    return [where, f"     {shlex.join(command)}"]


if __name__ == "__main__":
    print(*answer(node_view.of_slurm_job(sys.argv[1])), sep="\n")
