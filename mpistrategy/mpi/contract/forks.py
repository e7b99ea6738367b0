"""Strategies are closed in a forked child, since MPI belongs to the parent.

A child that took part in a collective would do so in place of its parent.  A child must not finalize MPI when it ends,
either: see `job.exit_hooks`.  For shared memory in a child see `shared_memory.segments`.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import ref

from mpistrategy.errors import ForkedProcessError

# No WeakSet: it runs Python code when a guard is collected, in which the exception of a signal's handler would be lost.
_guards: list[ref[Any]] = []


def remember(guard: Any) -> None:
    """Close `guard` in every forked child from now on."""
    _guards[:] = [reference for reference in _guards if reference() is not None] + [ref(guard)]


def refusal(where: str) -> ForkedProcessError:
    """Return the error of a collective in a forked child."""
    return ForkedProcessError.at(
        where,
        found="a call in a forked child of a rank",
        expected="a call in the rank itself",
        fix="Give the child plain arrays to work on, and let it return plain arrays; or start it with "
        "multiprocessing's 'spawn' method. OneDeviceStrategy works in a child.",
    )


def _close_all() -> None:
    for reference in _guards:
        if (guard := reference()) is not None:
            guard.is_forked = guard.closed = True
            guard.current = None  # a thread that is in a call belongs to the parent


os.register_at_fork(after_in_child=_close_all)
