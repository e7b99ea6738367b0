"""The methods of Strategy that other files do, each loaded when it is first used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from mpistrategy.arrays.dtypes import Array
from mpistrategy.options import CommunicationOptions, Op
from mpistrategy.reduction.arena import Arena
from mpistrategy.reduction.explain import explanation
from mpistrategy.variables.mirrored_check import check_mirrored

if TYPE_CHECKING:
    from mpistrategy.strategy.overloads import T
    from mpistrategy.variables.variable import Variable


class Services:
    """The part of Strategy that makes arenas, explains routes and compares variables."""

    if TYPE_CHECKING:

        @property
        def extended(self) -> Any: ...

    @overload
    def arena(
        self, like: Sequence[Variable], *, shared_result: bool = False, name: str | None = None
    ) -> Arena[Sequence[Array]]: ...
    @overload
    def arena(self, like: T, *, shared_result: bool = False, name: str | None = None) -> Arena[T]: ...
    def arena(self, like: Any, *, shared_result: bool = False, name: str | None = None) -> Arena[Any]:
        """Lay out a nest of arrays so that reducing it copies nothing.  Collective.

        Args:
            like: arrays, numbers or variables in any nest; only structure, shapes and dtypes count.
            shared_result: give all ranks of a node one read-only result, and leave `values` as they are.
            name: is compared between the ranks instead of the call site.

        Returns:
            An `Arena`: fill its `values` in place, then ``context.all_reduce(op, arena)``.

        Raises:
            EmptyBatchError, DTypeError, LeafError, CollectiveMismatchError: on every rank.

        >>> import numpy as np, mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> arena = strategy.arena({"w": np.ones((2, 2)), "b": np.ones(2)})
        >>> arena.values["b"][...] = 1
        >>> strategy.reduce("SUM", arena)["b"]
        array([1., 1.])
        """
        return Arena(self, like, shared_result=shared_result, name=name)

    def explain(self, value: Any, reduce_op: Op = "SUM", options: CommunicationOptions | None = None) -> str:
        """Say which route an all_reduce of `value` would take: in any context, on any number of ranks; nothing is sent.

        Args:
            value: what would be reduced: a nest of arrays, numbers, variables and None, or an `Arena`.
            reduce_op: a ReduceOp, or its name.
            options: hints; None for the strategy's own.

        Returns:
            The text, which replica 0 also prints: the buffers that are made of the value, the way that each takes,
            what is copied, and where the thresholds come from.

        Raises:
            ReduceOpError, DTypeError, LeafError, EmptyBatchError, ContextError: as all_reduce, but on this rank alone.

        >>> import numpy as np, mpistrategy as ms
        >>> text = ms.OneDeviceStrategy("CPU:0").explain([np.ones(3), 2.0])
        all_reduce SUM of 2 arrays, 32 B, on 1 rank of 1 node by MpiAllReduce
          1 pack of 2 arrays, float64, 32 B: stays here, the only replica
            1 copy: all into the pack
          thresholds: the defaults
        """
        text = explanation(self.extended._reducer, value, reduce_op, options)
        if self.extended._reducer.communicator.rank == 0:
            print(text)
        return text

    def layout(self) -> dict[str, Any]:
        """Return what the bits of sums depend on besides the values: ranks, nodes, algorithm, options, thresholds.

        With it goes how `Optimizer.gradient_buckets` has cut gradients so far: the numbers of the variables in each
        bucket, in the order of reduction.
        Two runs of one version with the same layout give the same bits.  It is the same on all ranks and consists of
        what JSON can hold, to be kept beside results; `source` is for people alone.  Never communicates.
        """
        extended = self.extended
        communicator, algorithm = extended._reducer.communicator, extended._reducer.algorithm
        return {
            "ranks": communicator.size,
            "node_of": list(communicator.node_of),
            "mpi": communicator.library,
            "shared_memory": communicator.shares_memory,
            "algorithm": algorithm._configuration,
            "bytes_per_pack": int(extended._reducer.options.bytes_per_pack),
            "wire": extended._reducer.options.wire,
            "thresholds": communicator.thresholds.sizes(),
            "gradient_buckets": [[list(members) for members in order] for order in extended._bucket_orders],
            "source": communicator.thresholds.source,
        }

    def assert_mirrored(self, variables: Any = None, *, name: str | None = None) -> None:
        """Make sure that mirrored variables have the same bits on all ranks.  Collective; in any context.

        Each rank reads its copies and sends 16 bytes; where the copies differ, 16 more for each variable.  Most of the
        time is hashing: 0.6 to 0.9 GB/s was measured on one core.

        Args:
            variables: a nest of variables, and of objects with an attribute `variables`, such as optimizers.  None
                checks all variables of this strategy that are still in use on every rank, with slots and step
                counters of optimizers.  The copies of ON_READ variables may differ: they are skipped, and refused
                where the nest names them.
            name: is compared between the ranks instead of the call site.

        Raises:
            ReplicasDivergedError: on every rank, with a table of the variables that differ, and the ranks that differ
                from the majority.  -0.0 differs from 0.0, and NaN from NaN with other bits.
            OptionError, OptionTypeError, EmptyBatchError: on every rank, when `variables` has anything but mirrored
                variables of this strategy, or none.
            CollectiveMismatchError: on every rank, when the ranks name different variables.

        >>> import mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> with strategy.scope():
        ...     weights = ms.Variable([1.0, 2.0])
        >>> strategy.assert_mirrored([weights])
        """
        check_mirrored(self.extended, variables, name)
