"""Writes down what this rank does, while it does it.

The program's threads only put tuples into a queue; a thread of the recorder turns them into lines and writes whole
lines, ten times a second.  So a job that is killed leaves everything but the last tenth of a second, and one that hangs
leaves what each rank was in.  Nothing here may stop the job: what cannot be written is not written, after one warning.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from mpistrategy import own_files
from mpistrategy.mpi import over_threads
from mpistrategy.mpi.contract import observers
from mpistrategy.mpi.contract.call_sites import Signature, without_columns
from mpistrategy.mpi.contract.flight_recorder import CurrentCall, bytes_of, values_in_words
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.telemetry.own_rank import own_place
from mpistrategy.telemetry.tracing import file_format

#: How often lines are written.
SECONDS_BETWEEN_WRITES = 0.1
#: So many events may wait to be written, where the file system is slow; further ones are lost, and counted.
MOST_WAITING = 200_000
#: The most that a rank writes.
MOST_BYTES = 2**28
#: An interval that lasts longer is written before it ends.
_LONG_NS = 300_000_000
#: How often a rank writes a sign of life while nothing else happens.
_ALIVE_NS = 1_000_000_000
_REMEMBERED = 4096
#: How long the end of the program waits for a file system that hangs.
_PATIENCE_SECONDS = 5.0

_now = time.monotonic_ns
_me = threading.get_ident


class Recorder:
    """Records this process into a file of its own.

    Args:
        directory: where; made if need be, for the user alone (`mpistrategy.own_files.make_folder`).
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        #: The file, once something was recorded.
        self.path: str = ""
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._lost = 0
        self._open: dict[Any, list[Any]] = {}
        self._threads: dict[int, tuple[int, str, int | None]] = {}
        self._groups: dict[Guard, _Group | None] = {}
        self._steps = 0
        self._told = _now()
        self._lines = _Lines()
        self._file: int | None = None
        self._written = 0
        self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrategy trace", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        observers.watch(self)

    def stop(self) -> None:
        """Write down what is left, and end."""
        observers.unwatch(self)
        self._wake.set()
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            return
        if self._file is not None:
            self._write_out([{"kind": "end"}])
        self._close()

    def abandon(self) -> None:
        """End without a word, in a child of the rank: the file is the rank's."""
        observers.unwatch(self)
        self._is_over, self._file = True, None

    # ------------------------------------------------------------------------------- in the program's threads

    def entered(self, guard: Guard, call: CurrentCall) -> None:
        """Note when a collective begins."""
        if guard not in self._groups:
            self._groups[guard] = _group_of(guard, len(self._groups))
        self._open[guard] = ["call", (guard, call), _now(), self._thread_number(), False]

    def left(self, guard: Guard, call: CurrentCall) -> None:
        """Put a collective into the queue."""
        opened = self._open.pop(guard, None)
        if opened is not None:
            self._put(("call", self._of_call(guard, call), opened[2], _now(), opened[3]))

    def begin(self, kind: str, name: str) -> Any:
        """Note when a step or a span begins."""
        number = 0
        if kind == "step":
            number = self._steps = self._steps + 1
        token = object()
        self._open[token] = [kind, (name, number), _now(), self._thread_number(), False]
        return token

    def end(self, token: Any) -> None:
        """Put a step or a span into the queue."""
        kind, what, start, thread, _ = self._open.pop(token)
        self._put((kind, what, start, _now(), thread))

    def _of_call(self, guard: Guard, call: CurrentCall) -> tuple[Any, ...]:
        return self._groups.get(guard), call.number, call.signature, call.where, call.name, call.place

    def _put(self, event: tuple[Any, ...]) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(event)
        else:
            self._lost += 1

    def _thread_number(self) -> int:
        known = self._threads.get(_me())
        if known is None:
            replica = over_threads.world()
            number = None if replica is None else replica.rank
            known = self._threads[_me()] = (len(self._threads), threading.current_thread().name, number)
        return known[0]

    # ------------------------------------------------------------------------------- in the recorder's thread

    def _run(self) -> None:
        ends = False
        while not ends and not self._is_over:
            ends = self._wake.wait(SECONDS_BETWEEN_WRITES)
            try:
                self._write_out(self._events())
            except Exception as error:  # an error of the recorder must not end the job
                self._give_up(f"has failed: {error!r}")

    def _events(self) -> list[dict[str, Any]]:
        """Return what waits to be written, as objects for the lines."""
        found: list[dict[str, Any]] = []
        lines, waiting = self._lines, self._waiting
        while waiting:
            kind, what, start, end, thread = waiting.popleft()
            found += lines.event(kind, what, start, end, thread, self._threads)
        now = _now()
        for opened in list(self._open.values()):
            kind, what, start, thread, is_told = opened
            if not is_told and now - start > _LONG_NS:
                opened[4] = True
                told = self._of_call(*what) if kind == "call" else what
                found += lines.event(kind, told, start, None, thread, self._threads)
        if self._open and not found and now - self._told > _ALIVE_NS:
            found.append({"kind": "alive", "at": now})
        if found:
            self._told = now
        if self._lost:
            found.append({"kind": "lost", "events": self._lost})
            self._lost = 0
        return found

    def _write_out(self, events: list[dict[str, Any]]) -> None:
        if not events or self._is_over:
            return
        data = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events).encode()
        try:
            if self._file is None:
                data = self._begin_file() + data
            _write(self._file, data)
        except OSError as error:
            self._give_up(f"cannot write its trace to {self.directory}: {error.strerror or error}.")
            return
        self._written += len(data)
        if self._written > MOST_BYTES:
            self._give_up(f"has written {MOST_BYTES // 2**20} MiB of trace to {self.path}, and writes no more.")

    def _begin_file(self) -> bytes:
        rank, size = own_place()
        own_files.make_folders(self.directory)
        mode = own_files.file_mode(os.stat(self.directory))
        for attempt in range(1000):
            path = os.path.join(self.directory, file_format.file_name(rank, attempt))
            try:
                self._file = os.open(path, own_files.NEW | os.O_APPEND, mode)
            except FileExistsError:
                continue
            self.path = path
            break
        return (json.dumps(file_format.header(rank, size)) + "\n").encode()

    def _give_up(self, why: str) -> None:
        observers.unwatch(self)
        self._is_over = True
        rank, size = own_place()
        sys.stderr.write(f"[rank {rank}/{size}] mpistrategy {why} The job goes on without.\n")

    def _close(self) -> None:
        self._is_over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write(file: int | None, data: bytes) -> None:
    assert file is not None
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


class _Group(NamedTuple):
    """The ranks of one strategy."""

    group: int
    id: str
    ranks: list[int]


def _group_of(guard: Guard, number: int) -> _Group | None:
    """Return the ranks of `guard`; None where it is alone."""
    dog = watchdog.in_this_process()
    watched = None if dog is None else dog.groups.get(guard)
    if watched is None:
        return None
    return _Group(number, os.path.basename(watched.directory.path), list(watched.ranks))


class _Lines:
    """Turns events into objects, those first to which they refer."""

    def __init__(self) -> None:
        self._whats: dict[Any, tuple[int, Signature | None]] = {}
        self._next_what = 0
        self._told: set[int] = set()
        self._threads = 0

    def event(
        self, kind: str, what: Any, start: int, end: int | None, thread: int, threads: dict[int, Any]
    ) -> list[dict[str, Any]]:
        """Return the objects of one event; it lasts still where `end` is None."""
        found: list[dict[str, Any]] = []
        for number, name, replica in list(threads.values())[self._threads :]:
            self._threads += 1
            found.append({"kind": "thread", "thread": number, "name": name, "replica": replica})
        line: dict[str, Any] = {"kind": kind} if end is not None else {"kind": "inside", "of": kind}
        if kind == "call":
            group, number, signature, where, name, place = what
            line["what"] = self._what(found, signature, where, name, place)
            if group is not None and signature is not None:  # ranks did not meet in a call that was never compared
                if group.group not in self._told:
                    self._told.add(group.group)
                    found.append({"kind": "group", **group._asdict()})
                line["group"] = group.group
            line["number"] = number
        else:
            line["name"], line["number"] = what
        line |= {"thread": thread, "from": start}
        if end is not None:
            line["to"] = end
        return [*found, line]

    def _what(self, found: list[dict[str, Any]], signature: Signature | None, where: str, name: str, place: str) -> int:
        # A signature stays alive with its identity as a key: to look at its fields takes long where there are many.
        key = (where, name, place) if signature is None else id(signature)
        known = self._whats.get(key)
        if known is None:
            if len(self._whats) >= _REMEMBERED:
                self._whats.clear()
            known = self._whats[key] = (self._next_what, signature)
            self._next_what += 1
            if signature is not None:
                where, name, place = signature.call or where, signature.name or name, signature.place or place
            told: dict[str, Any] = {"kind": "what", "what": known[0], "call": where, "place": without_columns(place)}
            if name:
                told["name"] = name
            if signature is not None:
                told |= _in_words(signature)
            found.append(told)
        return known[0]


def _in_words(signature: Signature) -> dict[str, Any]:
    is_gather = signature.collective == "gather"  # which compares the rows' layout, not how many there are
    return {
        "verb": signature.collective,
        "op": signature.op if signature.op.isupper() and signature.op.isalpha() else "",
        "values": "" if is_gather else values_in_words(signature.values),
        "bytes": 0 if is_gather else sum(bytes_of(dtype, shape) for dtype, shape in signature.values),
        "destination": signature.destination,
    }
