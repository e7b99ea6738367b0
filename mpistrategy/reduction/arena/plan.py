"""The collectives of an arena: reductions and broadcasts where the arrays are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array, quiet_runner
from mpistrategy.errors import OptionError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.signature import Signature
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction.arena.layout import check_dtypes
from mpistrategy.reduction.arena.unchanged import UnchangedNest
from mpistrategy.reduction.layout.destinations import EVERY_RANK, resolve
from mpistrategy.reduction.reducer import Reducer
from mpistrategy.reduction.routes.in_place import Replicas, broadcast_replicas, combine, is_in_place, reduce_replicas
from mpistrategy.reduction.routes.mailboxes import MISFIT

if TYPE_CHECKING:
    from mpistrategy.reduction.arena.gpu import BucketReduction


class ArenaReductions(ABC):
    """What `Arena` does together with the other ranks; its attributes are described there."""

    communicator: Communicator
    buckets: tuple[Replicas, ...]
    leaves: list[Array]
    in_place: bool
    on_device: bool
    result: Any
    _structure: nest.Structure
    _nest: UnchangedNest
    _values: Any
    _number: int
    #: For each bucket: the arrays, where the result goes, and this rank's share.
    shares: list[Any]
    _summary: tuple[Any, ...]

    @abstractmethod
    def check(self, reducer: Reducer, where: str) -> None:
        """Raise unless a strategy can reduce the arena as it is."""

    def all_reduce(
        self,
        reducer: Reducer,
        reduce_op: Any,
        call: Call,
        *,
        options: CommunicationOptions | None = None,
        weight: Any = None,
        out: Any = None,
        destination: str = "",
    ) -> Any:
        """Reduce over all replicas, to all of them; the caller has entered the guard's call.

        Args:
            reducer: that of the strategy in use.
            reduce_op: a ReduceOp, or its name.
            call: the guard's call.
            options: hints.
            weight: for MEAN, the weight of this rank's values.
            out: None, the arena or its `values`, which asks for the result in place.
            destination: what the ranks must agree on besides; in words.

        Returns:
            `values`, which hold the result, or with shared_result read-only views of the node's one result.

        Raises:
            ContextError, OptionTypeError, StructureError: for an arena that is closed, of other ranks, or whose nest
                has been given other arrays.
            DTypeError: for a MEAN of integers, which has another dtype than they, and MIN and MAX of complex numbers.
        """
        op = ReduceOp.parse(reduce_op, call.where)
        self.check(reducer, call.where)
        in_place = self.in_place or out is not None
        if not (out is None or out is self or out is self._values or self._nest.is_like(out)):
            raise OptionError.at(
                call.where, found="another out= with an arena", expected="out=None, or out=arena.values"
            )
        call.structure = self._structure.text
        ordinary = weight is not None or self.is_ordinary(reducer)
        if in_place or not ordinary:
            check_dtypes(self.buckets, op, call.where)
        if ordinary:
            results = reducer.all_reduce_leaves(
                call,
                op,
                self.leaves,
                lambda: nest.leaf_paths(self._values),
                options=options,
                weight=weight,
                targets=self.leaves if in_place else None,
            )
            return self._values if in_place else self._structure.pack(results)
        chosen = reducer.options.merge(options)
        call.wait_as(chosen.timeout_seconds)
        sent = chosen.wire
        reduced_precision.check(sent)
        path = self.path(reducer, chosen)
        on_device = self._device_reduction(path, into_result=not in_place) if self.on_device else None
        call.agree_on(
            self.signature(
                op,
                call.where,
                call.place,
                in_place=in_place,
                destination=destination,
                sent=sent,
                path=path,
                name=call.name,
            ),
            sparingly=True,
        )
        communicator = reduced_precision.on(self.communicator, sent)
        if on_device is not None:
            on_device.run(communicator, op, call)
            return self._values if in_place else self.result
        divisor = communicator.size if op is ReduceOp.MEAN else 1
        for bucket in self.buckets:
            reduce_replicas(communicator, bucket, op.on_the_wire, divisor, into_result=not in_place)
        communicator.node_barrier()
        return self._values if in_place else self.result

    def make_plan(
        self, op: ReduceOp, communicator: Communicator, where: tuple[str, str]
    ) -> Callable[[Any, Any], Any] | None:
        """Return a ``run(arena, out)`` that makes the messages of `all_reduce`; None where not all is in place.

        What is left for each call: are the arrays still the arena's, do all ranks call the same, and the sums.

        Args:
            op: how.
            communicator: the ranks.
            where: the public name of the call, and its place in the program.

        Raises:
            DTypeError: for a dtype that `op` cannot reduce.
        """
        served = [is_in_place(communicator, bucket) for bucket in self.buckets]
        if self.communicator is not communicator or not served or not all(served):
            return None
        check_dtypes(self.buckets, op, where[0])
        guard, quiet, text = communicator.guard, quiet_runner(), op.on_the_wire
        in_place, barrier = self.in_place, communicator.node_barrier
        signature = self.signature(op, *where, in_place=in_place)
        digest = guard.digest(signature)
        divisor = communicator.size if op is ReduceOp.MEAN else 1
        self.shares = [(b.arrays, b.arrays if in_place else (b.result,), b.my_share) for b in self.buckets]

        # The flight record holds this function, which must not hold the arena's memory after its close().
        def run(arena: Any, out: Any) -> Any:
            if not arena.is_unchanged() or (out is not None and not (out is arena and in_place)):
                return MISFIT
            guard.compare_digest(digest, signature)
            try:
                for arrays, targets, share in arena.shares:
                    quiet(combine, arrays, targets, text, divisor, share)
                barrier()
            except BaseException as error:
                guard.fail_after_agreement(where[0], error)
                raise
            return arena.result

        run.__dict__["signature"] = signature
        return run

    def path(self, reducer: Reducer, options: CommunicationOptions) -> str:
        """Return which path is asked for, where the arena is in GPU memory; "" elsewhere."""
        return path_word(options, getattr(reducer.algorithm, "device_path", None) or "") if self.on_device else ""

    def _device_reduction(self, path: str, *, into_result: bool) -> BucketReduction:
        from mpistrategy.reduction.arena.gpu import BucketReduction  # here, for the quick import

        return BucketReduction(self.communicator, self.buckets, path, into_result=into_result)

    def signature(
        self,
        op: ReduceOp,
        where: str,
        place: str,
        *,
        in_place: bool,
        destination: str = "",
        sent: str | None = None,
        path: str = "",
        name: str = "",
    ) -> Signature:
        """Return what the ranks compare before they reduce the arena."""
        options = f"arena {self._number}, {in_place=}, wire={sent}{path and f', path={path}'}"
        text = self._structure.text
        return Signature("reduce an arena", op.value, text, self._summary, destination, options, name, where, place)

    def reduce_to(
        self,
        reducer: Reducer,
        reduce_op: Any,
        destinations: Any,
        call: Call,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Do `all_reduce`, wherever the result is wanted: what is on every rank is there, too."""
        destination = self._destination(destinations, call.where)
        return self.all_reduce(reducer, reduce_op, call, options=options, destination=destination)

    def broadcast(self, reducer: Reducer, destinations: Any, call: Call) -> Any:
        """Write replica 0's arrays into everybody's, and return `values`; the caller has entered the guard's call."""
        destination = self._destination(destinations, call.where)
        self.check(reducer, call.where)
        call.structure = self._structure.text
        call.agree("broadcast an arena", values=self._summary, destination=destination, options=f"arena {self._number}")
        if self.on_device:
            from mpistrategy.reduction.arena.gpu import broadcast_buckets

            broadcast_buckets(self.communicator, self.buckets)
            return self._values
        for bucket in self.buckets:
            broadcast_replicas(self.communicator, bucket)
        self.communicator.node_barrier()
        return self._values

    def is_ordinary(self, reducer: Reducer) -> bool:
        """Return whether the strategy's algorithm gets the arrays like any others."""
        return not reducer.algorithm.in_rank_order

    def _destination(self, destinations: Any, where: str) -> str:
        if destinations is self or destinations is self._values:
            return EVERY_RANK.text
        return resolve(destinations, self.communicator, where).text
