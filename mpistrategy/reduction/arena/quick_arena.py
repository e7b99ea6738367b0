"""The all-reduce of an arena whose arrays lie in memory of the node, worked out once for each operation.

What is left for each call: are the arrays still the arena's, do all ranks call the same, and the sums.  After other
work Python's own steps are out of the caches, and cost as much as the sums of a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrategy.arrays.dtypes import quiet_runner
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.arena.arena import Arena
from mpistrategy.reduction.arena.layout import check_dtypes
from mpistrategy.reduction.quick_places import described
from mpistrategy.reduction.routes.in_place import combine, is_in_place
from mpistrategy.reduction.routes.quick_cells import NOT_QUICK


def arena_in_place(
    arena: Arena, op: ReduceOp, communicator: Communicator, where: tuple[str, str]
) -> Callable[[Arena, Any], Any] | None:
    """Return a ``run(arena, out)`` that makes the messages of `Arena.all_reduce`; None for what it does not serve.

    Args:
        arena: what is reduced.
        op: how.
        communicator: the ranks.
        where: the public name of the call, and its place in the program.

    Raises:
        DTypeError: for a dtype that `op` cannot reduce.
    """
    is_open, served = bool(arena.buckets), [is_in_place(communicator, each) for each in arena.buckets]
    if arena.communicator is not communicator or not is_open or not all(served):
        return None
    check_dtypes(arena.buckets, op, where[0])
    guard, quiet, text = communicator.guard, quiet_runner(), op.on_the_wire
    signature = arena.signature(op, *where, in_place=arena.in_place)
    digest = guard.digest(signature)
    divisor = communicator.size if op is ReduceOp.MEAN else 1
    barrier, in_place = communicator.node_barrier, arena.in_place
    arena.shares = [(each.arrays, each.arrays if in_place else (each.result,), each.my_share) for each in arena.buckets]

    # The flight record holds this function, which must not hold the arena's memory after its close().
    def run(arena: Arena, out: Any) -> Any:
        if not arena.is_intact() or (out is not None and not (out is arena and in_place)):
            return NOT_QUICK
        guard.compare_digest(digest, signature)
        try:
            for arrays, targets, share in arena.shares:
                quiet(combine, arrays, targets, text, divisor, share)
            barrier()
        except BaseException as error:
            guard.fail_after_agreement(where[0], error)
            raise
        return arena.result

    return described(run, signature)
