"""Repeated all-reduces of arrays in GPU memory: checks and packs are made once."""

from __future__ import annotations

from typing import Any

from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.gpu import DeviceArray, are_apart, check_device
from mpistrategy.arrays.nest import Leaves
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature, digest_of
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.reduction.routes.base import CallPlan
from mpistrategy.reduction.routes.gpu import GpuRoute, own_result
from mpistrategy.reduction.routes.gpu_copy import move


class DevicePlan(CallPlan):
    """The plan of nests of CuPy arrays.

    Args:
        otherwise: does the calls with an `out` that is not the value, or with one array twice.
        ranks: who takes part.
        leaves: how to reach the arrays.
        route: of the arrays.
        signature: of the call.
        timeout: how long the call may wait for the other ranks, in seconds; None: as long as the strategy says.
    """

    def __init__(
        self,
        otherwise: CallPlan,
        ranks: Ranks,
        leaves: Leaves,
        route: GpuRoute,
        signature: Signature,
        timeout: float | None,
    ) -> None:
        self._otherwise, self._leaves, self._route = otherwise, leaves, route
        #: Which arrays travel by themselves: those are reduced where they are, if they are their own result.
        self._lone = {pack.members[0].index for pack in route.packs if len(pack.members) == 1}
        self._gpu, self._timeout = gpu_of(ranks.devices, ranks.rank), timeout
        self._signature, self._digest = signature, digest_of(signature)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        leaves = self._leaves.take(value)
        targets: list[DeviceArray | None] | None = None
        if out is not None:
            repeats = len({each.data.ptr for each in leaves}) < len(leaves)
            meet = len(self._lone) > 1 and not are_apart([leaves[index] for index in self._lone])
            if out is not value or repeats or meet:
                return self._otherwise.run(call, value, out, weight)
            targets = [None] * len(leaves)
            for index in self._lone:
                targets[index] = own_result(leaves[index], leaves[index])
        call.structure = self._leaves.text
        check_device(leaves, self._gpu, call.where)
        memory = self._route.bring(leaves, targets)
        if self._timeout is not None:
            call.timeout = self._timeout
        call.agree_on(self._signature, self._digest)
        results = self._route.run(leaves, memory)
        if out is None:
            return self._leaves.build(results)
        copied = [(result, each) for result, each in zip(results, leaves, strict=True) if result is not each]
        if copied:
            with leaves[0].device:
                move(*zip(*copied, strict=True))
        return out
