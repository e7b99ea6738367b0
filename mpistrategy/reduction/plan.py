"""The plan of a list of arrays on the host: its route, and what is made of the sums; laid out once, run many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, host_wire_dtype, mean_dtype
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.signature import Signature
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import finish, rounded
from mpistrategy.reduction.layout.leaves import Leaves, direct_targets
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.routes.base import Route, Targets
from mpistrategy.reduction.routes.communicator import CommunicatorRoute, hybrid, names_of
from mpistrategy.reduction.routes.mailboxes import MISFIT, NUMBERS, MailboxRoute, Run, fits, repeated
from mpistrategy.reduction.routes.result_buffers import ResultBufferRoute

#: Returns the route of arrays of certain layouts, with packs of at most so many bytes (0: the library's own limit).
ChooseRoute = Callable[[Communicator, tuple[Layout, ...], ReduceOp, float], Route]

_REMEMBERED = 512


class Plan:
    """The reduction of arrays of certain layouts by one route.

    Args:
        communicator: the ranks.
        layouts: dtype and shape of each array.
        op: how they are combined.
        route: how they travel.
    """

    def __init__(self, communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, route: Route) -> None:
        self.route, self.op = route, op
        #: Before the ranks agree on the call; the arguments are those of `run`.
        self.bring = route.bring
        self._size = communicator.size
        self._dtypes = [dtype for dtype, _ in layouts]
        #: Whether what the route returns is the result: in its own dtype, and no integers are divided.
        self._is_exact = all(
            dtype == host_wire_dtype(dtype) and not (op is ReduceOp.MEAN and dtype.kind in "iu")
            for dtype in self._dtypes
        )

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return the results, after the agreement.

        Args:
            arrays: this rank's, of the layouts.
            targets: see `Targets`.
        """
        results = self.route.run(arrays, targets)
        if self._is_exact:
            return results
        return [
            finish(result, dtype, self.op, self._size) if dtype.kind in "iu" else rounded(result, dtype)
            for result, dtype in zip(results, self._dtypes, strict=True)
        ]

    def repeated(self, guard: Guard, signature: Signature, where: Leaves, kinds: set[type]) -> Run:
        """Return a ``run(value, out)``: the whole call for nests of these arrays.

        It returns MISFIT, before anything has been sent, for a `value` or an `out` that it was not made for.

        Args:
            guard: the communicator's.
            signature: of the call.
            where: how to reach the leaves.
            kinds: the types of these: `np.ndarray`, and those in `NUMBERS`.
        """
        if isinstance(self.route, MailboxRoute):
            short = repeated(self.route, guard, signature, where, kinds)
            if short is not None:
                short.__dict__["in_mailboxes"] = True
                return described(short, signature)
        digest, nested, only_arrays = guard.digest(signature), not where.single, kinds == {np.ndarray}
        dtypes = [mean_dtype(dtype) if self.op is ReduceOp.MEAN else dtype for dtype in self._dtypes]
        some_go_alone = any(len(pack.members) == 1 for pack in self.route.packs)

        def run(value: Any, out: Any) -> Any:
            leaves = where.take(value) if nested else (value,)
            try:
                arrays = leaves if only_arrays else [*map(_array_of, leaves)]
            except OverflowError:  # an int that has no such dtype
                return MISFIT
            targets: Targets = None
            if out is not None:
                targets = direct_targets(out, value, where, arrays, dtypes, some_go_alone)
                if targets is None:
                    return MISFIT
            self.bring(arrays, targets)
            guard.compare_digest(digest, signature)
            try:
                results = self.run(arrays, targets)
            except BaseException as error:
                guard.fail_after_agreement(signature.call, error)
                raise
            if out is not None:
                for target, result in zip(where.take(out), results, strict=True):
                    if result is not target:
                        target[...] = result
                return out
            if only_arrays:
                return where.build(results) if nested else results[0]
            given = zip(leaves, results, strict=True)
            return where.build([result if type(leaf) is np.ndarray else result[()] for leaf, result in given])

        return described(run, signature)


def _array_of(leaf: Any) -> Array:
    return leaf if type(leaf) is np.ndarray else np.asarray(leaf, NUMBERS[type(leaf)])


def plan_of(
    communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float, choose: ChooseRoute
) -> Plan:
    """Return the plan of arrays of these layouts, with the route that `choose` returns; the same one the next time."""
    key = (layouts, op, bytes_per_pack, choose)
    known: Plan | None = communicator.compiled.get(key)
    if known is None:
        if len(communicator.compiled) >= _REMEMBERED:
            communicator.compiled.clear()
        route = choose(communicator, layouts, op, bytes_per_pack)
        known = communicator.compiled[key] = Plan(communicator, layouts, op, route)
    return known


def usual_route(communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float) -> Route:
    """Return the fastest route to every rank."""
    if communicator.mailboxes is not None and fits(communicator.mailboxes, layouts):
        return MailboxRoute(communicator.mailboxes, layouts, op)
    packs = hybrid(layouts, communicator.thresholds.pack_bytes, bytes_per_pack)
    names = names_of(communicator, packs, op)
    route = CommunicatorRoute(communicator, packs, op, names)
    if communicator.result_buffers is not None and {*names} == {"pipelined"}:
        return ResultBufferRoute(communicator, op, route)
    return route


def described(run: Run, signature: Signature) -> Run:
    """Return `run`, after it was told what it does: the flight record keeps it, and may have to say so."""
    run.__dict__["signature"] = signature
    return run
