"""What reduces an arena in place again and again, with one comparison of the ranks that compares numbers, too."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mpistrategy.arrays.dtypes import Array
from mpistrategy.context import current_frame
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.error_messages import BEFORE
from mpistrategy.mpi.contract.public_calls import Given, collective
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.routes.in_place import is_in_place

if TYPE_CHECKING:
    from mpistrategy.reduction.arena.arena import Arena

#: Digests are smaller.  Odd factors: different numbers give different digests.
_DIGESTS = 2**62
_FACTORS = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D


def repeated_sum(arena: Arena[Any], op: ReduceOp, what: str, where: str) -> RepeatedSum | None:
    """Return what reduces an arena where it is; None where that is not on one node's host, or by another algorithm.

    Args:
        arena: the arena, whose dtypes fit `op`.
        op: how.
        what: the operation, as the ranks compare it.
        where: the public name of the calls.
    """
    reducer = arena.strategy.extended._reducer
    is_here = not arena._on_device and all(is_in_place(reducer.communicator, each) for each in arena._buckets)
    return RepeatedSum(arena, op, what, where) if is_here and reducer.algorithm._in_rank_order else None


def _own(given: Given) -> list[Array]:
    mine: list[Array] = given["self"].mine
    return mine


class RepeatedSum:
    """Reduces an arena in place, without what is the same each time; `repeated_sum` makes one.

    No text is hashed in a call: its digest is made of that of the words that repeat, and of numbers.

    Args:
        arena, op, what, where: as in `repeated_sum`.

    Attributes:
        mine: this rank's buckets.
    """

    def __init__(self, arena: Arena[Any], op: ReduceOp, what: str, where: str) -> None:
        self._strategy: Any = arena.strategy
        self._where = where
        self._reducer = arena.strategy.extended._reducer
        self._changes = self._reducer.changes
        self._guard = guard = self._reducer.communicator.guard
        self._call = Call(guard, where)  # what a second thread finds
        self._call.is_leaf = True
        self._route = arena._route(op, "", None, in_place=True)
        self._constant = what, op.name, "", (), "", f"arena {arena._number}"
        self._digest = "", 0
        self.mine: list[Array] = arena._mine

    @property
    def is_ready(self) -> bool:
        """Whether it can be called now; else the general way does the same, or raises."""
        guard, frame = self._guard, current_frame()
        if guard.current is not None or guard.closed or self._reducer.changes != self._changes:
            return False
        return frame is None or frame.strategy is self._strategy

    @collective("allreduce", own=_own)
    def run(self, numbers: tuple[int, int], name: str, words: str, prepare: Callable[[], object]) -> list[Array]:
        """Reduce the arena.  Collective; while `is_ready`.

        Args:
            numbers: are compared.
            name: what the call is about: the numbers in words, and then `words`.
            words: what repeats of the name.
            prepare: writes the arena, before the ranks compare their calls.
        """
        guard, record = self._guard, self._guard.record
        signature = Signature(*self._constant, name, self._where)
        record.number = number = record.number + 1
        record.entries.append((number, SimpleNamespace(signature=signature), monotonic(), None))
        try:
            guard.stage, guard.current = BEFORE, self._call
            if words != self._digest[0]:
                self._digest = words, guard.digest(signature._replace(name=words))
            prepare()
            digest = self._digest[1] + numbers[0] * _FACTORS[0] + numbers[1] * _FACTORS[1]
            guard.compare_digest(digest % _DIGESTS, signature, due=True)
            return self._route.run(())
        except BaseException as error:
            if guard.was_told(error):
                guard.clear_told(error)
            else:
                guard.fail(self._where, error)
            raise
        finally:
            guard.current = None
