"""What to write here for a name or a keyword of TensorFlow and Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mpistrategy.errors import OptionTypeError

P = ParamSpec("P")
T = TypeVar("T")

_OURS = "Models, losses and layers are the program's own NumPy code"
_NOT_NEEDED = "Leave it out: mpiexec or srun tells the ranks who they are"
_NO_GRAPH = "Leave it out: there is no graph, and a step is an ordinary Python function"
_KEYWORD_ARRAYS = "Write Dataset.from_arrays(arrays, global_batch_size, shuffle_seed=..., epochs=...)"

#: Names of `tf`, `tf.distribute`, `tf.keras` and `tf.train`, and what to write.
MODULE: Mapping[str, str] = {
    "DistributionStrategy": "Write Strategy, or MirroredStrategy to make one",
    "MultiWorkerMirroredStrategy": "Write MirroredStrategy: one replica on each MPI rank, on one node or many",
    "CentralStorageStrategy": "Write MirroredStrategy: variables are mirrored on every rank",
    "ParameterServerStrategy": "Write MirroredStrategy: all ranks work in step, there are no servers",
    "TPUStrategy": "Write MirroredStrategy: one replica on each MPI rank",
    "CollectiveCommunication": "Write CommunicationImplementation",
    "RunOptions": _NO_GRAPH,
    "Server": _NOT_NEEDED,
    "cluster_resolver": _NOT_NEEDED,
    "distribute": "Its names are in mpistrategy itself: mpistrategy.MirroredStrategy",
    "experimental": "Its names are in mpistrategy itself: mpistrategy.CommunicationOptions",
    "train": "Write mpistrategy.Checkpoint and mpistrategy.CheckpointManager",
    "data": "Write mpistrategy.Dataset.from_arrays",
    "keras": f"{_OURS}; mpistrategy.optimizers, .metrics, .schedules and .losses are there",
    "layers": _OURS,
    "nn": "Write mpistrategy.losses.compute_average_loss and scale_regularization_loss",
    "function": _NO_GRAPH,
    "GradientTape": "Write the gradients in NumPy, or take them from torch or JAX",
    "config": 'Write MirroredStrategy("gpu"), or "cpu", "shared", "auto"',
    "io": "Write mpistrategy.Checkpoint",
    "summary": "Write mpistrategy.telemetry.setup_logging, and log on rank 0",
}
#: Attributes of classes, by the class that has not got them.
OF_CLASS: Mapping[str, Mapping[str, str]] = {
    "Strategy": {
        "cluster_resolver": _NOT_NEEDED,
        "unwrap": "Write experimental_local_results",
        "configure": _NOT_NEEDED,
        "experimental_make_numpy_dataset": "Write Dataset.from_arrays",
        "all_reduce": "Write strategy.reduce outside a step, get_replica_context().all_reduce in one",
        "all_gather": "Write strategy.gather outside a step, get_replica_context().all_gather in one",
    },
    "Optimizer": {
        "minimize": "Write apply_gradients([(gradient, variable), ...])",
        "apply": "Write apply_gradients([(gradient, variable), ...])",
        "compute_gradients": "Write the gradients in NumPy, or take them from torch or JAX",
        "get_config": "Its settings are its attributes",
        "get_weights": "Write Checkpoint(optimizer=optimizer).save(path)",
        "set_weights": "Write Checkpoint(optimizer=optimizer).restore(path)",
        "get_slot": "Write slots_of(variable)[name]",
        "lr": "Write learning_rate",
        "clipnorm": "Write global_clipnorm",
    },
    "_Metric": {
        "reset_states": "Write reset_state()",
        "add_weight": "Make a Variable with synchronization ON_READ and aggregation SUM",
    },
    "Dataset": {
        "batch": _KEYWORD_ARRAYS,
        "shuffle": _KEYWORD_ARRAYS,
        "repeat": _KEYWORD_ARRAYS,
        "shard": "Leave it out: distribute_dataset gives each rank its rows",
        "prefetch": "Leave it out",
        "cache": "Leave it out: arrays are in memory or memory-mapped",
        "map": "Transform the arrays before, or each batch in the step function",
        "with_options": "Write InputOptions for distribute_dataset",
    },
    "CheckpointManager": {
        "latest_checkpoint": "Write manager.path_of(manager.steps()[-1])",
        "checkpoints": "Write manager.steps()",
        "restore_or_initialize": "Write manager.restore(), which returns None where there is not a checkpoint",
    },
    "Checkpoint": {"read": "Write restore(path)", "write": "Write save(path)"},
}
#: Keywords of other libraries' optimizers, and what to do instead.
OF_OPTIMIZERS: Mapping[str, str] = {
    "lr": "Write learning_rate.",
    "clipnorm": "Write global_clipnorm.",
    "name": "Leave it out.",
    "clipvalue": "Clip the reduced gradients with np.clip, or write 'global_clipnorm'.",
    "decay": "Write learning_rate=schedules.CosineDecay(...) or another schedule.",
    "gradient_accumulation_steps": "Use gradients.GradientAccumulator(steps).",
    "use_ema": "Keep the average in a Variable of your own.",
    "ema_momentum": "Keep the average in a Variable of your own.",
    "amsgrad": "Derive a class from Optimizer that has the slot.",
    "jit_compile": "Leave it out.",
    "loss_scale_factor": "Divide the loss by the global batch, or write aggregation='MEAN'.",
    "rho": "It is RMSprop's; use Adam.",
    "use_locking": "Leave it out: one thread updates a variable.",
}


class NamesOurs:
    """Base of classes whose AttributeError says what to write for an attribute of TensorFlow's: `OF_CLASS`.

    Its own name, or that of one of its bases, is the key there.
    Not of `ReplicaContext`: a class with a `__getattr__` reads each of its attributes more slowly, 5 % of a small sum.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            words_of_bases = (OF_CLASS.get(kind.__name__, {}) for kind in type(self).__mro__)
            hint = next((words[name] for words in words_of_bases if name in words), None)
            if hint is None:
                return object.__getattribute__(self, name)  # raises the error again, Python's or that of a property
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. {hint}.")


def refuses(**words: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function that is given a keyword of TensorFlow's say what to write: OptionTypeError.

    Args:
        words: the keywords that it does not have, and what to do instead.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if kwargs and not words.keys().isdisjoint(kwargs):
                name = next(name for name in words if name in kwargs)
                where = function.__qualname__.removesuffix(".__init__")
                raise OptionTypeError.at(
                    where, found=f"{name}={kwargs[name]!r}", expected="a keyword that it has", fix=words[name]
                )
            return function(*args, **kwargs)

        return checked

    return decorate
