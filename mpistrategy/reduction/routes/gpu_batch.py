"""Values in GPU memory in a batch: which of them are reduced on their device, and which through the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrategy.arrays.convert import as_device_array, is_on_device, like_given
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.gpu import check_device, to_host
from mpistrategy.arrays.values import IndexedSlices

if TYPE_CHECKING:
    from mpistrategy.mpi.contract.call import Call
    from mpistrategy.mpi.interface.communicator import Communicator
    from mpistrategy.options import CommunicationOptions, ReduceOp
    from mpistrategy.reduction.routes.gpu import DeviceReduction


class DeviceBatch:
    """The values of a batch of which some are in GPU memory.

    Args:
        ranks: who takes part.
        values: what this rank brings, checked; CuPy arrays among them.
        op: how they are combined.
        options: hints.
        path: the path for arrays in GPU memory, "" for that of the options; None where they go by way of the host.
        num_packs: see `mpistrategy.reduction.layout.packing.plan`.
        where: the public name to blame in errors.

    Attributes:
        values: the same, with copies on the host in the place of arrays that go by way of it.

    Raises:
        DeviceError: for arrays on another GPU than this rank's, or on several.
    """

    def __init__(
        self,
        ranks: Communicator,
        values: Sequence[Any],
        op: ReduceOp,
        options: CommunicationOptions,
        path: str | None,
        num_packs: float,
        where: str,
    ) -> None:
        self._on_devices = [index for index, value in enumerate(values) if is_on_device(value)]
        arrays = [values[index] for index in self._on_devices]
        check_device(arrays, gpu_of(ranks.devices, ranks.rank), where)
        self._reduction: DeviceReduction | None = None
        self.values = list(values)
        if path is None:
            for index, array in zip(self._on_devices, arrays, strict=True):
                self.values[index] = to_host(array)
        else:
            from mpistrategy.reduction.routes.gpu import DeviceReduction  # here, for the quick import

            self._reduction = DeviceReduction(ranks, arrays, op, options, path, num_packs)
            self._reduction.prepare()

    def run(self, communicator: Communicator, call: Call) -> list[Any]:
        """Return the results of the values that are reduced on their device, and None for the others."""
        results: list[Any] = [None] * len(self.values)
        if self._reduction is not None:
            for index, result in zip(self._on_devices, self._reduction.run(communicator, call), strict=True):
                results[index] = result
        return results


def in_kind(result: Any, given: Any) -> Any:
    """Return a result as the kind of array, or of slices, that was given; None on ranks that want none."""
    if result is None:
        return None
    if isinstance(result, IndexedSlices) and isinstance(given, IndexedSlices):
        return IndexedSlices(
            like_given(result.values, given.values), like_given(result.indices, given.indices), result.dense_shape
        )
    return like_given(result, given)


def write(results: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy results into arrays of their dtypes and shapes: those in GPU memory all at once, on the current stream."""
    on_device: list[tuple[Any, Any]] = []
    for result, target in zip(results, targets, strict=True):
        if is_on_device(target):
            on_device.append((as_device_array(result, "a result in GPU memory"), target))
        else:
            target[...] = result
    if on_device:
        from mpistrategy.reduction.routes.gpu_copy import move  # here, for the quick import

        with on_device[0][0].device:
            move([result for result, _ in on_device], [target for _, target in on_device])
