"""The all-reduce of a list of arrays to every rank, laid out once for their dtypes and shapes and run many times.

Small lists travel in the mailboxes, with the check of the call.  Of other lists, small arrays are packed by and
large ones go as they are: no array is copied that need not be, and results are in memory that is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype, is_buffer
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.signature import Signature
from mpistrategy.mpi.interface.buffers import LEAST_POOLED
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.tuning.thresholds import Route
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.destinations import EVERY_RANK_TEXT
from mpistrategy.reduction.layout.finish import finish, rounded
from mpistrategy.reduction.layout.leaves import Leaves, direct_targets
from mpistrategy.reduction.layout.packing import DEFAULT_BYTES_PER_PACK, Layout, Pack, plan_layouts
from mpistrategy.reduction.routes.in_place import combine
from mpistrategy.reduction.routes.mailboxes import MISFIT, Agreed, MailboxReduction, fits
from mpistrategy.reduction.routes.result_buffers import Combination, ResultBufferReduction

#: Numbers whose results are NumPy scalars, by the dtype in which they travel.
NUMBERS: dict[type, np.dtype[Any]] = {
    float: np.dtype(np.float64),
    int: np.dtype(np.int64),
    **{kind: np.dtype(kind) for kind in (np.float64, np.float32, np.int64, np.int32)},
}

Run = Callable[[Any, Any], Any]

_REMEMBERED = 512
_FEW_ELEMENTS = 64


def dense_reduction(
    communicator: Communicator,
    layouts: tuple[Layout, ...],
    op: ReduceOp,
    bytes_per_pack: float = 0,
    kind: type[DenseReduction] | None = None,
) -> DenseReduction:
    """Return the reduction of arrays of these layouts, of a `kind`; the same object the next time."""
    key = (layouts, op, bytes_per_pack, kind)
    known: DenseReduction | None = communicator.compiled.get(key)
    if known is None:
        if len(communicator.compiled) >= _REMEMBERED:
            communicator.compiled.clear()
        known = communicator.compiled[key] = (kind or DenseReduction)(communicator, layouts, op, bytes_per_pack)
    return known


class DenseReduction:
    """See `dense_reduction`.

    Attributes:
        program: how a small list travels in the mailboxes; None for others.
        packs: the buffers of the others: several small arrays, or one large one.
    """

    #: Whether small lists travel in the mailboxes, where they are combined in rank order.
    uses_mailboxes = True
    #: How the ranks' blocks are combined.
    combination: Combination = staticmethod(combine)

    def __init__(
        self, communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float = 0
    ) -> None:
        self._communicator = communicator
        self._op = op
        self._text = op.on_the_wire
        self._dtypes = [dtype for dtype, _ in layouts]
        #: Whether results need no conversion: they travel in their own dtype, and no integers are divided.
        self._exact = all(
            dtype == host_wire_dtype(dtype) and not (op is ReduceOp.MEAN and dtype.kind in "iu")
            for dtype in self._dtypes
        )
        self.program: MailboxReduction | None = None
        self.packs: tuple[Pack, ...] = ()
        mailboxes = communicator.mailboxes
        if self.uses_mailboxes and mailboxes is not None and fits(mailboxes, layouts):
            self.program = MailboxReduction(mailboxes, layouts, op.on_the_wire)
        else:
            self.packs = _hybrid(layouts, communicator.thresholds.pack_bytes, bytes_per_pack)
        self._nbytes = sum(pack.nbytes for pack in self.packs)
        #: The route through result buffers, once there are some; None for packs that take other routes.
        self._result_buffers: ResultBufferReduction | None = None
        if communicator.result_buffers is not None and set(self._routes()) == {"pipelined"}:
            divisors = [self._divisor(pack.dtype) for pack in self.packs]
            self._result_buffers = ResultBufferReduction(
                communicator, self.packs, op.on_the_wire, divisors, self.combination
            )
        #: Memory for each pack, between `prepare` and `run`: short memory must show before the ranks agree.
        self._memory: list[Array] | None = None
        #: Lone numbers in blocks, and in packs: their results must not keep so much memory.
        self._numbers = [m.index for p in self.packs for m in p.members if m.stop - m.start == 1]
        self._lone = [m.index for p in self.packs if p.size > _FEW_ELEMENTS for m in p.members if m.stop - m.start == 1]

    def routes(self) -> list[Route]:
        """Return the route of each of `packs`."""
        if self._result_buffers is not None and self._result_buffers.is_possible:
            return ["result_buffers"] * len(self.packs)
        return self._routes()

    def _divisor(self, dtype: np.dtype[Any]) -> int:
        """Return what sums are divided by before they are converted to their own dtype."""
        return self._communicator.size if self._op is ReduceOp.MEAN and dtype.kind not in "iu" else 1

    def _routes(self) -> list[Route]:
        """Return the routes without result buffers: all packs are pipelined together, or each has its own."""
        ranks, op = self._communicator, self._op.on_the_wire
        return [
            "pipelined"
            if ranks.route(self._nbytes, pack.dtype, op) == "pipelined"
            else ranks.route(pack.nbytes, pack.dtype, op)
            for pack in self.packs
        ]

    def prepare(self, arrays: Sequence[Any], targets: Sequence[Array | None] | None = None) -> None:
        """Do what must be done before the ranks agree on the call; the arguments are those of `run`."""
        if self.program is not None:
            self.program.write(arrays)
            return
        self.prepare_result_buffers(arrays, targets)
        self._memory = None if self.has_result_buffer else self._taken(targets)

    def prepare_result_buffers(self, arrays: Sequence[Any], targets: Sequence[Array | None] | None = None) -> None:
        """Do the part of `prepare` that `run_in_result_buffers` needs."""
        if self._result_buffers is not None:
            self._result_buffers.prepare(
                arrays, wanted=targets is None or not any(target is not None for target in targets)
            )

    @property
    def has_result_buffer(self) -> bool:
        """Whether `prepare` has copied this rank's arrays into result buffers."""
        return self._result_buffers is not None and self._result_buffers.is_prepared

    def only_array(self) -> Callable[[Array, Array], None] | None:
        """Return what reduces one contiguous array into another of its dtype; None for other lists and routes.

        It is the short way of `run`: much of the time of a reduction of 1 MiB is Python that other work has driven out
        of the caches.
        """
        if len(self.packs) != 1 or not self._exact:
            return None
        ranks, op, pack = self._communicator, self._op.on_the_wire, self.packs[0]
        if len(pack.members) > 1 or ranks.route(pack.nbytes, pack.dtype, op) not in ("pipelined", "mpi", "threads"):
            return None
        divisor = self._divisor(pack.dtype)
        return lambda source, target: ranks.allreduce(target, op, source, divisor)

    def run(self, arrays: Sequence[Array], targets: Sequence[Array | None] | None = None) -> list[Array]:
        """Return the results, after the agreement.

        Args:
            arrays: this rank's, of the layouts.
            targets: for each array memory that a result in its own dtype may be written to, contiguous and sharing
                none with another array; or None.
        """
        if self.program is not None:
            results = self.program.read()
            size = self._communicator.size
            return [finish(r, dtype, self._op, size) for r, dtype in zip(results, self._dtypes, strict=True)]
        found = self.run_in_result_buffers()
        if found is not None:
            return found
        results = [np.empty(0)] * len(arrays)
        pairs: dict[np.dtype[Any], list[tuple[Array, Array]]] = {}
        memory, self._memory = self._memory or self._taken(targets), None
        for pack, taken in zip(self.packs, memory, strict=True):
            if len(pack.members) == 1:
                results[pack.members[0].index] = taken
                source, target = self._one(pack, arrays, taken)
            else:
                source = target = taken
                chosen = arrays if len(pack.members) == len(arrays) else [arrays[m.index] for m in pack.members]
                np.concatenate(chosen, axis=None, out=target, casting="unsafe")
                for member in pack.members:
                    results[member.index] = target[member.start : member.stop].reshape(member.shape)
            if pack.size:
                pairs.setdefault(pack.dtype, []).append((source, target))
        for dtype, those in pairs.items():
            self.reduce_pairs(those, dtype)
        return self._finished(results, self._lone)

    def reduce_pairs(self, pairs: Sequence[tuple[Array, Array]], dtype: np.dtype[Any]) -> None:
        """Write the combination of each source into its target: pairs of flat arrays of one dtype."""
        self._communicator.allreduce_many(pairs, self._text, self._divisor(dtype), self._nbytes)

    def run_in_result_buffers(self) -> list[Array] | None:
        """Do what `run` does where all ranks have result buffers; None elsewhere, on all ranks."""
        sums = None if self._result_buffers is None else self._result_buffers.run()
        if sums is None:
            return None
        results: list[Array] = [np.empty(0)] * len(self._dtypes)
        for pack, total in sums:
            if pack.is_plain and len(sums) == 1:
                results = [total[part] for part in pack.slices]
                break
            for index, view in pack.views(total):
                results[index] = view
        return self._finished(results, self._numbers)

    def _taken(self, targets: Sequence[Array | None] | None) -> list[Array]:
        """Return memory for each pack: the target of a lone array, or memory that is used again."""
        return [self._place(pack, targets) for pack in self.packs]

    def _place(self, pack: Pack, targets: Sequence[Array | None] | None) -> Array:
        shape: tuple[int, ...] = (pack.size,)
        if len(pack.members) == 1:
            (member,) = pack.members
            shape = member.shape
            given = targets[member.index] if targets is not None else None
            if given is not None and given.dtype == pack.dtype:
                return given
        if pack.size * pack.dtype.itemsize < LEAST_POOLED:
            return np.empty(shape, pack.dtype)
        return self._communicator.pool.take(pack.dtype, shape)

    def _one(self, pack: Pack, arrays: Sequence[Array], result: Array) -> tuple[Array, Array]:
        target = result.reshape(-1)
        array = arrays[pack.members[0].index]
        if array.dtype == pack.dtype and array.flags.c_contiguous and array.flags.aligned:
            return array.reshape(-1), target
        np.copyto(result, array, casting="unsafe")
        return target, target

    def _finished(self, results: list[Array], lone: Sequence[int]) -> list[Array]:
        for index in lone:
            results[index] = results[index].copy()
        if self._exact:
            return results
        size = self._communicator.size
        return [
            finish(result, dtype, self._op, size) if dtype.kind in "iu" else rounded(result, dtype)  # divided already
            for result, dtype in zip(results, self._dtypes, strict=True)
        ]


class AgreedReduction:
    """The all-reduce of a list of ordinary arrays with the words that the ranks compare before it.

    Args:
        reduction: of the arrays.
        op: the operation.
        layouts: their dtypes and shapes.
        settings: the algorithm and its options in words.
        timeout_seconds: how long a call may wait for the other ranks; None for as long as the strategy says.
    """

    def __init__(
        self,
        reduction: DenseReduction,
        op: ReduceOp,
        layouts: tuple[Layout, ...],
        settings: str,
        timeout_seconds: float | None,
    ) -> None:
        self._reduction = reduction
        self._op = op.value
        self._values = tuple((dtype_name(dtype), shape) for dtype, shape in layouts)
        self._settings = settings
        self._timeout = timeout_seconds

    def run(self, call: Call, arrays: Sequence[Array]) -> list[Array]:
        """Return the results on every rank; inside `call`."""
        call.wait_as(self._timeout)
        self._reduction.prepare(arrays)
        call.agree(
            "reduce",
            op=self._op,
            values=self._values,
            destination=EVERY_RANK_TEXT,
            options=self._settings,
            sparingly=True,
        )
        return self._reduction.run(arrays)


def _hybrid(layouts: tuple[Layout, ...], pack_bytes: int, bytes_per_pack: float) -> tuple[Pack, ...]:
    """Return packs of the small arrays, and one pack for each large one."""
    small: list[int] = []
    large: list[int] = []
    for index, (dtype, shape) in enumerate(layouts):
        (small if prod(shape) * host_wire_dtype(dtype).itemsize < pack_bytes else large).append(index)
    packs = plan_layouts(layouts, small, bytes_per_pack or DEFAULT_BYTES_PER_PACK)
    return packs + tuple(pack for index in large for pack in plan_layouts(layouts, [index], 1))


def described(run: Run, signature: Signature) -> Run:
    """Return `run`, after it was told what it does: the flight record keeps it, and may have to say so."""
    run.__dict__["signature"] = signature
    return run


def plan_of_one_array(
    reduction: DenseReduction,
    reduce: Callable[[Array, Array], None],
    communicator: Communicator,
    agreed: Agreed,
    layout: Layout,
    general: Run,
) -> Run:
    """Return the all-reduce of one large array; `general` takes what is not contiguous, or overlaps."""
    guard, digest, signature = agreed
    dtype, shape = layout
    take = communicator.pool.take

    def run(value: Array, out: Any) -> Any:
        if not (value.flags.c_contiguous and value.flags.aligned):
            return general(value, out)
        if out is not None and out is not value:
            fits = type(out) is np.ndarray and out.dtype == dtype and out.shape == shape and is_buffer(out)
            if not fits or not out.flags.writeable or np.may_share_memory(out, value):
                return general(value, out)
        elif out is not None and not out.flags.writeable:
            return MISFIT
        reduction.prepare_result_buffers((value,), None if out is None else (out,))
        target = take(dtype, shape) if out is None and not reduction.has_result_buffer else out
        guard.compare_digest(digest, signature)
        try:
            found = reduction.run_in_result_buffers()
            if found is not None:
                return found[0]
            if target is None:  # another rank had no block
                target = take(dtype, shape)
            reduce(value, target)
            return target
        except BaseException as error:
            guard.fail_after_agreement(signature.call, error)
            raise

    return run


def plan_of_arrays(
    reduction: DenseReduction, agreed: Agreed, where: Leaves, dtypes: list[np.dtype[Any]], only_arrays: bool
) -> Run:
    guard, digest, signature = agreed
    nested = not where.single
    some_go_alone = any(len(pack.members) == 1 for pack in reduction.packs)

    def run(value: Any, out: Any) -> Any:
        leaves = where.take(value) if nested else (value,)
        try:
            arrays = (
                leaves
                if only_arrays
                else [leaf if type(leaf) is np.ndarray else np.asarray(leaf, NUMBERS[type(leaf)]) for leaf in leaves]
            )
        except OverflowError:  # an int that has no such dtype
            return MISFIT
        targets: Sequence[Array | None] | None = None
        if out is not None:
            targets = direct_targets(out, value, where, arrays, dtypes, some_go_alone)
            if targets is None:
                return MISFIT
        reduction.prepare(arrays, targets)
        guard.compare_digest(digest, signature)
        try:
            results = reduction.run(arrays, targets)
        except BaseException as error:
            guard.fail_after_agreement(signature.call, error)
            raise
        if out is not None:
            for target, result in zip(where.take(out), results, strict=True):
                if result is not target:
                    target[...] = result
            return out
        if only_arrays:
            return where.build(results) if nested else results[0]
        given = zip(leaves, results, strict=True)
        return where.build([result if type(leaf) is np.ndarray else result[()] for leaf, result in given])

    return run
