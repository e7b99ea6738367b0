"""What the watchdog does when a collective is late: records, stacks, the roll call, and the end of the job.

Every rank that hears of it shows its record to its node and answers in its status; the first rank of each node that
has answered writes a file for its node, with the records of its ranks.  On the node that was first to raise the alarm
it reads the files of the others first, and prints the roll call.  Nothing here waits without a limit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from mpistrategy.errors import MpiStrategyError
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
    """Answer the alarm of this rank or of another one, and end this process.

    Args:
        groups: the groups that this process watches; their boards have its status of this moment.
        title: the beginning of each line that this rank prints.
        end: ends the job with a status, where the launcher would report another one otherwise; may hang.
    """
    try:
        call_the_roll(groups, title)
    except Exception as error:  # an error in here must not keep the job from ending
        reports.say(title, f"a collective is late, and mpistrategy could not say where: {error!r}")
    finally:
        _end_job(STATUS, end)


def end_in_vain(group: Group, error: MpiStrategyError, title: str, end: Callable[[int], object] | None) -> NoReturn:
    """End the job, since this rank cannot leave its wait for one that takes no more calls.

    Args:
        group: in whose call it waits.
        error: which rank that is, and why.
        title, end: as for `answer`.
    """
    try:
        where = local_process.now_doing([group.guard])
        reports.say(title, f"{where}\nwaits in vain: {error} The whole job ends here.")
        reports.finish(title, FILE_SECONDS)
    finally:
        _end_job(1, end)


def _end_job(status: int, end: Callable[[int], object] | None) -> NoReturn:
    if end is not None:
        reports.in_time(lambda: end(status), None, _END_SECONDS)
    os._exit(status)


def call_the_roll(groups: Sequence[Group], title: str) -> RollCall:
    """Answer an alarm, and print the roll call on one rank; return what this rank knows then.

    Args:
        groups, title: as for `answer`.
    """
    widest, others = max(groups, key=lambda group: len(group.ranks)), list[RankStatus]()
    guards, began = [group.guard for group in groups], time.monotonic()
    record = f"{local_process.now_doing(guards)}\n\n{local_process.record(guards)}"
    for group in groups:
        group.directory.leave()
        group.board.write_record(record)
        group.board.put("state", ANSWERED)
    _until(lambda: min(widest.board.all("state")) >= ANSWERED, began + _NODE_SECONDS)
    states = widest.board.all("state")
    first = next(local for local, each in enumerate(states) if each)
    speaks = CALLED not in states and first == widest.board.local_rank
    if speaks:
        _speak(widest, others, title)
    reports.finish(title, FILE_SECONDS)
    for group in groups if speaks else ():
        group.board.put("state", CALLED)
    _until(lambda: CALLED in widest.board.all("state"), began + _NODE_SECONDS + _SPEAKING_SECONDS)
    known = _on_this_node(widest) + others
    # Only the rank that calls the roll hears of other nodes; what another one does not know is not missing.
    knows_all = bool(others) or widest.nodes == 1
    return RollCall(known, widest.ranks if knows_all else [each.rank for each in known])


def _on_this_node(widest: Group) -> list[RankStatus]:
    """Return what is known of the ranks of this node."""
    words = {entry.number: in_words(entry) for entry in list(widest.guard.record.entries)}  # the other ranks' as well
    return [_seen(each, words) for each in widest.board.read() if each.process]


def _seen(status: RankStatus, words: Mapping[int, str]) -> RankStatus:
    """Return the status of a rank of this node; of one that has not answered, as it looks from outside."""
    if status.state:
        return replace(status, host=local_process.node_name())
    now = time.monotonic()
    calls = [(at - now, words.get(number, f"#{number}")) for number, at in status.calls.items()]
    last = f"its last was {calls[-1][1]}, {-calls[-1][0]:.1f} s ago" if calls else "it has made no collective yet"
    silent = f"{local_process.why_silent(status.process)}; {last}"
    lines = [f"{at:12.6f} s  {text}" for at, text in calls]
    record = "\n".join(["when it entered its last collectives, as the other ranks call them:", *lines])
    return replace(status, silent=silent, record=record, host=local_process.node_name())


def _speak(widest: Group, others: list[RankStatus], title: str) -> None:
    """Print the roll call, or let the node do so that calls it; add the statuses of other nodes."""
    here = _on_this_node(widest)
    for each in here:
        if each.silent and each.signal:  # print your stacks: this needs no Python in that process
            with suppress(OSError):
                os.kill(each.process, each.signal)
    if not _tell_by_files(widest, here, others, title):
        for each in here:
            reports.say(f"{title}record of rank {each.rank}: ", each.record)
        called = RollCall(here + others, widest.ranks)
        reports.say(title, called.text(f"{_RECORDS} are above.", widest.guard.contains_errors))


def _tell_by_files(widest: Group, here: Sequence[RankStatus], others: list[RankStatus], title: str) -> bool:
    """Do so by the run directory, which gets the records; return False where it cannot be used."""
    directory, name = widest.directory, f"error-{widest.node}.json"
    if not directory.claim(ROLL_CALL):  # the first one that says so calls the roll; the name is an alarm
        is_written = directory.write(name, _as_json(widest, here, RollCall(here, widest.ranks), ""))
        return is_written and _until(lambda: bool(directory.read(ROLL_CALL)), time.monotonic() + _SPEAKING_SECONDS)
    if widest.nodes > 1:
        others += _hear_others(widest)
    called = RollCall([*here, *others], widest.ranks)
    text = called.text(f"{_RECORDS}: {directory.path}/*.json", widest.guard.contains_errors)
    if not directory.write(name, _as_json(widest, here, called, text)):
        return False
    reports.say(title, text)
    directory.write(ROLL_CALL, text)
    return True


def _as_json(widest: Group, here: Sequence[RankStatus], called: RollCall, text: str) -> str:
    """Return what the file of a node says: what is known, and the records of its ranks."""
    known = {"ranks": as_data(called.statuses), "unknown": called.unknown, "missing": called.missing}
    records = {each.rank: each.record.splitlines() for each in here}
    return json.dumps({"text": text, "node": widest.node, **known, "records": records}, indent=1)


def _hear_others(widest: Group) -> list[RankStatus]:
    """Return what other nodes have written since the alarm, once all have, or after some time."""
    directory, mine, heard = widest.directory, f"error-{widest.node}.json", list[RankStatus]()

    def written() -> list[str]:
        return [name for name in directory.names() if ERROR.fullmatch(name) and name != mine]

    _until(lambda: len(written()) >= widest.nodes - 1, time.monotonic() + _NODES_SECONDS)
    for name in written():
        with suppress(ValueError, TypeError, KeyError):
            heard += statuses_in(json.loads(directory.read(name))["ranks"])
    return heard


def _until(ready: Callable[[], bool], end: float) -> bool:
    """Wait until `ready`, with growing pauses between two looks; return False if it is not by `end`."""
    pause = _LOOK_SECONDS
    while not ready():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_LOOK_SECONDS)
    return True
