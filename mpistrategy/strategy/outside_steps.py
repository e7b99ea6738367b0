"""Warns of a collective of the default strategy outside steps: it works on this rank alone.

TensorFlow does the same, which is harmless in its one process.  Here each rank would go on with its own value, without
an error.
"""

from __future__ import annotations

from mpistrategy import context
from mpistrategy.context import Mode, Strategy
from mpistrategy.errors import ContextError, OutsideStepWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.public_calls import declared


def warn_if_alone(
    strategy: Strategy,
    where: str,
    how: str = "was called on the default strategy",
    cure: str = "Outside its scope, call the method on your own strategy object.",
) -> None:
    """Warn, once for each call site, of a collective of the default strategy that leaves out the other ranks.

    In a step of the default strategy and inside another collective there is no warning.

    Args:
        strategy: whose collective it is.
        where: its public name.
        how: the mistake.
        cure: what to write instead.
    """
    if (
        not strategy._is_default
        or not context.has_peers()
        or strategy.extended.communicator.guard.current is not None
        or any(frame.mode is Mode.REPLICA for frame in context.frames())
    ):
        return
    warn(
        f"{where} {how}: it works on this rank alone, and the value stays this rank's own. {cure} If this rank alone "
        "is meant, use a OneDeviceStrategy.",
        OutsideStepWarning,
    )


def warn_outside_steps(strategy: Strategy, where: str) -> None:
    """Do `warn_if_alone` for a method of the replica context that was called outside every step.

    Raises:
        ContextError: for one that is not declared with what to call there.
    """
    call = declared.get(where)
    if call is None or not call.outside:
        raise ContextError.at(
            where,
            found="a call outside every step",
            expected="a call in replica context (inside a step function)",
            fix="Call it in the function given to `strategy.run`.",
        )
    cure = f"Call it in the function given to strategy.run; outside a step use {call.outside}."
    warn_if_alone(strategy, where, "was called outside every step", cure)
