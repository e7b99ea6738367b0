"""OneDeviceStrategy: one replica, no MPI."""

from __future__ import annotations

from mpistrategy.arrays import devices
from mpistrategy.mpi.gpu.device_selection import activate, check_exists
from mpistrategy.mpi.interface.ranks import Alone
from mpistrategy.objects.settings import checked_type
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """One replica on one device of this rank; never starts MPI.  The specification of every other strategy.

    Args:
        device: a device string such as ``"CPU:0"`` or ``"GPU:0"``; a GPU becomes CuPy's current device.

    Raises:
        DeviceError: for a device that does not exist.
        OptionTypeError: when `device` is not a string.
    """

    def __init__(self, device: str = "CPU:0") -> None:
        checked_type("OneDeviceStrategy", "device", device, str, "a device string")
        pattern = devices.parse(device, "OneDeviceStrategy", "device")
        complete = devices.Device(0, pattern.kind or "CPU", pattern.index or 0)
        check_exists(complete, "OneDeviceStrategy")
        only = Alone((complete,))
        activate(complete, only.guard)
        super().__init__(StrategyExtended(self, only))
