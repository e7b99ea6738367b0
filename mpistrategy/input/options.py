"""The options of distributed input, and the argument of functions that make input."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrategy.errors import OptionError
from mpistrategy.objects.settings import checked_count
from mpistrategy.options import InputReplicationMode, ReplicationMode


@dataclass(frozen=True)
class InputOptions:
    """TensorFlow's options of distributed input; accepted without effect, since arrays are in memory already.

    Attributes:
        experimental_fetch_to_device: accepted.
        experimental_replication_mode: an InputReplicationMode or its name.
        experimental_place_dataset_on_device: accepted.
        experimental_per_replica_buffer_size: accepted.

    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: ReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1


@dataclass(frozen=True)
class InputContext:
    """The argument of a function that makes one rank's input.

    Attributes:
        num_input_pipelines: the number of ranks: all make input.
        input_pipeline_id: this rank.
        num_replicas_in_sync: the number of replicas that share a global batch.

    Raises:
        OptionTypeError, OptionError: for values that are no integers, or out of range.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name in ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync"):
            object.__setattr__(self, name, checked_count("InputContext", name, getattr(self, name), least=None))
        if not (0 <= self.input_pipeline_id < self.num_input_pipelines and self.num_replicas_in_sync >= 1):
            raise OptionError.at(
                "InputContext",
                found=f"pipeline {self.input_pipeline_id} of {self.num_input_pipelines}, "
                f"{self.num_replicas_in_sync} replicas",
                expected="0 <= input_pipeline_id < num_input_pipelines, and at least one replica",
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of a global batch for one replica.

        Args:
            global_batch_size: the rows of all replicas together.

        Raises:
            OptionError: when the global batch cannot be divided evenly among the replicas.

        >>> InputContext(4, 1, num_replicas_in_sync=4).get_per_replica_batch_size(32)
        8
        """
        where = "InputContext.get_per_replica_batch_size"
        size = checked_count(where, "global_batch_size", global_batch_size, least=None)
        if size < 1 or size % self.num_replicas_in_sync:
            raise OptionError.at(
                where,
                found=f"global_batch_size={size}",
                expected=f"a positive multiple of the number of replicas, {self.num_replicas_in_sync}",
            )
        return size // self.num_replicas_in_sync
