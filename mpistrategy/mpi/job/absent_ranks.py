"""Who of this node has not come to the start of MPI, said by a program of its own; or to the first strategy.

MPI holds the interpreter while it starts, so no thread of a waiting rank can speak.  `start_alarm` runs this file as
``python -I -S FILE``, beside the rank that waits; so it imports nothing but a few modules of Python's own.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

_MPI = re.compile(rb"/libmpi(?:ch)?(?:_(?!cxx|gtl|mpifh|usempi)\w+)?\.so")
_MOST_SECONDS = 10.0
_CAUSES = (
    "Do launcher and MPI library fit together (srun --mpi=list), can the nodes reach each other, does every rank start "
    "on every node?"
)


class Place(NamedTuple):
    """What a rank's process of this node is doing.

    Attributes:
        process: its number.
        is_stopped: by SIGSTOP, SIGTSTP or a debugger.
        has_mpi: whether it has loaded an MPI library.
    """

    process: int
    is_stopped: bool
    has_mpi: bool


def ranks_beside(process: int, size: str, rank: str) -> dict[int, Place]:
    """Return the ranks of this node that have the same launcher as `process`.

    Args:
        process: the number of a rank's process.
        size, rank: the names of the variables in which its launcher says how many ranks there are, and which it is.
    """
    told = _variables(process)
    launcher = parent = process
    while parent > 1 and _variables(parent).get(rank) == told.get(rank):
        launcher = parent = _stat(parent)[1]
    parents = {int(name): _stat(int(name))[1] for name in os.listdir("/proc") if name.isdigit()}
    found: dict[int, Place] = {}
    for number in sorted(parents):
        if launcher not in _above(number, parents):
            continue
        variables = _variables(number)
        if variables.get(size) != told.get(size) or not variables.get(rank, "").isdigit():
            continue
        each = Place(number, _stat(number)[0] in ("T", "t"), _MPI.search(_read(number, "maps")) is not None)
        before = found.get(int(variables[rank]))
        # A rank may have shells above its Python, and children below it.
        if before is None or each.is_stopped or (each.has_mpi and not before.has_mpi and not before.is_stopped):
            found[int(variables[rank])] = each
    return found


def in_words(found: dict[int, Place], local_size: int = 0) -> str:
    """Return which of the ranks do not wait in the start of MPI, and what to do; "" where all of them do."""
    stopped = {rank: each.process for rank, each in found.items() if each.is_stopped}
    absent = {rank: each.process for rank, each in found.items() if not each.is_stopped and not each.has_mpi}
    parts = []
    if stopped:
        numbers = " ".join(map(str, stopped.values()))
        parts.append(f"{_ranks(stopped)} stopped (SIGSTOP, SIGTSTP or a debugger): kill -CONT {numbers}")
    if absent:
        shown = ", ".join(map(str, absent.values()))
        parts.append(f"{_ranks(absent)} alive, and has not come to the start of MPI (process {shown})")
    if local_size > len(found):
        parts.append(f"{local_size - len(found)} of {local_size} ranks are gone, or have not begun")
    return "; ".join(parts)


def _ranks(numbers: dict[int, int]) -> str:
    names = ", ".join(map(str, sorted(numbers)))
    return f"rank {names} is" if len(numbers) == 1 else f"ranks {names} are"


# ------------------------------------------------------------------------------------- what Linux shows


def _read(process: int, what: str) -> bytes:
    try:
        with open(f"/proc/{process}/{what}", "rb") as file:
            return file.read()
    except OSError:  # it has ended, or belongs to another user
        return b""


def _stat(process: int) -> tuple[str, int]:
    """Return the letter of a process's state, and its parent."""
    fields = _read(process, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[1])) if len(fields) > 1 else ("", 0)


def _variables(process: int) -> dict[str, str]:
    lines = _read(process, "environ").decode(errors="replace").split("\0")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _above(process: int, parents: dict[int, int]) -> Iterator[int]:
    while process > 1:
        process = parents.get(process, 0)
        yield process


# ------------------------------------------------------------------------------------- the program


def main(process: int, size: str, rank: str, local: int, message: str) -> None:
    """Write the message and what is known of the ranks of this node; once for all that wait here.

    Args:
        process: the rank that waits.
        size, rank: as in `ranks_beside`.
        local: how many ranks the launcher has started on this node; 0 for unknown.
        message: has {who} in it, in the place of what is known.
    """
    found = ranks_beside(process, size, rank)
    waiting = [each for _, each in sorted(found.items()) if each.has_mpi and not each.is_stopped]
    first = waiting[0].process if waiting else process
    try:
        turn = open(f"/proc/{first}/environ", "rb")  # noqa: SIM115 - held until this program ends; no other user can
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # another rank of this node says it
    host = os.uname().nodename
    missing = in_words(found, local)
    if not missing and 0 not in found:
        return  # nobody is missing here: rank 0's node says what all have in common
    who = f"On {host}, {missing}." if missing else f"All ranks on {host} wait in MPI_Init. {_CAUSES}"
    sys.stderr.write(message.replace("{who}", who) + "\n")
    sys.stderr.flush()
    end = time.monotonic() + _MOST_SECONDS
    while _stat(process)[0] not in ("", "Z") and time.monotonic() < end:
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
