"""Switching a recording on and off: by the program, or by the environment for a program as it stands."""

from __future__ import annotations

import atexit
import functools
import os
from typing import Any

from mpistrategy.errors import OptionTypeError
from mpistrategy.objects.settings import Fixed, Settable
from mpistrategy.telemetry.spans import Switched
from mpistrategy.telemetry.tracing.recorder import Recorder

#: The environment variable that says in which folder to record.
VARIABLE = "MPISTRATEGY_TRACE"


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
        self._recorder = Recorder(os.path.abspath(self.directory))
        self._recorder.start()
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


@functools.cache
def start_from_environment() -> None:
    """Record the rest of the program where MPISTRATEGY_TRACE says so."""
    if folder := os.environ.get(VARIABLE, ""):
        Trace(folder).start()
