"""mpistrategy: the tf.distribute programming model on NumPy arrays over MPI, one replica a rank.

Importing it starts no MPI; the first `MirroredStrategy` does.

(For pytest, which warns of a package with a plugin that was imported before it: PYTEST_DONT_REWRITE.)
"""

import importlib as _importlib
import sys as _sys
from os import environ as _environ
from typing import TYPE_CHECKING, Any

from mpistrategy import errors
from mpistrategy.arrays.values import DistributedValues, IndexedSlices, Mirrored, PerReplica, ValueContext
from mpistrategy.context import experimental_set_strategy
from mpistrategy.cross_device_ops.algorithms import (
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
from mpistrategy.input.options import InputContext, InputOptions
from mpistrategy.objects import other_names as _other_names
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
from mpistrategy.reduction.arena import Arena
from mpistrategy.reduction.asynchronous import AllReduceHandle
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.mirrored import MirroredStrategy, OneDeviceStrategy
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import (
    Strategy,
    Streams,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy import gradients, losses, metrics, optimizers, schedules, telemetry, testing
    from mpistrategy.checkpoint.checkpoint import Checkpoint, CheckpointManager, Restored, Saving, Stateful
    from mpistrategy.checkpoint.preemption import PreemptionCheckpointHandler, TerminationConfig
    from mpistrategy.checkpoint.state import Rows
    from mpistrategy.training.gradient_buckets import GradientBuckets

__version__ = "1.0.0rc1"

#: What is loaded when the first of these names is used: thousands of ranks that import at once read fewer files.
_LATER = {
    "Checkpoint": "checkpoint.checkpoint",
    "CheckpointManager": "checkpoint.checkpoint",
    "GradientBuckets": "training.gradient_buckets",
    "PreemptionCheckpointHandler": "checkpoint.preemption",
    "Restored": "checkpoint.checkpoint",
    "Rows": "checkpoint.state",
    "Saving": "checkpoint.checkpoint",
    "Stateful": "checkpoint.checkpoint",
    "TerminationConfig": "checkpoint.preemption",
    **{name: name for name in ("gradients", "losses", "metrics", "optimizers", "schedules", "telemetry", "testing")},
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module = _importlib.import_module(f"{__name__}.{_LATER[name]}")
        value = globals()[name] = getattr(module, name, module)
        return value
    hint = f". {_other_names.MODULE[name]}." if name in _other_names.MODULE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=_sys.modules[__name__])


#: TensorFlow's former name.
CollectiveHints = CommunicationOptions


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

if _environ.get("MPISTRATEGY_TRACE") or _is_on(_environ.get("MPISTRATEGY_NVTX", "")):
    _importlib.import_module("mpistrategy.telemetry")._start_from_environment()
