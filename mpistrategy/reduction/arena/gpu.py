"""Arenas in GPU memory: what travels lies ready in one piece, and nothing is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import divide_by, wire_dtype
from mpistrategy.arrays.gpu import DeviceArray, check_no_capture, cupy_for, to_host, write_from_host
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.gpu.transports.setup import device_path
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import communication_memory, device_paths
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.routes.in_place import Replicas


def device_buckets(
    communicator: Communicator, dtypes: Sequence[np.dtype[Any]], sizes: Sequence[int], shared_result: bool
) -> tuple[Replicas, ...]:
    """Return zeroed arrays of these dtypes and sizes on this rank's GPU, and as many for results where asked for."""
    cupy = cupy_for("an arena in GPU memory")
    mine = gpu_of(communicator.devices, communicator.rank)
    with cupy.cuda.Device(cupy.cuda.runtime.getDevice() if mine is None else mine):
        made = []
        for dtype, size in zip(dtypes, sizes, strict=True):
            mine, *result = (communication_memory(cupy, size, dtype) for _ in range(1 + shared_result))
            for array in (mine, *result):
                array[...] = 0
            made.append(Replicas((mine,), result=result[0] if shared_result else None))
    return tuple(made)


class BucketReduction:
    """One all-reduce of an arena's buckets, in place or into their results.

    It is made before the ranks agree: memory may be short, which all ranks hear of then.

    Args:
        ranks: the strategy's.
        buckets: made by `device_buckets`.
        path: which one is asked for; see `mpistrategy.options.path_word`.
        into_result: write the results, and leave the buckets as they are.
    """

    def __init__(self, ranks: Communicator, buckets: Sequence[Replicas], path: str, *, into_result: bool) -> None:
        cupy = cupy_for("an arena in GPU memory")
        check_no_capture(cupy, "a reduction of an arena in GPU memory")
        self._ranks, self._word = ranks, path
        first: DeviceArray = buckets[0].mine
        self._device = first.device
        #: What each bucket holds, what travels in its place, and where the result goes.
        self._parts: list[tuple[DeviceArray, DeviceArray, DeviceArray]] = []
        with self._device:
            for bucket in buckets:
                target: Any = bucket.result if into_result and bucket.result is not None else bucket.mine
                wide = wire_dtype(target.dtype)
                travels = target if wide == target.dtype else communication_memory(cupy, target.size, wide)
                if target.size:
                    self._parts.append((bucket.mine, travels, target))
        self._most_bytes = max((travels.nbytes for _, travels, _ in self._parts), default=0)
        known = device_paths(ranks).known.get(self._word)
        if known is not None:
            with self._device:
                known.make_room(self._most_bytes)

    def run(self, communicator: Communicator, op: ReduceOp, call: Call) -> None:
        """Reduce, after the agreement; `communicator` may round what travels."""
        with self._device:
            path = device_path(self._ranks, self._word, call, self._most_bytes)
            for mine, travels, target in self._parts:
                if travels is not mine:
                    travels[...] = mine
                path.allreduce(communicator, travels, op.on_the_wire)
                divide_by(op.divisor(travels.dtype, self._ranks.size), travels)
                if travels is not target:
                    target[...] = travels  # converted on the way


def broadcast_buckets(communicator: Communicator, buckets: Sequence[Replicas]) -> None:
    """Write replica 0's buckets into everybody's, by way of the host; inside an agreed call."""
    for bucket in buckets:
        sent = to_host(bucket.mine)
        communicator.bcast(sent, 0)
        write_from_host(sent, bucket.mine)
