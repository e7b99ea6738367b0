"""Memory for gradients: arenas, so that a step need not copy them, and buckets, which are reduced one by one.

The reduction of a bucket begins while the gradients of the others are still being computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.errors import ContextError, OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.asynchronous import AllReduceHandle
from mpistrategy.strategy.current import get_replica_context, get_strategy
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.training.checks import check_variable, checked_count, required_context
from mpistrategy.training.plans import StepPlans
from mpistrategy.training.sliced_step import GradientArena
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy.reduction.arena.arena import Arena

#: Large enough for the line rate of a network, small enough that the first one is soon full.
DEFAULT_BYTES_PER_BUCKET = 4 * 2**20


@dataclass(frozen=True)
class Bucket:
    """One part of the gradients, reduced in one piece.

    Attributes:
        members: the numbers of its variables, the last first.
        memory: their gradients, with the gaps between them; flat.
    """

    members: tuple[int, ...]
    memory: Array


class GradientBuckets:
    """The gradients of some variables, to be reduced bucket by bucket while later ones are still computed.

    `Optimizer.gradient_buckets` makes one.  In the step function write each gradient into `values` and say so, in the
    order in which backward propagation finds them; then apply them all:

        np.matmul(hidden.T, error, out=buckets.values[2])
        buckets.ready(2)
        ...
        optimizer.apply_gradients(buckets)

    On several nodes a bucket's all-reduce starts as soon as all of its gradients are ready and the buckets before it
    have started, and travels while the step computes.  On a single node nothing starts before `apply_gradients`: its
    ranks have no core to spare for progress, and each can update its share of the variables instead.

    Buckets hold the variables from the last to the first, since their gradients are found in that order.  They are
    cut once, the same on all ranks, so that equal runs give equal bits; `Strategy.layout` and checkpoints tell how.

    Args:
        gradients: where the gradients are.
        op: how they are combined.
        bytes_per_bucket: how many bytes of gradients make a bucket; a larger gradient is a bucket by itself.

    Attributes:
        values: the arrays to write the gradients into, like the variables.
        variables: the variables.
        op: SUM or MEAN.
        buckets: the parts, in the order in which they are reduced.
        starts_early: whether buckets are reduced before `apply_gradients`.
    """

    def __init__(self, gradients: GradientArena, op: ReduceOp, bytes_per_bucket: int) -> None:
        self._gradients = gradients
        self.values: Sequence[Array] = gradients.arena.values
        self.variables = gradients.variables
        self.op = op
        self.buckets = _cut(gradients, bytes_per_bucket)
        self._bucket_of = {number: at for at, bucket in enumerate(self.buckets) for number in bucket.members}
        self._index = {id(var): number for number, var in enumerate(self.variables)}
        extended = gradients.arena.strategy.extended
        extended.bucket_orders[tuple(bucket.members for bucket in self.buckets)] = None
        self.starts_early = max(extended.reducer.communicator.node_of) > 0
        self._handles: list[AllReduceHandle] = []
        self._clear()

    def __len__(self) -> int:
        return len(self.variables)

    def __iter__(self) -> Iterator[tuple[Array, Variable]]:
        """Yield the pairs that `Optimizer.apply_gradients` takes."""
        return zip(self.values, self.variables, strict=True)

    def ready(self, which: Variable | int) -> None:
        """Say that a gradient is in its place and will not be changed before `apply_gradients`.  In a step function.

        Every rank says so for all gradients or leaves it to `apply_gradients`; the order may differ between ranks.

        Args:
            which: the variable, or its number.

        Raises:
            OptionError: for a variable that is none of these, and for one that has been ready before in this step.
            ContextError: outside a step function of the variables' strategy.
        """
        where = "GradientBuckets.ready"
        number = self._number(which, where)
        context: ReplicaContext | None = get_replica_context()
        if context is None or context.strategy is not self._gradients.arena.strategy:
            raise ContextError.at(
                where, found="a call elsewhere", expected="a call in a step function of the variables' strategy"
            )
        if number in self._ready:
            raise OptionError.at(
                where,
                found=f"{self.variables[number].name!r}, which is ready already",
                expected="each variable once in a step",
                fix="Call apply_gradients(buckets) at the end of each step; after a step that failed, reset().",
            )
        self._ready.add(number)
        self._missing[self._bucket_of[number]] -= 1
        if self.starts_early:
            # In the order of the buckets, whatever is ready first: the same on all ranks.
            while len(self._handles) < len(self.buckets) and self._missing[len(self._handles)] == 0:
                self._start_next(context)

    def reduced(self) -> list[Array]:
        """Return the combined gradients, which lie in `values`, on several nodes.  Collective; in a step function.

        Buckets that have not started do now; all that have are waited for.  The next step begins from here.
        """
        context = required_context("GradientBuckets.reduced")
        while len(self._handles) < len(self.buckets):
            self._start_next(context)
        self.reset()
        return list(self.values)

    def reduced_early(self, op: ReduceOp, call: Call) -> list[Array] | None:
        """Return what `reduced` does, where buckets start early; None elsewhere.  Collective; inside `call`.

        Raises:
            OptionError: when `op` is not that of these buckets.
        """
        if not self.starts_early:
            self.reset()
            return None
        if self.op is not op:
            raise OptionError.at(
                call.where,
                found=f"gradient buckets that make the {self.op.name}",
                expected=f"the optimizer's aggregation, {op.name}",
                fix="Make the buckets with this optimizer's gradient_buckets().",
            )
        call.agree("reduce gradient buckets", op=op.value)
        totals = self.reduced()
        call.expect_more()
        return totals

    def reset(self) -> None:
        """Wait for what has started and forget it: after a step that failed.  Collective."""
        handles, self._handles = self._handles, []
        self._clear()
        for handle in handles:
            handle.wait()

    def _start_next(self, context: ReplicaContext) -> None:
        number = len(self._handles)
        memory = self.buckets[number].memory
        name = f"gradient bucket {number} of {len(self.buckets)}"
        self._handles.append(context.all_reduce_async(self.op, memory, name=name, out=memory))

    def _clear(self) -> None:
        self._ready: set[int] = set()
        self._missing = [len(bucket.members) for bucket in self.buckets]

    def _number(self, which: Any, where: str) -> int:
        if isinstance(which, Variable):
            number = self._index.get(id(which), -1)
        elif isinstance(which, (int, np.integer)) and not isinstance(which, bool):
            number = int(which)
        else:
            raise OptionTypeError.at(where, found=f"{which!r}", expected="a variable or its number")
        if not 0 <= number < len(self.variables):
            raise OptionError.at(
                where, found=f"{which!r}", expected=f"one of the {len(self.variables)} variables of these buckets"
            )
        return number

    def __repr__(self) -> str:
        sizes = ", ".join(f"{dtype_name(b.memory.dtype)} {b.memory.nbytes / 2**20:.2f} MiB" for b in self.buckets)
        return f"<GradientBuckets of {len(self.variables)} variables: {sizes}>"


def _cut(gradients: GradientArena, bytes_per_bucket: int) -> list[Bucket]:
    """Return the buckets: for each dtype what lies side by side, from the last variable to the first."""
    places = gradients.arena.places
    open_members: dict[int, list[int]] = {}
    made: list[Bucket] = []

    def close(memory_number: int) -> None:
        members = open_members.pop(memory_number)
        start, stop = places[members[-1]].start, places[members[0]].stop
        made.append(Bucket(tuple(members), gradients.arena.buckets[memory_number].mine[start:stop]))

    for number in range(len(places) - 1, -1, -1):
        place = places[number]
        members = open_members.setdefault(place.bucket, [])
        members.append(number)
        nbytes = (places[members[0]].stop - place.start) * gradients.variables[number].dtype.itemsize
        if nbytes >= bytes_per_bucket:
            close(place.bucket)
    for memory_number in list(open_members):
        close(memory_number)
    # In the order in which backward propagation completes them.
    return sorted(made, key=lambda bucket: -bucket.members[-1])


class GradientArenas:
    """The part of Optimizer that makes memory for gradients."""

    aggregation: ReduceOp
    _plans: StepPlans

    def gradient_arena(self, variables: Iterable[Variable]) -> Arena:
        """Return an arena for the gradients of `variables`: gradients written there need no copy.  Collective.

        Write them in place (``np.matmul(x.T, d, out=arena.values[0])``) and give `apply_gradients` pairs of
        ``arena.values[i]`` and the i-th variable.  They stay as they are: the reduction goes elsewhere.

        Args:
            variables: variables of one strategy.  For the same ones in the same order it is always the same arena.

        Returns:
            An Arena whose `values` are a list like the variables.

        Raises:
            EmptyBatchError: without variables.
            OptionError: for what is no variable, and for variables of several strategies.
        """
        return self._gradients_of(variables, "gradient_arena").arena

    def gradient_buckets(
        self, variables: Iterable[Variable], bytes_per_bucket: int = DEFAULT_BYTES_PER_BUCKET
    ) -> GradientBuckets:
        """Return the gradient arena of `variables` in buckets, whose reduction overlaps with computation.  Collective.

        Args:
            variables: as in `gradient_arena`; in the order of the model's layers.
            bytes_per_bucket: how many bytes of gradients are reduced in one piece.

        Returns:
            GradientBuckets, to be given to `apply_gradients` in place of pairs.

        Raises:
            OptionError, OptionTypeError: for a number of bytes that is no int from 1 on; else as `gradient_arena`.
        """
        checked_count(f"{type(self).__name__}.gradient_buckets", "bytes_per_bucket", bytes_per_bucket)
        return GradientBuckets(
            self._gradients_of(variables, "gradient_buckets", f"{bytes_per_bucket=}"),
            self.aggregation,
            bytes_per_bucket,
        )

    def _gradients_of(self, variables: Iterable[Variable], method: str, options: str = "") -> GradientArena:
        where = f"{type(self).__name__}.{method}"
        listed: tuple[Any, ...] = tuple(variables)
        strategy = next((var.strategy for var in listed if isinstance(var, Variable)), None) or get_strategy()
        with Call(strategy.extended.communicator.guard, where) as call:
            for var in listed:
                check_variable(var, strategy, where)
            call.structure = ", ".join(var.key for var in listed)
            call.agree("place gradients", op=self.aggregation.value, options=options)
            return self._plans.sliced.arena(strategy, listed)
