"""What the watchdog does when a collective is late: records, stacks, the roll call, and the end of the job.

Every rank that hears of it shows its record to its node and answers in its status; the first rank of each node that
has answered writes a file for its node, with the records of its ranks.  On the node that was first to raise the alarm
it reads the files of the others first, and prints the roll call.  Nothing here waits without a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from mpistrategy.mpi.contract.failures import Failure
from mpistrategy.mpi.watchdog import local_process, reports
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.roll_call import as_data, as_error, not_come, roll_call
from mpistrategy.mpi.watchdog.run_directory import FILE_SECONDS, ROLL_CALL, in_time, within
from mpistrategy.mpi.watchdog.status_board import ALARMED, ANSWERED, CALLED, RankStatus

#: The status of a job that a late collective has ended, as of `timeout`.
STATUS = 124
#: How long the watchdog waits for the ranks of its node, and for the other nodes.
_NODE_SECONDS, _NODES_SECONDS = 3.0, 7.0
#: How long ending the job by MPI may take.
_END_SECONDS = 1.0
_LOOK_SECONDS = 0.02
#: The longest pause between two looks at files of other nodes.
_LONGEST_LOOK_SECONDS = 0.5
_FORWARDING_SECONDS, _FLUSH_SECONDS = 0.3, 0.5


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
    try:
        if end is not None:
            within(_END_SECONDS, lambda: end(status))
    finally:
        os._exit(status)


def contain(group: Group, title: str) -> None:
    """Answer the alarm of ranks whose errors are contained: the job goes on, and the ranks that wait raise.

    Args:
        group: the ranks.
        title: as for `answer`.
    """
    try:
        _call_the_roll((group,), title)
    finally:
        here = _on_this_node(group, [group])
        # Only the rank that calls the roll hears of other nodes; what another one does not know is not missing.
        knows_all = bool(group.others) or group.nodes == 1
        unknown = _unknown(group, here + group.others) if knows_all else []
        group.told = as_error(here + group.others, unknown)
        group.guard.stop_waiting(group.told)


def _on_this_node(widest: Group, groups: Sequence[Group]) -> list[RankStatus]:
    """Return what is known of the ranks of this node."""
    last_calls = {rank: text for group in groups for rank, text in group.last_calls().items()}
    return [
        each
        if each.state >= ANSWERED
        else replace(each, silent=f"{local_process.why_silent(each.process)}{last_calls.get(each.rank, '')}")
        for each in widest.board.read()
        if each.process
    ]


def _call_the_roll(groups: Sequence[Group], title: str) -> None:
    began = time.monotonic()
    widest = max(groups, key=lambda group: len(group.ranks))
    is_first = not any(group.is_alarmed() for group in groups)
    _put_state(groups, ALARMED)
    if is_first:
        widest.alarm()
    guards = [group.guard for group in groups]
    record = f"{local_process.now_doing(guards)}\n\n{local_process.stacks()}\n{local_process.record(guards)}"
    for group in groups:
        group.board.write_record(record)
    _put_state(groups, ANSWERED)
    widest.end()
    _until(lambda: all(each.state >= ANSWERED for each in widest.board.read()), began + _NODE_SECONDS)
    answered = [local for local, each in enumerate(widest.board.read()) if each.state >= ANSWERED]
    if widest.board.most("state") < CALLED and answered[0] == widest.board.local_rank:
        _speak(widest, _on_this_node(widest, groups), began, title)
        _put_state(groups, CALLED)
    else:
        _until(lambda: widest.board.most("state") >= CALLED, began + _NODES_SECONDS + 2 * FILE_SECONDS)
    _say(title, reports.failed_tests())
    _forward()


def _speak(widest: Group, here: list[RankStatus], began: float, title: str) -> None:
    """Print the roll call, or tell the node that prints it about this one."""
    _ask_for_stacks(here)
    if not widest.board.most("caller"):
        if not _written(widest, here, ""):
            _say_records(widest, title)
        end = began + _NODES_SECONDS + 2 * FILE_SECONDS + _NODE_SECONDS
        _until(lambda: in_time(widest.is_published, otherwise=False), end, _LONGEST_LOOK_SECONDS)
        if time.monotonic() >= end:
            _say(title, f"a collective is late, and the roll was not called; what is known: {widest.directory.path}/")
        return
    if widest.nodes > 1:
        end = began + _NODES_SECONDS
        within(_NODES_SECONDS, lambda: _until(widest.hear_others, end, _LONGEST_LOOK_SECONDS))
    _report(widest, here + widest.others, title)


def _report(widest: Group, statuses: Sequence[RankStatus], title: str) -> None:
    """Print the roll call, and write it to the run directory with the records of this node."""
    unknown = _unknown(widest, statuses)
    of_records = "Each rank's stacks and its last collectives"

    def text(where: str) -> str:
        contained = widest.guard.contains_errors
        return roll_call(statuses, unknown, len(widest.ranks), where, contained=contained)

    told = text(f"{of_records}: {widest.directory.path}/*.json")
    if not _written(widest, statuses, told):
        _say_records(widest, title)
        told = text(f"{of_records} are above.")
    _say(title, told)
    within(FILE_SECONDS, lambda: widest.directory.write(ROLL_CALL, told))
    _forward()


def _unknown(widest: Group, statuses: Sequence[RankStatus]) -> list[int]:
    return sorted({*widest.ranks} - {status.rank for status in statuses})


def _written(widest: Group, statuses: Sequence[RankStatus], text: str) -> bool:
    """Write what is known to the run directory, with the records of this node; return whether it is there."""
    unknown = _unknown(widest, statuses)
    missing = sorted(not_come(statuses, unknown))
    data = {"ranks": as_data(statuses), "unknown": unknown, "missing": missing, "records": widest.records()}
    rank = widest.board.read()[widest.board.local_rank].rank
    told = json.dumps({"text": text, "written_by": rank, **data}, indent=1)
    return in_time(lambda: widest.directory.write(f"error-{rank}.json", told), otherwise=False)


def _say_records(widest: Group, title: str) -> None:
    for number, lines in widest.records().items():
        _say(f"{title}record of rank {number}: ", "\n".join(lines))


def _ask_for_stacks(here: Sequence[RankStatus]) -> None:
    """Make silent processes print their stacks, where they can; this needs no Python in them."""
    for status in here:
        if status.silent and status.signal:
            with contextlib.suppress(OSError):
                os.kill(status.process, status.signal)


def _put_state(groups: Sequence[Group], state: int) -> None:
    for group in groups:
        group.board.put("state", state)


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
            within(_FLUSH_SECONDS, stream.flush)
    reports.wait_until_read(FILE_SECONDS)
    time.sleep(_FORWARDING_SECONDS)
