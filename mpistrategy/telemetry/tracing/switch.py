"""Switching a recording on and off: by the program, or by the environment for a program as it stands."""

from __future__ import annotations

import atexit
import os
from typing import Any

from mpistrategy.errors import ContextError, OptionError, OptionTypeError
from mpistrategy.objects.settings import Fixed, Settable
from mpistrategy.telemetry.spans import Switched
from mpistrategy.telemetry.tracing.recorder import Recorder

#: The environment variable that says in which folder to record.
VARIABLE = "MPISTRATEGY_TRACE"

_active: list[Trace] = []
_by_environment: list[Trace] = []
_registered: list[bool] = []


class Trace(Switched, Settable):
    """A recording of this rank, made by `trace`; a context manager.

    Args:
        directory: the folder.
    """

    directory: Fixed[str] = Fixed()

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._recorder: Recorder | None = None

    def __repr__(self) -> str:
        state = "not begun" if self._recorder is None else "recording" if self in _active else "over"
        return f"<Trace into {self.directory!r}, {state}>"

    @property
    def path(self) -> str:
        """The file of this rank; "" before something was recorded."""
        return "" if self._recorder is None else self._recorder.path

    def start(self) -> None:
        """Begin to record.

        Raises:
            ContextError: when it has begun before.
        """
        if self._recorder is not None:
            raise ContextError.at(
                "telemetry.trace", found="a trace that has begun before", expected="a new one for each recording"
            )
        self._recorder = Recorder(os.path.abspath(self.directory))
        _active.append(self)
        if not _registered:
            _registered.append(True)
            atexit.register(_stop_all)
            os.register_at_fork(after_in_child=_abandon_all)
        self._recorder.start()

    def stop(self) -> None:
        """Write down what is left; do nothing where nothing is recorded."""
        if self in _active:
            _active.remove(self)
            if self._recorder is not None:
                self._recorder.stop()

    def _abandon(self) -> None:
        """Forget the recording, in a child of the rank."""
        if self._recorder is not None:
            self._recorder.abandon()


def trace(directory: str | os.PathLike[str]) -> Trace:
    """Record collectives, steps and spans of this rank into a folder, as a context manager or between start and stop.

    Every rank for itself: nothing is sent, and ranks may record at different times, or not at all.  Each writes a file
    of its own while it goes on, so that a job that is killed, or hangs, leaves its trace, too.
    ``mpistrategy trace folder`` puts the files of all ranks together on one clock.

    What cannot be written is not written: the job goes on, after one warning.

    Args:
        directory: the folder, which is made if need be; one that all nodes see spares copying.

    Returns:
        A `Trace`: a context manager with ``start()``, ``stop()`` and ``path``.

    Raises:
        OptionTypeError, OptionError: for what is not a path.
    """
    return Trace(checked_folder(directory, "telemetry.trace"))


def checked_folder(directory: Any, where: str) -> str:
    """Return the path of a folder as text.

    Raises:
        OptionTypeError, OptionError: for what is not a path.
    """
    try:
        text = os.fspath(directory)
    except TypeError as error:
        raise OptionTypeError.at(where, found=f"{directory!r}", expected="the path of a folder") from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError.at(where, found=f"{text!r}", expected="the path of a folder")
    return text


def start_from_environment() -> None:
    """Record the rest of the program where MPISTRATEGY_TRACE says so."""
    folder = os.environ.get(VARIABLE, "")
    if folder and not _by_environment:
        _by_environment.append(Trace(folder))
        _by_environment[0].start()


def _stop_all() -> None:
    for each in _active:
        each.stop()


def _abandon_all() -> None:
    for each in _active:
        each._abandon()
    _active.clear()
