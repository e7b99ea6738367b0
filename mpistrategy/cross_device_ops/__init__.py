"""Algorithms that turn the replicas' values into one."""

from mpistrategy.cross_device_ops.all_reduce import HierarchicalCopyAllReduce, MpiAllReduce, NcclAllReduce
from mpistrategy.cross_device_ops.base import CrossDeviceOps
from mpistrategy.cross_device_ops.ordered import OrderedAllReduce
from mpistrategy.cross_device_ops.reduction_to_one_device import ReductionToOneDevice

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "MpiAllReduce",
    "NcclAllReduce",
    "OrderedAllReduce",
    "ReductionToOneDevice",
]
