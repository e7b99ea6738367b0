"""Gradients in buckets, which are reduced one by one.

On several nodes a bucket is reduced while the gradients of later buckets are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import ContextError, OptionError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Fixed, checked_count
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.asynchronous import AllReduceHandle
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import get_replica_context
from mpistrategy.training.checks import required_context
from mpistrategy.training.sliced import GradientArena
from mpistrategy.variables.variable import Variable

#: Large enough for the line rate of a network, small enough that the first one is soon full.
DEFAULT_BYTES_PER_BUCKET = 4 * 2**20
#: The numbers of a bucket's variables, the last first; and their gradients, with the padding between them, flat.
Bucket: TypeAlias = tuple[tuple[int, ...], Array]


class GradientBuckets:
    """The gradients of some variables, to be reduced bucket by bucket while later gradients are still computed.

    `Optimizer.gradient_buckets` makes one.  In the step function write each gradient into `values` and call `ready`, in
    the order of backward propagation; then apply them all:

        np.matmul(hidden.T, error, out=buckets.values[2])
        buckets.ready(2)
        ...
        optimizer.apply_gradients(buckets)

    On several nodes, and in GPU memory, a bucket's all-reduce starts as soon as all of its gradients are ready and the
    buckets before it have started.  It runs while the step computes.  On the host of a single node nothing starts
    before `apply_gradients`: its ranks have no free core for the all-reduce, and the sliced update is faster.

    Buckets hold the variables from the last to the first, in the order of backward propagation.  They are cut once, the
    same on all ranks, so that equal runs give equal bits.  `Strategy.layout` and checkpoints record them.

    Args:
        gradients: the memory of the gradients.
        op: how they are combined.
        bytes_per_bucket: a bucket is complete when it has so many bytes of gradients.

    Attributes:
        values: the arrays to write the gradients into, like the variables.  From `ready` on they are the buckets'
            own: after the step they hold this rank's gradients, or the reduced ones.
        variables: the variables.
        op: SUM or MEAN.
        starts_early: whether buckets are reduced before `apply_gradients`.
    """

    values: Fixed[Sequence[Array]] = Fixed()

    def __init__(self, gradients: GradientArena, op: ReduceOp, bytes_per_bucket: int) -> None:
        self._arena = gradients.arena
        self.values = gradients.arena.values
        self.variables: tuple[Variable, ...] = gradients.variables
        self.op: ReduceOp = op
        #: The parts, in the order in which they are reduced.
        self._buckets: list[Bucket] = _cut(gradients, bytes_per_bucket)
        self._index = gradients.numbers
        extended = self._arena.strategy.extended
        extended._bucket_orders[tuple(members for members, _ in self._buckets)] = None
        communicator = extended._reducer.communicator
        self.starts_early: bool = communicator.nodes > 1 or (is_on_device(self.values[0]) and communicator.size > 1)
        self._handles: list[AllReduceHandle[Any]] = []
        self.reset()

    def __iter__(self) -> Iterator[tuple[Array, Variable]]:
        """Yield the pairs that `Optimizer.apply_gradients` takes, before `ready`."""
        if self._ready:
            raise OptionError.at(
                "GradientBuckets",
                found="a loop over gradients that are ready, and may be reduced already",
                expected="apply_gradients(buckets)",
            )
        return zip(self.values, self.variables, strict=True)

    def ready(self, which: Variable | int) -> None:
        """Say that a gradient has been written and stays as it is until `apply_gradients`.  In a step function.

        Gradients that are not said to be ready are reduced by `apply_gradients`.  The order may differ between ranks.

        Args:
            which: the variable, or its number.

        Raises:
            OptionError: for a variable of no bucket, and for a variable that is ready already in this step.
            ContextError: outside a step function of the variables' strategy; in a function that JAX traces.
        """
        where = "GradientBuckets.ready"
        refuse_in_jax_trace(where)
        is_variable = isinstance(which, Variable)
        number = self._index.get(id(which), -1) if is_variable else checked_count(where, "which", which, least=None)
        if not 0 <= number < len(self.variables):
            raise OptionError.at(
                where, found=f"{which!r}", expected=f"one of the {len(self.variables)} variables of these buckets"
            )
        context: ReplicaContext | None = get_replica_context()
        if context is None or context.strategy is not self._arena.strategy:
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
        if self.starts_early:
            # In the order of the buckets: it is the same on all ranks.
            for members, _ in self._buckets[len(self._handles) :]:
                if not self._ready.issuperset(members):
                    break
                self._start_next(context)

    def _reduced_early(self, op: ReduceOp, call: Call) -> list[Array] | None:
        """Reduce all buckets in place and return `values`, where buckets start early; None elsewhere.  Inside `call`.

        It starts the buckets that have not started, and waits for all.  After it the next step begins.

        Raises:
            OptionError: when `op` is not the operation of these buckets.
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
        self._arena._check(self._arena.strategy.extended._reducer, call.where)
        call.agree("reduce gradient buckets", op=op.value)
        context = required_context(call.where)
        while len(self._handles) < len(self._buckets):
            self._start_next(context)
        self.reset()
        call.expect_more()
        return list(self.values)

    def reset(self) -> None:
        """Wait for the buckets that have started, and forget them; after a step that failed.  Collective."""
        handles, self._handles = self._handles, []
        self._ready: set[int] = set()
        for handle in handles:
            handle.wait()

    def _start_next(self, context: ReplicaContext) -> None:
        number = len(self._handles)
        _, memory = self._buckets[number]
        name = f"gradient bucket {number} of {len(self._buckets)}"
        self._handles.append(context.all_reduce_async(self.op, memory, name=name, out=memory))


def _cut(gradients: GradientArena, bytes_per_bucket: int) -> list[Bucket]:
    """Return the buckets: neighbours in memory of one dtype, from the last variable to the first."""
    places = gradients.arena._places
    buckets: list[Bucket] = []
    for at, flat in enumerate(gradients.arena._buckets):
        members: list[int] = []
        of_dtype = [number for number, (bucket, _) in enumerate(places) if bucket == at]
        for number in reversed(of_dtype):
            members.append(number)
            memory = flat.own_array[places[number][1].start : places[members[0]][1].stop]
            if memory.nbytes >= bytes_per_bucket or number == of_dtype[0]:
                buckets.append((tuple(members), memory))
                members = []
    # In the order of backward propagation.
    return sorted(buckets, key=lambda bucket: -bucket[0][-1])
