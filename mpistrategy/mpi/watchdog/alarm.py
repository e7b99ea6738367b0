"""What the watchdog does when a collective is late: records, stacks, the roll call, and the end of the job.

Every rank that hears of it shows its record to its node and answers in its status; the first rank of each node that
has answered writes a file for its node, with the records of its ranks.  On the node that was first to raise the alarm
it reads the files of the others first, and prints the roll call.  Nothing here waits without a limit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from mpistrategy.mpi.contract.failures import Failure
from mpistrategy.mpi.contract.flight_recorder import in_words
from mpistrategy.mpi.watchdog import local_process, reports
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.roll_call import RollCall, as_data, statuses_in
from mpistrategy.mpi.watchdog.run_directory import ERROR, FILE_SECONDS, ROLL_CALL, in_time
from mpistrategy.mpi.watchdog.status_board import ANSWERED, CALLED, RankStatus

#: The status of a job that a late collective has ended, as of `timeout`.
STATUS = 124
#: How long the watchdog waits for the ranks of its node, and for the other nodes.
_NODE_SECONDS, _NODES_SECONDS = 3.0, 7.0
#: How long the rank that speaks for its node may take: it waits for the other nodes, reads and writes two files.
_SPEAKING_SECONDS = _NODES_SECONDS + 3 * FILE_SECONDS
#: How long ending the job by MPI may take.
_END_SECONDS = 1.0
_LOOK_SECONDS = 0.02
#: The longest pause between two looks at files of other nodes.
_LONGEST_LOOK_SECONDS = 0.5
_FORWARDING_SECONDS, _FLUSH_SECONDS = 0.3, 0.5
_RECORDS = "Each rank's stacks and its last collectives"


def answer(groups: Sequence[Group], title: str, end: Callable[[int], object] | None) -> NoReturn:
    """Answer the alarm of this rank or of another one, and end this process.

    Args:
        groups: the groups that this process watches; their boards have its status of this moment.
        title: the beginning of each line that this rank prints.
        end: ends the job with a status, where the launcher would report another one otherwise; may hang.
    """
    try:
        _call_the_roll(groups, title)
    except Exception as error:  # an error in here must not keep the job from ending
        _say(title, f"a collective is late, and mpistrategy could not say where: {error!r}")
    finally:
        _end_job(STATUS, end)


def end_for(group: Group, failure: Failure, title: str, end: Callable[[int], object] | None) -> NoReturn:
    """End the job, since this rank waits for one that takes no more calls.

    Args:
        group: in whose call it waits.
        failure: which rank takes no more calls, and why.
        title, end: as for `answer`.
    """
    try:
        where = local_process.now_doing([group.guard])
        _say(title, f"{where}\nwaits in vain: {failure}. The whole job ends here.")
        _forward()
    finally:
        _end_job(1, end)


def _end_job(status: int, end: Callable[[int], object] | None) -> NoReturn:
    if end is not None:
        in_time(lambda: end(status), None, _END_SECONDS)
    os._exit(status)


def contain(group: Group, title: str) -> None:
    """Answer the alarm of ranks whose errors are contained: the job goes on, and the ranks that wait raise.

    Args:
        group: the ranks.
        title: as for `answer`.
    """
    others: list[RankStatus] = []
    try:
        others = _call_the_roll((group,), title)
    finally:
        known = _on_this_node(group) + others
        # Only the rank that calls the roll hears of other nodes; what another one does not know is not missing.
        knows_all = bool(others) or group.nodes == 1
        group.told = RollCall(known, group.ranks if knows_all else [each.rank for each in known]).as_error()
        group.guard.stop_waiting(group.told)


def _call_the_roll(groups: Sequence[Group], title: str) -> list[RankStatus]:
    """Answer, and on one rank print the roll call; return the statuses of other nodes, as far as this rank knows."""
    began, others = time.monotonic(), list[RankStatus]()
    widest = max(groups, key=lambda group: len(group.ranks))
    guards = [group.guard for group in groups]
    record = f"{local_process.now_doing(guards)}\n\n{local_process.stacks()}\n{local_process.record(guards)}"
    for group in groups:
        group.board.write_record(record)
        group.board.put("state", ANSWERED)
    widest.end()
    _until(lambda: min(widest.board.all("state")) >= ANSWERED, began + _NODE_SECONDS)
    states = widest.board.all("state")
    if max(states) < CALLED and next(local for local, state in enumerate(states) if state) == widest.board.local_rank:
        others = _speak(widest, title)
        for group in groups:
            group.board.put("state", CALLED)
    else:
        _until(lambda: max(widest.board.all("state")) >= CALLED, began + _NODE_SECONDS + _SPEAKING_SECONDS)
    _say(title, reports.failed_tests())
    _forward()
    return others


def _on_this_node(widest: Group) -> list[RankStatus]:
    """Return what is known of the ranks of this node; of those that have not answered, as it looks from outside."""
    words = {entry.number: in_words(entry) for entry in list(widest.guard.record.entries)}  # the other ranks' as well
    now, found = time.monotonic(), []
    for each in widest.board.read():
        calls = [(at - now, words.get(number, f"#{number}")) for number, at in each.calls.items()]
        silent, record = "", each.record
        if not each.state:
            last = "it has made no collective yet"
            if calls:
                last = f"its last was {calls[-1][1]}, {-calls[-1][0]:.1f} s ago"
            silent = f"{local_process.why_silent(each.process)}; {last}"
            lines = [f"{at:12.6f} s  {text}" for at, text in calls]
            record = "\n".join(["when it entered its last collectives, as the other ranks call them:", *lines])
        if each.process:
            found.append(replace(each, silent=silent, record=record, host=local_process.node_name()))
    return found


def _speak(widest: Group, title: str) -> list[RankStatus]:
    """Print the roll call, or tell the node that prints it about this one; return the statuses of other nodes."""
    began, directory, here, others = time.monotonic(), widest.directory, _on_this_node(widest), list[RankStatus]()
    for each in here:
        if each.silent and each.signal:  # print your stacks: this needs no Python in that process
            with suppress(OSError):
                os.kill(each.process, each.signal)
    # The first one that says so calls the roll; the name raises the alarm on other nodes.
    if in_time(lambda: directory.claim(ROLL_CALL), True):
        if widest.nodes > 1:
            end = began + _NODES_SECONDS
            in_time(lambda: _hear_others(widest, others, end), None, _NODES_SECONDS + FILE_SECONDS)
        called = RollCall(here + others, widest.ranks)
        contained = widest.guard.contains_errors
        last = "The ranks that wait raise CollectiveTimeoutError" if contained else "The job ends with status 124"
        text = called.text(f"{_RECORDS}: {directory.path}/*.json", last)
        if not _write(widest, called, here, text, title):
            text = called.text(f"{_RECORDS} are above.", last)
        _say(title, text)
        in_time(lambda: directory.write(ROLL_CALL, text), False)
        _forward()
    else:
        _write(widest, RollCall(here, widest.ranks), here, "", title)
        end = began + _SPEAKING_SECONDS
        _until(lambda: bool(in_time(lambda: directory.read(ROLL_CALL), "")), end, _LONGEST_LOOK_SECONDS)
        if time.monotonic() >= end:
            _say(title, f"a collective is late, and the roll was not called; what is known: {directory.path}/")
    return others


def _write(widest: Group, called: RollCall, here: Sequence[RankStatus], text: str, title: str) -> bool:
    """Write what is known to the file of this node, with the records of its ranks, or print these; return which."""
    records = {each.rank: each.record.splitlines() for each in here}
    known = {"ranks": as_data(called.statuses), "unknown": called.unknown, "missing": called.missing}
    told = json.dumps({"text": text, "node": widest.node, **known, "records": records}, indent=1)
    is_written = in_time(lambda: widest.directory.write(f"error-{widest.node}.json", told), False)
    for rank, lines in records.items() if not is_written else ():
        _say(f"{title}record of rank {rank}: ", "\n".join(lines))
    return is_written


def _hear_others(widest: Group, others: list[RankStatus], end: float) -> None:
    """Add what other nodes have written since the alarm, once all have, or at `end`."""
    directory, mine = widest.directory, f"error-{widest.node}.json"

    def written() -> list[str]:
        return [name for name in directory.names() if ERROR.fullmatch(name) and name != mine]

    _until(lambda: len(written()) >= widest.nodes - 1, end, _LONGEST_LOOK_SECONDS)
    for name in written():
        with suppress(ValueError, TypeError, KeyError):
            others += statuses_in(json.loads(directory.read(name))["ranks"])


def _until(ready: Callable[[], bool], end: float, longest: float = _LOOK_SECONDS) -> None:
    """Wait until `ready`, at most until `end`; the pauses between two looks grow up to `longest`."""
    pause = _LOOK_SECONDS
    while not ready() and time.monotonic() < end:
        time.sleep(pause)
        pause = min(1.5 * pause, longest)


def _say(title: str, text: str) -> None:
    reports.write_at_once("".join(f"{title}{line}\n" for line in text.splitlines()))


def _forward() -> None:
    """Flush what the program has printed, and give the launcher time to read it before anything ends."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            in_time(stream.flush, None, _FLUSH_SECONDS)
    reports.wait_until_read(FILE_SECONDS)
    time.sleep(_FORWARDING_SECONDS)
