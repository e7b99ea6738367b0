"""Arenas in GPU memory: what travels lies ready in one piece, and nothing is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import wire_dtype
from mpistrategy.device_arrays import DeviceArray, cupy_for, placed_as, to_host
from mpistrategy.mpi.call import Call
from mpistrategy.mpi.device_path import communication_memory
from mpistrategy.mpi.device_paths import device_path
from mpistrategy.mpi.replicas import Replicas
from mpistrategy.mpi.transport import Communicator
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word


def device_buckets(
    communicator: Communicator, dtypes: Sequence[np.dtype[Any]], sizes: Sequence[int], shared_result: bool
) -> tuple[Replicas, ...]:
    """Return zeroed arrays of these dtypes and sizes on this rank's GPU, and as many for results where asked for."""
    cupy = cupy_for("an arena in GPU memory")
    device = communicator.devices[communicator.rank] if communicator.devices else None
    index = device.index if device is not None and device.kind == "GPU" else cupy.cuda.runtime.getDevice()
    with cupy.cuda.Device(index):
        made = []
        for dtype, size in zip(dtypes, sizes, strict=True):
            mine, result = (communication_memory(cupy, size, dtype) for _ in range(2))
            mine[...] = result[...] = 0
            made.append(Replicas((mine,), result=result if shared_result else None))
    return tuple(made)


def reduce_buckets(
    ranks: Communicator,
    communicator: Communicator,
    buckets: Sequence[Replicas],
    op: ReduceOp,
    options: CommunicationOptions,
    call: Call,
    *,
    into_result: bool,
) -> None:
    """Reduce the buckets in place, or into their results, inside an agreed call.

    Args:
        ranks: the strategy's.
        communicator: the same, or a view of it that rounds what travels.
        buckets: made by `device_buckets`.
        op: how.
        options: hints; `implementation` names the path.
        call: the guard's.
        into_result: write the results, and leave the buckets as they are.
    """
    cupy = cupy_for("an arena in GPU memory")
    first: DeviceArray = buckets[0].mine
    with first.device:
        path = device_path(ranks, path_word(options), call)
        for bucket in buckets:
            target = bucket.result if into_result and bucket.result is not None else bucket.mine
            if not target.size:
                continue
            wide = wire_dtype(target.dtype)
            travels: Any = target if wide == target.dtype else communication_memory(cupy, target.size, wide)
            if travels is not bucket.mine:
                travels[...] = bucket.mine
            path.allreduce(communicator, travels, op.on_the_wire)
            if op is ReduceOp.MEAN:
                np.true_divide(travels, travels.dtype.type(ranks.size), out=travels)
            if travels is not target:
                target[...] = travels.astype(target.dtype)


def broadcast_buckets(communicator: Communicator, buckets: Sequence[Replicas]) -> None:
    """Write replica 0's buckets into everybody's, by way of the host; inside an agreed call."""
    for bucket in buckets:
        sent = to_host(bucket.mine)
        communicator.bcast(sent, 0)
        bucket.mine[...] = placed_as(sent, bucket.mine)
