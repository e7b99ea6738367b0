"""mpistrategy: the tf.distribute programming model on NumPy arrays over MPI, one replica a rank.

Importing it starts no MPI; the first `MirroredStrategy` does.

(For pytest, which warns of a package with a plugin that was imported before it: PYTEST_DONT_REWRITE.)
"""

import sys as _sys
from os import environ as _environ
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

from mpistrategy import errors
from mpistrategy.arrays.values import DistributedValues, IndexedSlices, Mirrored, PerReplica, ValueContext
from mpistrategy.cross_device_ops.base import CrossDeviceOps
from mpistrategy.cross_device_ops.built_in import MpiAllReduce
from mpistrategy.mpi.contract.public_calls import set_importer as _set_importer
from mpistrategy.objects.shown import show_as as _show_as
from mpistrategy.options import (
    CommunicationImplementation,
    CommunicationOptions,
    InputReplicationMode,
    Op,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrategy.options import is_on as _is_on
from mpistrategy.strategy.current import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.mirrored import MirroredStrategy
from mpistrategy.strategy.strategy import Strategy

if TYPE_CHECKING:
    from mpistrategy import telemetry, testing
    from mpistrategy.checkpoint.checkpoint import Checkpoint, Restored, Saving, Stateful
    from mpistrategy.checkpoint.kinds.rows import Rows
    from mpistrategy.checkpoint.manager import CheckpointManager
    from mpistrategy.checkpoint.preemption import PreemptionCheckpointHandler, TerminationConfig
    from mpistrategy.cross_device_ops.all_reduce import HierarchicalCopyAllReduce, NcclAllReduce
    from mpistrategy.cross_device_ops.ordered import OrderedAllReduce
    from mpistrategy.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
    from mpistrategy.input.datasets import Dataset
    from mpistrategy.input.distributed import DistributedDataset
    from mpistrategy.input.iterators import DistributedIterator
    from mpistrategy.input.options import InputContext, InputOptions
    from mpistrategy.reduction.arena import Arena
    from mpistrategy.reduction.asynchronous import AllReduceHandle
    from mpistrategy.strategy.one_device import OneDeviceStrategy
    from mpistrategy.strategy.random_streams import Streams
    from mpistrategy.training import gradients, losses, metrics, optimizers, schedules
    from mpistrategy.training.gradient_buckets import GradientBuckets
    from mpistrategy.variables.variable import Variable

__version__ = "0.2.0"

#: What is loaded when the first of these names is used: thousands of ranks that import at once read fewer files.
_LATER = {
    "AllReduceHandle": "reduction.asynchronous",
    "Arena": "reduction.arena",
    "Checkpoint": "checkpoint.checkpoint",
    "CheckpointManager": "checkpoint.manager",
    "Dataset": "input.datasets",
    "DistributedDataset": "input.distributed",
    "DistributedIterator": "input.iterators",
    "GradientBuckets": "training.gradient_buckets",
    "HierarchicalCopyAllReduce": "cross_device_ops.all_reduce",
    "InputContext": "input.options",
    "InputOptions": "input.options",
    "NcclAllReduce": "cross_device_ops.all_reduce",
    "OneDeviceStrategy": "strategy.one_device",
    "OrderedAllReduce": "cross_device_ops.ordered",
    "PreemptionCheckpointHandler": "checkpoint.preemption",
    "ReductionToOneDevice": "cross_device_ops.reduction_to_one_device",
    "Restored": "checkpoint.checkpoint",
    "Rows": "checkpoint.kinds.rows",
    "Saving": "checkpoint.checkpoint",
    "Stateful": "checkpoint.checkpoint",
    "Streams": "strategy.random_streams",
    "TerminationConfig": "checkpoint.preemption",
    "Variable": "variables.variable",
}
#: The same for modules.
_MODULES = {
    "gradients": "training.gradients",
    "losses": "training.losses",
    "metrics": "training.metrics",
    "optimizers": "training.optimizers",
    "schedules": "training.schedules",
    "telemetry": "telemetry",
    "testing": "testing",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        found = getattr(_import(_LATER[name]), name)
        _show_as(__name__, found)
    elif name in _MODULES:
        found = _import(_MODULES[name])
        _sys.modules[f"{__name__}.{name}"] = found  # so that ``from mpistrategy.optimizers import SGD`` finds it
        _show_as(f"{__name__}.{name}", *(getattr(found, each) for each in found.__all__))
    else:
        return _other_name(name)
    globals()[name] = found
    return found


def _other_name(name: str) -> Any:
    """Return what has TensorFlow's former name; raise an AttributeError that says what to write for others."""
    if name == "CollectiveHints":
        return CommunicationOptions
    words = _import("objects.other_names").MODULE
    raise _import("objects.nearest").attribute_error(f"module {__name__!r}", name, words, _sys.modules[__name__])


def _import(name: str) -> Any:
    import importlib

    return importlib.import_module(f"{__name__}.{name}")


class _Later(_ModuleType):
    """A public module that is loaded when something in it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # whoever looks through all modules of the process
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(__getattr__(self.__name__.rpartition(".")[2]), name)


def _import_all() -> None:
    """Import all public modules; plans of faults name collectives of all of them."""
    for name in __all__:
        getattr(_sys.modules[__name__], name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = [
    "AllReduceHandle",
    "Arena",
    "Checkpoint",
    "CheckpointManager",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "GradientBuckets",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MpiAllReduce",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "Op",
    "OrderedAllReduce",
    "PerReplica",
    "PreemptionCheckpointHandler",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "Restored",
    "Rows",
    "Saving",
    "Stateful",
    "Strategy",
    "StrategyExtended",
    "Streams",
    "TerminationConfig",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "errors",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "gradients",
    "has_strategy",
    "in_cross_replica_context",
    "losses",
    "metrics",
    "optimizers",
    "schedules",
    "telemetry",
    "testing",
]

_set_importer(_import_all)
_show_as(__name__, *(globals()[_name] for _name in __all__ if _name in globals()))
for _name in _MODULES.keys() - {"telemetry", "testing"}:  # which are files under these names
    _sys.modules[f"{__name__}.{_name}"] = _Later(f"{__name__}.{_name}")

if _environ.get("MPISTRATEGY_TRACE") or _is_on(_environ.get("MPISTRATEGY_NVTX", "")):
    __getattr__("telemetry")._start_from_environment()
