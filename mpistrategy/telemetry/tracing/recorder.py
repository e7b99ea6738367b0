"""Records the events of this rank while it runs, in Chrome's Trace Event Format: a file for each rank.

A file is one JSON array with an event a line, which ui.perfetto.dev and chrome://tracing open as it is, whole or cut
off.  Times are microseconds of CLOCK_MONOTONIC, which all processes of a machine share.  Events:

* ``X``: a collective, a step or a span that has ended.
* ``M``: for `mpistrategy trace`: "mpistrategy" has the header of the file, "end" shows an end in order.

The program's threads only put events into a queue; a thread of the recorder writes whole lines, ten times a second.  So
a job that is killed leaves everything but the last tenth of a second.  Nothing here may stop the job: if a write
fails, the recording ends after one warning.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from mpistrategy import own_files
from mpistrategy.errors import OptionTypeError
from mpistrategy.mpi.contract import observers
from mpistrategy.mpi.contract.call_sites import Signature, without_columns
from mpistrategy.mpi.contract.flight_recorder import CurrentCall, bytes_of, values_in_words
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.objects.settings import Fixed, Settable
from mpistrategy.objects.shown import size_in_words
from mpistrategy.telemetry.own_rank import own_place
from mpistrategy.telemetry.spans import Switched

#: The environment variable that says in which folder to record.
VARIABLE = "MPISTRATEGY_TRACE"
#: The version of the format.
VERSION = 4
#: How the files are called.
PREFIX, SUFFIX = "rank-", ".json"
#: How often lines are written.
SECONDS_BETWEEN_WRITES = 0.1
#: The most events that a rank records: about 256 MiB.
MOST_EVENTS = 700_000
#: How long the end of the program waits for a file system that hangs.
_PATIENCE_SECONDS = 5.0
#: Collectives that a rank may leave before all ranks have entered.
_LOOSE = ("", "broadcast", "broadcast slices", "gather", "write")

_now = time.monotonic_ns
_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Trace(Switched, Settable):
    """A recording of this rank, made by `trace`; a context manager.

    Args:
        directory: the folder.
    """

    directory: Fixed[str] = Fixed()

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._recorder: Recorder | None = None

    @property
    def path(self) -> str:
        """The file of this rank; "" before something was recorded."""
        return "" if self._recorder is None else self._recorder.path

    def start(self) -> None:
        """Begin to record, into a new file."""
        self.stop()
        folder = os.path.abspath(self.directory)
        if any(isinstance(observer, Recorder) and observer.directory == folder for observer in observers.observers):
            return  # recorded already: each event would count twice
        self._recorder = Recorder(folder)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Write the remaining events; do nothing where nothing is recorded."""
        if self._recorder is not None:
            atexit.unregister(self.stop)
            self._recorder.stop()


def trace(directory: str | os.PathLike[str]) -> Trace:
    """Record collectives, steps and spans of this rank into a folder, as a context manager or between start and stop.

    No messages are sent: ranks may record at different times, or not at all.  Each rank writes its own file while it
    goes on, so that a job that is killed leaves its trace, too.
    ``mpistrategy trace folder`` merges the files of all ranks on one clock; a single file opens in a viewer as it is.

    If a write fails, the recording ends after one warning, and the job goes on.

    Args:
        directory: the folder, which is made if need be; a folder that all nodes see spares copying.

    Returns:
        A `Trace`: a context manager with ``start()``, ``stop()`` and ``path``.

    Raises:
        OptionTypeError: for what is not a path.
    """
    path: Any = directory
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise OptionTypeError.at("telemetry.trace", found=f"{directory!r}", expected="the path of a folder")
    return Trace(os.fspath(path))


class Recorder:
    """Records this process into a file of its own, from now on.

    Args:
        directory: where; made if need be, for the user alone (`mpistrategy.own_files.make_folder`).
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        #: The file, once something was recorded.
        self.path: str = ""
        self._waiting: deque[dict[str, Any]] = deque()
        self._steps = self._count = 0
        self._open: dict[Guard, dict[str, Any]] = {}
        self._tracks: dict[int, tuple[int, int]] = {}
        self._file: IO[str] | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrategy trace", daemon=True)
        self._thread.start()
        observers.observers.append(self)

    def stop(self) -> None:
        """Write the remaining events, and end.  A forked child has no such thread: it leaves the rank's file alone."""
        observers.unwatch(self)
        self._is_over.set()
        self._thread.join(_PATIENCE_SECONDS)

    # ------------------------------------------------------------------------------- in the program's threads

    def entered(self, guard: Guard, call: CurrentCall) -> None:
        """Note when a collective begins."""
        self._open[guard] = self._event("collective", "")

    def left(self, guard: Guard, call: CurrentCall) -> None:
        """Put a collective into the queue."""
        if guard in self._open:
            self._put(self._open.pop(guard), _about_call(guard, call))

    def begin(self, kind: str, name: str) -> Any:
        """Return the event of a step or a span, which begins."""
        event = self._event(kind, name)
        if kind == "step":
            self._steps += 1
            event |= {"name": f"step {self._steps}", "args": {"function": name, "number": self._steps}}
        return event

    def end(self, token: Any) -> None:
        """Put what began into the queue."""
        self._put(token, {})

    def _put(self, event: dict[str, Any], more: dict[str, Any]) -> None:
        duration = {"ts": event["ts"] / 1e3, "dur": (_now() - event["ts"]) / 1e3}
        self._waiting.append(event | duration | more)
        self._count += 1
        if self._count == MOST_EVENTS:
            self._give_up(f"it has {MOST_EVENTS} events")

    def _event(self, kind: str, name: str) -> dict[str, Any]:
        """Return an event that begins now, in this thread."""
        rank, thread = self._tracks.setdefault(threading.get_ident(), (own_place()[0], len(self._tracks)))
        return {"name": name, "cat": kind, "ph": "X", "ts": _now(), "pid": rank, "tid": thread, "args": {}}

    def _give_up(self, why: str) -> None:
        observers.unwatch(self)
        rank, size = own_place()
        sys.stderr.write(
            f"[rank {rank}/{size}] mpistrategy cannot write its trace to {self.path or self.directory}: {why}. "
            "The job goes on without.\n"
        )

    # ------------------------------------------------------------------------------- in the recorder's thread

    def _run(self) -> None:
        is_over = False
        try:
            while not is_over:
                is_over = self._is_over.wait(SECONDS_BETWEEN_WRITES)
                self._write([self._waiting.popleft() for _ in range(len(self._waiting))])
            if self._file is not None:
                self._write([_about(own_place()[0], "end")], "\n]\n")
                self._file.close()
        except Exception as error:  # an error of the recorder must not end the job
            self._give_up((error.strerror if isinstance(error, OSError) else None) or repr(error))

    def _write(self, events: list[dict[str, Any]], after: str = ",\n") -> None:
        if not events:
            return
        if self._file is None:
            own_files.make_folders(self.directory)
            rank, size = own_place()
            name = f"{PREFIX}{rank}.{time.time_ns()}.{os.getpid()}{SUFFIX}"
            self.path = os.path.join(self.directory, name)
            self._file = os.fdopen(own_files.new_file(self.path), "w", encoding="utf-8")
            header = _about(
                rank,
                "mpistrategy",
                version=VERSION,
                rank=rank,
                size=size,
                host=os.uname().nodename,
                process=os.getpid(),
                program=os.path.basename(sys.argv[0] if sys.argv else "") or "python",
                clock=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),  # equal where clocks are one
                zero_us=(time.time_ns() - _now()) / 1e3,  # the wall clock's time when this clock was 0
                wall_us=time.time_ns() / 1e3,
                begun=datetime.now().astimezone().isoformat(timespec="seconds"),
            )
            self._file.write(f"[\n{_json(header)},\n")
        self._file.write("".join(_json(event) + after for event in events))
        self._file.flush()


def _about(pid: int, name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": 0, "args": args}


def _about_call(guard: Guard, call: CurrentCall) -> dict[str, Any]:
    """Return the name and the arguments of the event of a collective."""
    signature = call.signature or Signature("")
    where, title, place = signature.call or call.where, signature.name or call.name, signature.place or call.place
    name, args = _in_words(signature._replace(call=where, name=title, place=place))
    watched = watchdog.here.groups.get(guard) if _is_meeting(signature) else None  # None for one rank, too
    group = "" if watched is None else os.path.basename(watched.directory.path)  # unique to the strategy
    return {"name": name, "args": args | {"number": call.number} | ({"group": group} if group else {})}


def _is_meeting(signature: Signature) -> bool:
    """Return whether no rank can leave this collective before all have entered it."""
    if signature.collective.startswith("reduce"):
        return signature.destination == "every rank"
    return signature.collective not in _LOOSE


@functools.lru_cache(1024)
def _in_words(signature: Signature) -> tuple[str, dict[str, Any]]:
    """Return what viewers show of a collective: ``all_reduce SUM 24 B``, and more about it."""
    values = signature.values if signature.collective != "gather" else ()  # which compares the layout of rows
    op = signature.op if signature.op.isupper() and signature.op.isalpha() else ""
    nbytes = sum(bytes_of(dtype, shape) for dtype, shape in values)
    parts = signature.call.rpartition(".")[2], op, size_in_words(nbytes) if nbytes else ""
    details = {
        "call": signature.call,
        "op": op,
        "values": values_in_words(values),
        "bytes": nbytes,
        "destination": signature.destination,
        "name": signature.name,
        "line": without_columns(signature.place),
    }
    return " ".join(filter(None, parts)), {name: value for name, value in details.items() if value}
