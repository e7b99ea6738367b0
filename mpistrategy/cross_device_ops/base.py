"""CrossDeviceOps: the public interface of every reduction algorithm, and the checks they all share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpistrategy.arrays import nest
from mpistrategy.arrays.values import IndexedSlices, Mirrored, PerReplica, local_component
from mpistrategy.context import current_communicator, working_on
from mpistrategy.errors import (
    ContextError,
    EmptyBatchError,
    OptionError,
    OptionTypeError,
    StructureError,
    UnsupportedError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.settings import checked_type
from mpistrategy.objects.shown import in_words
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.reduction import inputs as placing
from mpistrategy.reduction.collectives import broadcast
from mpistrategy.reduction.reducer import Algorithm


class CrossDeviceOps(Algorithm):
    """Reduces values of all replicas, and broadcasts values to them.

    Give an instance to `MirroredStrategy(cross_device_ops=...)`, or call its methods directly while a strategy's
    scope is entered.  All methods are collective.  To write an algorithm of your own, override
    `reduce_implementation` and `batch_reduce_implementation` (and `broadcast_implementation` where the default, rank
    0's value by MPI Bcast, does not do).

    """

    def _call(self, method: str, value: Any = None, name: str | None = None) -> tuple[Ranks, Call]:
        """Return the communicator of this thread's strategy, else of `value`, and the call of a method.

        Raises:
            ContextError: outside every strategy, for a value that belongs to no strategy.
        """
        where = f"{type(self).__name__}.{method}"
        communicator = current_communicator() or _group_of(value)
        if communicator is None:
            raise ContextError.at(
                where,
                found="a call outside every strategy",
                expected="a call inside `with strategy.scope():` or through a strategy",
                fix="Enter the scope first: the strategy says which ranks take part.",
            )
        return communicator, Call(communicator.guard, where, called=name)

    @collective("reduce")
    def reduce(
        self,
        reduce_op: Op,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> Any:
        """Reduce one value over the replicas.

        Args:
            reduce_op: a ReduceOp, or "SUM" / "MEAN".
            per_replica_value: this rank's value: a PerReplica, an array, a number or IndexedSlices; shape and dtype
                are equal on all ranks.
            destinations: where the result goes; see `mpistrategy.reduction.inputs.resolve`.
            options: hints; None for the defaults.
            name: is compared between the ranks instead of the call site.

        Returns:
            A Mirrored; on ranks that are no destination, reading it raises PlacementError.

        Raises:
            ReduceOpError, DestinationError, DeviceError, DTypeError, LeafError: for bad input, on every rank.
            CollectiveMismatchError: when the ranks' calls differ.
        """
        communicator, call = self._call("reduce", per_replica_value, name)
        with working_on(communicator), call:
            pairs = [(per_replica_value, destinations)]
            op, [pair], settings = _checked(communicator, call, reduce_op, pairs, options)
            return self.reduce_implementation(op, *pair, settings)

    @collective("reduce")
    def batch_reduce(
        self,
        reduce_op: Op,
        value_destination_pairs: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> list[Any]:
        """Reduce several values in one go; the same as `reduce` for each pair, with fewer messages.

        Args:
            reduce_op: a ReduceOp, or "SUM" / "MEAN".
            value_destination_pairs: a sequence or an iterator of (value, destinations) tuples.
            options: hints; None for the defaults.
            name: is compared between the ranks instead of the call site.

        Returns:
            A list of Mirrored, in the order of the pairs.

        Raises:
            EmptyBatchError: when there are no pairs.
            OptionTypeError, OptionError: when `value_destination_pairs` is not a sequence of pairs.
        """
        pairs = list(value_destination_pairs) if isinstance(value_destination_pairs, Iterable) else None
        communicator, call = self._call("batch_reduce", pairs, name)
        with working_on(communicator), call:
            if pairs is None or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
                error = OptionTypeError if pairs is None else OptionError
                found, expected = f"value_destination_pairs={value_destination_pairs!r}", "(value, destinations) tuples"
                raise error.at(call.where, found=found, expected=f"an iterable of {expected}")
            if not pairs:
                raise EmptyBatchError.at(call.where, found="no values at all", expected="at least one value to reduce")
            op, pairs, settings = _checked(communicator, call, reduce_op, pairs, options)
            results: Any = self.batch_reduce_implementation(op, pairs, settings)
            if not isinstance(results, (list, tuple)) or len(results) != len(pairs):
                raise StructureError.at(
                    f"{type(self).__name__}.batch_reduce_implementation",
                    found=f"{results!r} returned for {len(pairs)} values",
                    expected="a list with one result for each value",
                )
            return list(results)

    def _all_reduce_values(
        self,
        call: Call,
        communicator: Ranks,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
        *,
        is_batch: bool = True,
    ) -> list[Any]:
        """Reduce to every rank, for the library's own calls; see `mpistrategy.reduction.reducer.Algorithm`."""
        kinds = (Mirrored, IndexedSlices)
        containers = [value if isinstance(value, kinds) else PerReplica((value,)) for value in values]
        if len(containers) == 1 and not is_batch:
            return [local_component(self.reduce(op, containers[0], containers[0], options))]
        return [local_component(r) for r in self.batch_reduce(op, [(value, value) for value in containers], options)]

    @collective("broadcast")
    def broadcast(self, tensor: Any, destinations: Any, *, name: str | None = None) -> Any:
        """Send rank 0's value to the destinations.

        Args:
            tensor: an array or a number, of equal shape and dtype on all ranks.
            destinations: where the result goes, as in `reduce`.
            name: is compared between the ranks instead of the call site.

        Returns:
            A Mirrored.
        """
        communicator, call = self._call("broadcast", name=name)
        with call:
            destinations = placing.for_value(tensor, destinations)
            placing.resolve(destinations, communicator, call.where)
            return self.broadcast_implementation(tensor, destinations)

    def __repr__(self) -> str:
        return in_words(self)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Override: reduce one value, by default as a batch of one.  The arguments have been checked.

        Args:
            reduce_op: the operation.
            per_replica_value: a PerReplica with this rank's value, a Mirrored, or IndexedSlices.
            destinations: where the result goes, as in `reduce`.
            options: the strategy's options, merged with the call's.

        Returns:
            A Mirrored of the result, with a component on the ranks of the destinations.
        """
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Override: reduce several values.  The arguments have been checked.

        Args:
            reduce_op: the operation.
            value_destination_pairs: tuples of a value and its destinations, as in `reduce_implementation`.
            options: the strategy's options, merged with the call's.

        Returns:
            What `reduce_implementation` returns for each pair, in their order.
        """
        where = f"{type(self).__name__}.batch_reduce"
        raise UnsupportedError.at(where, found="no batch_reduce_implementation", expected="one in your subclass")

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Override: send rank 0's value to the destinations.

        Args:
            tensor: this rank's value, which matters on rank 0 alone.
            destinations: where it goes, as in `reduce`.
        """
        communicator, call = self._call("broadcast")
        with call:
            destination = placing.resolve(destinations, communicator, call.where)
            (result,) = broadcast(communicator, [tensor], 0, call, destination.text)
            return destination.mirrored(result)


def _group_of(value: Any) -> Ranks | None:
    """Return the ranks to which a value, or a value in a nest, belongs."""
    groups = [leaf._group for leaf in nest.flatten(value)[0] if isinstance(leaf, PerReplica)]
    return next(filter(None, groups), None)


def _checked(
    ranks: Ranks, call: Call, reduce_op: Any, pairs: Sequence[tuple[Any, Any]], options: Any
) -> tuple[ReduceOp, list[tuple[Any, Any]], CommunicationOptions]:
    """Return the operation, values with destinations that name ranks, and the options."""
    op = ReduceOp._parse(reduce_op, call.where)
    resolved_pairs = [(value, placing.for_value(value, destinations)) for value, destinations in pairs]
    for _, destinations in resolved_pairs:
        placing.resolve(destinations, ranks, call.where)
    given, expected = CommunicationOptions() if options is None else options, "a CommunicationOptions or None"
    settings = checked_type(call.where, "options", given, CommunicationOptions, expected)
    call.wait_as(settings.timeout_seconds)
    return op, resolved_pairs, settings
