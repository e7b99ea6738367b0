"""Warns of a collective of the default strategy outside steps: it works on this rank alone.

TensorFlow does the same, which is harmless in its one process.  Here each rank would go on with its own value, without
an error.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mpistrategy.context import Mode, Strategy, entered
from mpistrategy.errors import OutsideStepWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.later import later

if TYPE_CHECKING:
    from mpistrategy.mpi.over_threads import SimulatedCommunicator
else:
    later(globals(), "mpistrategy.mpi.over_threads", "SimulatedCommunicator")

#: The mistake of calling a method of the default strategy, and what to write instead.
OF_DEFAULT = "was called on the default strategy", "Outside its scope, call the method on your own strategy object."


class _Thread(threading.local):
    has_peers = False


#: A simulated rank is a thread: what it makes says nothing about the other threads of the process.
_thread = _Thread()
_process_has_peers = False


def note_ranks(communicator: Communicator) -> None:
    """Remember that a strategy of these ranks was made, also after it is closed: the other ranks are still there."""
    global _process_has_peers
    if communicator.size == 1:
        return
    if isinstance(communicator, SimulatedCommunicator):
        _thread.has_peers = True
    else:
        _process_has_peers = True


def warn_if_alone(strategy: Strategy, where: str, how: str, cure: str) -> None:
    """Warn, once for each call site, of a collective of the default strategy that leaves out the other ranks.

    In a step of the default strategy and inside another collective there is no warning.

    Args:
        strategy: whose collective it is.
        where: its public name.
        how: the mistake.
        cure: what to write instead.
    """
    if not (strategy._is_default and (_process_has_peers or _thread.has_peers)):
        return
    if strategy.extended.communicator.guard.current is not None:
        return
    if any(frame.mode is Mode.REPLICA for frame in entered.frames):
        return
    warn(
        f"{where} {how}: it works on this rank alone, and the value stays this rank's own. {cure} If this rank alone "
        "is meant, use a OneDeviceStrategy.",
        OutsideStepWarning,
    )
