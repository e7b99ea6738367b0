"""mpistrategy: the tf.distribute programming model on NumPy arrays over MPI, one replica a rank.

Importing it starts no MPI; the first `MirroredStrategy` does.

(For pytest, which warns of a package with a plugin that was imported before it: PYTEST_DONT_REWRITE.)
"""

import sys as _sys
from os import environ as _environ
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

from mpistrategy import errors, testing
from mpistrategy.arrays.values import DistributedValues, IndexedSlices, Mirrored, PerReplica, ValueContext
from mpistrategy.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    MpiAllReduce,
    NcclAllReduce,
    OrderedAllReduce,
    ReductionToOneDevice,
)
from mpistrategy.input.datasets import Dataset
from mpistrategy.input.distributed import DistributedDataset
from mpistrategy.input.iterators import DistributedIterator
from mpistrategy.input.options import InputContext, InputOptions, InputReplicationMode
from mpistrategy.objects.shown import show_as as _show_as
from mpistrategy.options import (
    CommunicationImplementation,
    CommunicationOptions,
    Op,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrategy.options import is_on as _is_on
from mpistrategy.reduction.arena.arena import Arena
from mpistrategy.reduction.asynchronous import AllReduceHandle
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
from mpistrategy.strategy.one_device import OneDeviceStrategy
from mpistrategy.strategy.random_streams import Streams
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy import telemetry
    from mpistrategy.checkpoint.checkpoint import Checkpoint, Restored, Saving, Stateful
    from mpistrategy.checkpoint.manager import CheckpointManager
    from mpistrategy.checkpoint.preemption import PreemptionCheckpointHandler, TerminationConfig
    from mpistrategy.training import gradients, losses, metrics, optimizers, schedules
    from mpistrategy.training.gradient_buckets import GradientBuckets

__version__ = "0.2.0"

#: What is loaded when the first of these names is used: thousands of ranks that import at once read fewer files.
_CHECKPOINTS = {
    "Checkpoint": "checkpoint",
    "CheckpointManager": "manager",
    "PreemptionCheckpointHandler": "preemption",
    "Restored": "checkpoint",
    "Saving": "checkpoint",
    "Stateful": "checkpoint",
    "TerminationConfig": "preemption",
}
_TRAINING = ("gradients", "losses", "metrics", "optimizers", "schedules")


def __getattr__(name: str) -> Any:
    if name == "telemetry":
        return _import("telemetry")
    if name in _CHECKPOINTS:
        for each, module in _CHECKPOINTS.items():
            globals()[each] = getattr(_import(f"checkpoint.{module}"), each)
        _show_as(__name__, _CHECKPOINTS)
    elif name == "GradientBuckets" or name in _TRAINING:
        _load_training()
    else:
        return _other_name(name)
    return globals()[name]


def _other_name(name: str) -> Any:
    """Return what has TensorFlow's former name; raise an AttributeError that says what to write for others."""
    if name == "CollectiveHints":
        return CommunicationOptions
    words = _import("objects.other_names").MODULE
    raise _import("objects.nearest").attribute_error(f"module {__name__!r}", name, words, _sys.modules[__name__])


def _import(name: str) -> Any:
    import importlib

    return importlib.import_module(f"{__name__}.{name}")


def _load_training() -> None:
    if "GradientBuckets" in globals():
        return
    globals()["GradientBuckets"] = _import("training.gradient_buckets").GradientBuckets
    _show_as(__name__, ["GradientBuckets"])
    for name in _TRAINING:
        globals()[name] = _import(f"training.{name}")
        _make_public(name)


def _make_public(name: str) -> None:
    """Let ``from mpistrategy.optimizers import SGD`` and pickle find a module under its public name."""
    module = globals()[name]
    _sys.modules[f"{__name__}.{name}"] = module
    _show_as(f"{__name__}.{name}", module.__all__)


class _Later(_ModuleType):
    """A public module that is loaded when something in it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # whoever looks through all modules of the process
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load_training()
        return getattr(_sys.modules[self.__name__], name)


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

_show_as(__name__, [name for name in __all__ if name in globals()])
_make_public("testing")
for _name in _TRAINING:
    _sys.modules[f"{__name__}.{_name}"] = _Later(f"{__name__}.{_name}")

if _environ.get("MPISTRATEGY_TRACE") or _is_on(_environ.get("MPISTRATEGY_NVTX", "")):
    __getattr__("telemetry")._start_from_environment()
