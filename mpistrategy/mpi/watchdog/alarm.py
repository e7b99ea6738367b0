"""What the watchdog does when a collective is late: records, stacks, the roll call, and the end of the job.

When an alarm reaches a rank, it shows its record to its node and sets its status to answered.  The first such rank of a
node writes a file with the records of its node.  On the node that raised the alarm first, that rank reads the files of
the other nodes and prints the roll call.  Nothing here waits without a limit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from mpistrategy.mpi.contract.flight_recorder import in_words
from mpistrategy.mpi.watchdog import local_process, reports
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.roll_call import RollCall, as_data, statuses_in
from mpistrategy.mpi.watchdog.run_directory import ERROR, FILE_SECONDS, ROLL_CALL
from mpistrategy.mpi.watchdog.status_board import ANSWERED, CALLED, RankStatus

#: The status of a job that a late collective has ended, as of `timeout`.
STATUS = 124
#: How long the watchdog waits for the ranks of its node, and for the other nodes.
_NODE_SECONDS, _NODES_SECONDS = 3.0, 7.0
#: How long the rank that speaks for its node may take: it waits for the other nodes, reads and writes two files.
_SPEAKING_SECONDS = _NODES_SECONDS + 3 * FILE_SECONDS
#: How long ending the job by MPI may take.
_END_SECONDS = 1.0
#: The first pause between two looks, and the longest one, at memory and at files of other nodes.
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.02, 0.5
_RECORDS = "Each rank's stacks and its last collectives"


def answer(groups: Sequence[Group], title: str, end: Callable[[int], object] | None) -> NoReturn:
    """Answer the alarm of this rank or of another rank, and end this process.

    Args:
        groups: the groups that this process watches; their boards have its status of this moment.
        title: the beginning of each line that this rank prints.
        end: ends the job with a status, where the launcher would otherwise report another status; may hang.
    """
    try:
        call_the_roll(groups, title)
    except Exception as error:  # an error in here must not keep the job from ending
        reports.say(title, f"a collective is late, and mpistrategy could not say where: {error!r}")
    finally:
        _end_job(STATUS, end)


def end_in_vain(group: Group, title: str, end: Callable[[int], object] | None) -> NoReturn:
    """End the job, since this rank stays in a wait although no result will come: see `Group.waits_in_vain`.

    Args:
        group: the group in whose call this rank waits.
        title, end: as for `answer`.
    """
    try:
        where = local_process.now_doing([group.guard])
        reports.say(title, f"{where}\nwaits in vain: {group.due} The whole job ends here.")
        reports.finish(title, FILE_SECONDS)
    finally:
        _end_job(1, end)


def _end_job(status: int, end: Callable[[int], object] | None) -> NoReturn:
    if end is not None:
        reports.in_time(lambda: end(status), None, _END_SECONDS)
    os._exit(status)


def call_the_roll(groups: Sequence[Group], title: str) -> RollCall:
    """Answer an alarm, and print the roll call on one rank; return the roll call as this rank knows it.

    Args:
        groups, title: as for `answer`.
    """
    widest, remote_statuses = max(groups, key=lambda group: len(group.ranks)), list[RankStatus]()
    guards, began = [group.guard for group in groups], time.monotonic()
    record = f"{local_process.now_doing(guards)}\n\n{local_process.record(guards)}"
    for group in groups:
        group.directory.show("")
        group.board.put("record", record)
        group.board.put("state", ANSWERED)
    _until(lambda: min(widest.board.all("state")) >= ANSWERED, began + _NODE_SECONDS)
    states = widest.board.all("state")
    first = next(local for local, state in enumerate(states) if state)
    speaks = CALLED not in states and first == widest.board.local_rank
    if speaks:
        _speak(widest, remote_statuses, title)
    reports.finish(title, FILE_SECONDS)
    for group in groups if speaks else ():
        group.board.put("state", CALLED)
    _until(lambda: CALLED in widest.board.all("state"), began + _NODE_SECONDS + _SPEAKING_SECONDS)
    statuses = _on_this_node(widest) + remote_statuses
    # Only the rank that calls the roll hears of other nodes: on other ranks an unknown rank is not a missing rank.
    knows_all = bool(remote_statuses) or widest.nodes == 1
    return RollCall(statuses, widest.ranks if knows_all else [status.rank for status in statuses])


def _on_this_node(widest: Group) -> list[RankStatus]:
    """Return the statuses of the ranks of this node."""
    words = {entry.number: in_words(entry) for entry in list(widest.guard.record.entries)}  # the other ranks' as well
    return [_with_reason(status, words) for status in widest.board.read() if status.process]


def _with_reason(status: RankStatus, words: Mapping[int, str]) -> RankStatus:
    """Return a status with the name of its node; where the rank has not answered, also with why and its last calls."""
    if status.state:
        return replace(status, host=local_process.node_name())
    now = time.monotonic()
    calls = [(at - now, words.get(number, f"#{number}")) for number, at in status.calls.items()]
    last = f"its last was {calls[-1][1]}, {-calls[-1][0]:.1f} s ago" if calls else "it has made no collective yet"
    silent = f"{local_process.why_silent(status.process)}; {last}"
    lines = [f"{at:12.6f} s  {text}" for at, text in calls]
    record = "\n".join(["when it entered its last collectives, as the other ranks call them:", *lines])
    return replace(status, silent=silent, record=record, host=local_process.node_name())


def _speak(widest: Group, remote_statuses: list[RankStatus], title: str) -> None:
    """Write the records of this node, and call the roll unless another node does; add the statuses of other nodes."""
    directory, local_statuses = widest.directory, _on_this_node(widest)
    for status in local_statuses:
        if status.silent and status.signal:  # print your stacks: this needs no Python in that process
            with suppress(OSError):
                os.kill(status.process, status.signal)
    calls = directory.claim(ROLL_CALL)  # by the first node that makes this file, which is an alarm
    if calls and widest.nodes > 1:
        remote_statuses += _hear_others(widest)
    called = RollCall(local_statuses + remote_statuses, widest.ranks)
    text = called.text(f"{_RECORDS}: {directory.path}/*.json", widest.guard.contains_errors) if calls else ""
    is_written = directory.write(f"error-{widest.node}.json", _as_json(widest, local_statuses, called, text))
    if is_written and calls:
        reports.say(title, text)
        directory.write(ROLL_CALL, text)
    elif not is_written or not _until(lambda: bool(directory.read(ROLL_CALL)), time.monotonic() + _SPEAKING_SECONDS):
        for status in local_statuses:
            reports.say(f"{title}record of rank {status.rank}: ", status.record)
        reports.say(title, called.text(f"{_RECORDS} are above.", widest.guard.contains_errors))


def _as_json(widest: Group, local_statuses: Sequence[RankStatus], called: RollCall, text: str) -> str:
    """Return the text of a node's file: the statuses, and the records of its ranks."""
    fields = {"ranks": as_data(called.statuses), "unknown": called.unknown, "missing": called.missing}
    records = {status.rank: status.record.splitlines() for status in local_statuses}
    return json.dumps({"text": text, "node": widest.node, **fields, "records": records}, indent=1)


def _hear_others(widest: Group) -> list[RankStatus]:
    """Return the statuses that other nodes have written since the alarm, once all have, or after some time."""
    directory, own_name, statuses = widest.directory, f"error-{widest.node}.json", list[RankStatus]()

    def other_files() -> list[str]:
        return [name for name in directory.names() if ERROR.fullmatch(name) and name != own_name]

    _until(lambda: len(other_files()) >= widest.nodes - 1, time.monotonic() + _NODES_SECONDS)
    for name in other_files():
        with suppress(ValueError, TypeError, KeyError):
            statuses += statuses_in(json.loads(directory.read(name))["ranks"])
    return statuses


def _until(ready: Callable[[], bool], end: float) -> bool:
    """Wait until `ready`, with growing pauses between two looks; return False if it is not by `end`."""
    pause = _LOOK_SECONDS
    while not ready():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_LOOK_SECONDS)
    return True
