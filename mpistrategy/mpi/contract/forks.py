"""Strategies are closed in a forked child, since MPI belongs to the parent; and when MPI is finalized.

A child that took part in a collective would do so in place of its parent.  A child must not finalize MPI when it ends,
either: see `job.exit_hooks`.  For shared memory in a child see `shared_memory.segments`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from weakref import ref

from mpistrategy.errors import ContextError, ForkedProcessError, MpiStrategyError

# No WeakSet: it runs Python code when a guard is collected, in which the exception of a signal's handler would be lost.
_guards: list[ref[Any]] = []


def remember(guard: Any) -> None:
    """Close `guard` by `close_all` from now on, and in every forked child where it has several ranks."""
    _guards[:] = [reference for reference in _guards if reference() not in (None, guard)] + [ref(guard)]


def close_all(why: Callable[[str], MpiStrategyError], least_size: int = 1) -> None:
    """Close the guards of at least `least_size` ranks: their calls then raise the error that `why` returns."""
    for reference in _guards:
        if (guard := reference()) is not None and guard.size >= least_size:
            guard.close(why)


def after_finalize(where: str) -> ContextError:
    """Return the error of a public call once MPI has been finalized."""
    return ContextError.at(
        where,
        found="a call after MPI.Finalize()",
        expected="an MPI that runs",
        fix="Call MPI.Finalize() last, or leave it to mpi4py, which calls it at the end of the program.",
    )


def refusal(where: str) -> ForkedProcessError:
    """Return the error of a collective in a forked child."""
    return ForkedProcessError.at(
        where,
        found="a call in a forked child of a rank",
        expected="a call in the rank itself",
        fix="Give the child plain arrays to work on, and let it return plain arrays; or start it with "
        "multiprocessing's 'spawn' method. OneDeviceStrategy works in a child.",
    )


os.register_at_fork(after_in_child=functools.partial(close_all, refusal, least_size=2))
