"""Arrays in GPU memory become one buffer."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrategy.cross_device_ops.packing import Pack
from mpistrategy.device_arrays import DeviceArray


def fill(pack: Pack, arrays: Sequence[DeviceArray], bucket: DeviceArray) -> None:
    """Copy the arrays of a pack into `bucket`, converted to its dtype, on the current stream."""
    for member in pack.members:
        bucket[member.start : member.stop] = arrays[member.index].ravel()
