"""What protection costs: the same all-reduces without the check of calls, without the flight record, and with both.

All variants enter where `ReplicaContext.all_reduce` has found its context; every one has a communicator of its own.
On one node the check travels with the data; the variant without it finds its plan by dtype and shape alone, without
call site, digest and thread.  For the levels of checks between nodes every rank counts as a node of its own, so that
everything goes through MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from sys import _getframe
from types import FrameType
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.cases.case import Case, Variant
from mpistrategy.cli.bench.cases.sums import Bench
from mpistrategy.cross_device_ops.built_in import MpiAllReduce
from mpistrategy.mpi.contract import check_level
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.plan import Plan, plan_of, usual_route
from mpistrategy.reduction.plans import WHERE, Plans
from mpistrategy.reduction.routes.mailboxes import MailboxRoute

#: A single element takes another route, which the bare variant does not have.
SIZES = (64, 4 * 2**10, 2**20)
BARE, UNRECORDED, WHOLE = "neither check nor record", "check, no record", "mpistrategy"
_LOOKS = 200


class _Unrecorded(Plans):
    """Writes nothing into the flight record."""

    def _runner(self) -> Callable[[Any, Any, Any, FrameType | None, Any], Any]:
        guard, callers, find, call = self._guard, self._tree.root.callers, self._find, self._call

        def run(reduce_op: Any, value: Any, out: Any, frame: FrameType | None, step: Any) -> Any:
            assert guard.current is None
            assert frame is not None
            code, node = frame.f_code, callers.get(frame.f_lasti)
            place = node.found if node is not None and node.code is code and code is step else None
            if place is None:
                place = self._place_of(frame, step)
            known = place.run
            if reduce_op is not place.op or value.dtype is not place.dtype or value.shape != place.shape:
                known = find(place, reduce_op, value)
            assert known is not None
            guard.current = call
            try:
                return known(value, out)
            finally:
                guard.current = None

        return run


def protection(bench: Bench) -> Iterator[Case]:
    """Yield the cases."""
    for nbytes in SIZES:
        mine = np.zeros(nbytes // 4, np.float32)
        name = size_in_words(nbytes)
        if bench.nodes == 1:
            variants = [
                _variant(BARE, mine, partial(_bare, mine), MpiCommunicator()),
                _variant(UNRECORDED, mine, partial(_through, _Unrecorded, mine), MpiCommunicator()),
                _variant(WHOLE, mine, partial(_through, Plans, mine), MpiCommunicator()),
            ]
            yield Case("guard", f"{name} on one node", nbytes, variants)
        rank = bench.ranks.rank
        variants = []
        for level in reversed(check_level.LEVELS):
            apart = MpiCommunicator(node_key=rank)
            apart.guard.check_as(level)
            variants.append(_variant(f"check={level!r}", mine, partial(_through, Plans, mine), apart))
        digest, greatest = np.zeros(2, np.int64), np.zeros(2, np.int64)
        allreduce = partial(bench.ranks.allreduce, digest, greatest)
        variants.append(Variant("a 16-byte Allreduce of mpi4py's", allreduce, [digest], [greatest]))
        yield Case("guard", f"{name} between nodes", nbytes, variants)


def costs(figures: dict[str, Any]) -> dict[str, float]:
    """Return the microseconds that the check and the record take of a call, and the watchdog of a second."""
    median = {row["name"]: row["median_us"] for row in figures["variants"]}
    found = {"check": median[UNRECORDED] - median[BARE], "record": median[WHOLE] - median[UNRECORDED]}
    return {**{name: round(cost, 3) for name, cost in found.items()}, "watchdog": round(1e6 * _look_seconds(), 1)}


def _look_seconds() -> float:
    """Return how long one look of the watchdog takes; there is one a second."""
    dog = watchdog.of_this_process(0, 1)
    start = time.perf_counter()
    for _ in range(_LOOKS):
        dog._look(time.monotonic())
    return (time.perf_counter() - start) / _LOOKS


def _variant(
    name: str, mine: Array, make: Callable[[MpiCommunicator], Callable[[], Any]], communicator: MpiCommunicator
) -> Variant:
    return Variant(name, make(communicator), [mine], close=communicator.free)


def _through(kind: type[Plans], mine: Array, communicator: MpiCommunicator) -> Callable[[], Any]:
    run = kind(communicator, MpiAllReduce(), CommunicationOptions(), Call(communicator.guard, WHERE)).run

    def call() -> Any:
        return run("SUM", mine, None, _getframe(), call.__code__)

    return call


def _bare(mine: Array, communicator: MpiCommunicator) -> Callable[[], Any]:
    """Return the same reduction of one array, as short as it can be without the check."""
    mailboxes = communicator.mailboxes
    assert mailboxes is not None
    plan = plan_of(communicator, ((mine.dtype, mine.shape),), ReduceOp.SUM, 0, usual_route)
    if isinstance(plan.route, MailboxRoute):
        run = _bare_in_mailboxes(plan.route, mine.shape)
    else:
        run = _bare_plan(plan, mailboxes)
    known = {("SUM", mine.dtype, mine.shape): run}

    def call() -> Any:
        return known["SUM", mine.dtype, mine.shape](mine)

    return call


def _bare_plan(plan: Plan, mailboxes: Mailboxes) -> Callable[[Array], Any]:
    def run(mine: Array) -> Any:
        plan.bring((mine,))
        _meet(mailboxes)
        return plan.run((mine,))[0]

    return run


def _meet(mailboxes: Mailboxes) -> None:
    sequence = mailboxes.sequence = mailboxes.sequence + 1
    slot = mailboxes.slots[sequence & 1]
    slot.mine[0] = sequence
    for peer in slot.peers:
        if peer[0] != sequence:
            mailboxes.waiting.until(peer, sequence)


def _bare_in_mailboxes(route: MailboxRoute, shape: tuple[int, ...]) -> Callable[[Array], Any]:
    mailboxes, quiet, combine = route.mailboxes, route.quiet, route.combine
    slots = [
        (slot.mine, slot.peers, [part.reshape(shape) for part in parts])
        for slot, (parts,) in zip(mailboxes.slots, route.parts, strict=True)
    ]

    def run(mine: Array) -> Any:
        sequence = mailboxes.sequence = mailboxes.sequence + 1
        number, peers, parts = slots[sequence & 1]
        parts[mailboxes.local_rank][...] = mine
        number[0] = sequence
        for peer in peers:
            if peer[0] != sequence:
                mailboxes.waiting.until(peer, sequence)
        first, second, *others = parts
        total = quiet(combine, first, second)
        for other in others:
            quiet(combine, total, other, out=total)
        return total

    return run
