"""Arenas: nests of arrays that live in memory which the ranks of a node share, so that reducing them copies nothing."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from operator import is_
from typing import Any, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import cupy_for, is_on_device
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype, quietly
from mpistrategy.arrays.values import ArenaBase, contribution
from mpistrategy.errors import (
    ContextError,
    DTypeError,
    EmptyBatchError,
    LeafError,
    OptionError,
    OptionTypeError,
    StructureError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.interface.gpu_transport import communication_memory
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.two_level import Lanes, across_nodes, check_wire
from mpistrategy.mpi.shared_memory.node_sum import ShareOfNode
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, aligned, private_memory
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Fixed, NotPickled, checked_switch
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction import gpu
from mpistrategy.reduction.collectives import broadcast
from mpistrategy.reduction.inputs import EVERY_RANK, check_order, checked_leaves, resolve, write
from mpistrategy.reduction.plan import ArraysPlan
from mpistrategy.reduction.reducer import MOST_PLANS, General, Reducer
from mpistrategy.reduction.transfer import (
    CommunicatorRoute,
    Member,
    Pack,
    Targets,
    Transfer,
    Way,
    layouts_of,
    packs_of,
    ways_in_words,
)

T = TypeVar("T")


class Arena(NotPickled, ArenaBase[T]):
    """A nest of arrays that the strategy lays out, and reduces where they are.  Creation is collective.

    `Strategy.arena` makes one.  Fill `values` in place (``np.multiply(a, b, out=arena.values["w"])``,
    ``arena.values["b"][...] = x``), then pass the arena itself: ``context.all_reduce("SUM", arena)``.  On a node no
    array is copied: each rank combines its share of all ranks' arrays.

    Args:
        strategy: the strategy whose ranks take part.
        like: a nest of arrays, numbers and variables: their structure, shapes and dtypes count.
        shared_result: all ranks of a node get the same memory as result, read-only, and `values` stay as they are;
            it holds until the next reduction of this arena.  In GPU memory it is each rank's own, and new each time.
            Else the result is written over `values`.
        name: is compared between the ranks instead of the call site.

    Attributes:
        strategy: the strategy.

    Raises:
        EmptyBatchError: for a structure without arrays.
        DTypeError, LeafError: for what cannot be reduced.
        CollectiveMismatchError: when the ranks' structures, shapes or dtypes differ.
    """

    _instead_of_pickling = "Copy the arrays in arena.values, or call strategy.arena(arena.values)."
    strategy: Fixed[Any] = Fixed()

    def __init__(self, strategy: Any, like: T, *, shared_result: bool = False, name: str | None = None) -> None:
        self.strategy = strategy
        reducer: Reducer = strategy.extended._reducer
        communicator = reducer.communicator
        self._communicator: Ranks = communicator
        with Call(communicator.guard, "Strategy.arena", called=name) as call:
            shared_result = checked_switch(call.where, "shared_result", shared_result)
            leaves, self._structure = nest.flatten(like)
            call.structure = self._structure.text
            if not leaves:
                raise EmptyBatchError.at(call.where, found="an empty structure", expected="at least one array")
            arrays = checked_leaves(
                [*map(contribution, leaves)], partial(nest.leaf_paths, like, with_none=True), call.where, LeafError
            )
            layouts = layouts_of(arrays)
            #: Whether it is in GPU memory: this rank's GPU, or the GPU of an array.
            self._on_device: bool = gpu_of(communicator.devices, communicator.rank) is not None or any(
                map(is_on_device, arrays)
            )
            #: A bucket for each dtype, in the order of the first arrays.
            self._packs = packs_of(layouts, _NO_LIMIT, wire=None, alignment=ALIGNMENT)
            places = [(number, member) for number, pack in enumerate(self._packs) for member in pack.members]
            #: For each array the number of its bucket, and its place there.
            self._places: list[tuple[int, Member]] = sorted(places, key=lambda place: place[1].index)
            call.agree(
                "make an arena",
                values=tuple((dtype_name(dtype), shape) for dtype, shape in layouts),
                options=f"shared_result={shared_result}{', on a GPU' if self._on_device else ''}",
            )
            if self._on_device:  # each rank takes memory of its own; on a node they take it together
                call.expect_more()
            #: Of each bucket, one flat array of every rank of the node.
            self._buckets: tuple[Replicas, ...] = buckets_for(communicator, self._packs, shared_result, self._on_device)
            if not self._on_device and communicator.nodes > 1 and not communicator.is_simulated:
                across_nodes(communicator)  # also for `explain`, which sends nothing
            call.expect_more()
            call.agree("use an arena")  # no rank has run out of memory
        self._number: int = next(communicator.once("arenas", partial(count, 1)))  # the same on every rank
        #: This rank's array of each bucket.
        self._own_arrays = [bucket.own_array for bucket in self._buckets]
        #: The arrays, in order.
        self._leaves: list[Array] = self._views(self._own_arrays)
        self._values: Any = self._structure.pack(self._leaves)
        #: A nest that the program cannot get at.
        self._twin: Any = self._structure.pack(self._leaves)
        #: Whether results are written over `values`.
        self._in_place: bool = not shared_result
        #: What an all-reduce with a shared result returns on the host.
        self._result: Any = None
        if shared_result and not self._on_device:
            views = self._views([bucket.result for bucket in self._buckets if bucket.result is not None])
            for view in views:
                view.flags.writeable = False
            self._result = self._structure.pack(views)
        #: How it is reduced, by the kind of call.
        self._plans: dict[General, ArraysPlan] = {}
        self._closed = False

    @property
    def values(self) -> T:
        """The nest of this rank's arrays, to be written in place; zeros at first.

        Raises:
            ContextError: after `close`; in a function that JAX traces.
        """
        refuse_in_jax_trace("Arena.values")
        self._require_open("Arena.values")
        values: T = self._values
        return values

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of the node see each other's arrays; else everything works as for other arrays."""
        return all(bucket.is_shared for bucket in self._buckets)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, and of the gaps that align them."""
        return sum(array.nbytes for array in self._own_arrays)

    def _views(self, flat: Sequence[Array]) -> list[Array]:
        return [flat[bucket][place.start : place.stop].reshape(place.shape) for bucket, place in self._places]

    def __repr__(self) -> str:
        if self._closed:
            return f"<Arena {self._number}, closed>"
        place = f"shared by {len(self._buckets[0].arrays)} ranks" if self.is_shared else "of this rank alone"
        where = f"{size_in_words(self.nbytes)} {'on a GPU' if self._on_device else place}"
        return f"<Arena {self._number}: {len(self._leaves)} arrays in {len(self._buckets)} buckets, {where}>"

    def close(self) -> None:
        """Give the memory back, as soon as no array in it is in use.  Collective; the arena cannot be used afterwards.

        Arrays that are held elsewhere stay as they are.
        """
        if self._closed:
            return
        guard = self._communicator.guard
        if not guard.closed:
            with Call(guard, "Arena.close", anywhere=True) as call:
                call.agree("close an arena", options=f"arena {self._number}")
        self._closed = True
        self._plans.clear()
        self._buckets, self._own_arrays, self._leaves = (), [], []
        self._values = self._result = self._twin = None

    def _check(self, reducer: Reducer, where: str, out: Any = None) -> None:
        """Raise unless a strategy can reduce the arena as it is.

        Raises:
            ContextError, OptionTypeError, StructureError: when it is closed, belongs to another strategy, or its nest
                has been given other arrays.
            OptionError: for an `out` that is neither the arena nor its nest.
        """
        self._require_open(where)
        if reducer.communicator is not self._communicator:
            raise OptionTypeError.at(
                where, found="an arena of another strategy", expected="one that this strategy's arena() made"
            )
        if not self._holds(self._values):
            raise StructureError.at(
                where,
                found="other arrays in arena.values than the arena's own",
                expected="values that were written in place",
                fix="Write arena.values[key][...] = x, or pass out=arena.values[key] to NumPy's functions.",
            )
        if not (out is None or out is self or out is self._values or self._holds(out)):
            raise OptionError.at(where, found="another out= with an arena", expected="out=None, or out=arena.values")

    def _holds(self, value: Any) -> bool:
        """Return whether a nest has the arena's structure, and holds the arena's arrays."""
        if self._structure.take is None:
            leaves, structure = nest.flatten(value)
            return structure.text == self._structure.text and all(map(is_, leaves, self._leaves))
        try:
            has_arrays = all(map(is_, self._structure.take(value), self._leaves))
        except (LookupError, TypeError):
            return False
        # Arrays that are identical are not compared by their elements.
        return has_arrays and (value is self._twin or bool(value == self._twin))

    def _require_open(self, where: str) -> None:
        if self._closed:
            raise ContextError.at(where, found="an arena after its close()", expected="an open arena")

    def _all_reduce(
        self, general: General, call: Call, *, weight: Any = None, out: Any = None, destination: str = ""
    ) -> Any:
        """Reduce over all replicas, to all replicas; the caller has entered the guard's call.

        Args:
            general: makes the calls of one kind: the operation, the options, the destination and whether there is an
                `out` are the same in all of them.
            call: the public call.
            weight: for MEAN, the weight of this rank's values.
            out: None, the arena or its `values`, which asks for the result in place.
            destination: the destination in words, on which the ranks must agree, too.

        Returns:
            `values`, which hold the result, or with shared_result read-only views of the node's one result.

        Raises:
            ContextError, OptionTypeError, StructureError: see `_check`.
            DTypeError: for a MEAN of integers, which has another dtype, and for MIN and MAX of complex numbers.
        """
        reducer, in_place = general.reducer, self._in_place or out is not None
        self._check(reducer, call.where, out)
        call.structure = self._structure.text
        plan = self._plans.get(general)
        if plan is None:
            op, options = ReduceOp._parse(general.argument, call.where), general.merged_options
            is_ordinary = weight is not None or not reducer.algorithm._works_in_place
            if in_place or not is_ordinary:
                check_dtypes(self._buckets, op, call.where)
            if is_ordinary:
                results = reducer.all_reduce_leaves(
                    call,
                    op,
                    self._leaves,
                    partial(nest.leaf_paths, self._values),
                    options=options,
                    weight=weight,
                    targets=self._leaves if in_place else None,
                )
                return self._values if in_place else self._structure.pack(results)
            route = self._route(reducer, op, options, in_place)
            compared = f"arena {self._number}, {in_place=}, wire={options.wire}"
            layouts = tuple((dtype_name(pack.dtype), (pack.size,)) for pack in self._packs)
            signature = Signature("reduce an arena", op.value, "", layouts, destination, compared)
            if len(self._plans) >= MOST_PLANS:  # of calls inside others, whose object is new each time
                self._plans.clear()
            plan = self._plans[general] = ArraysPlan(route, signature, options.timeout_seconds)
        results = plan.run(call, self._own_arrays)
        if in_place:
            return self._values
        return self._structure.pack(self._views(results)) if self._on_device else self._result

    def _route(self, reducer: Reducer, op: ReduceOp, options: CommunicationOptions, in_place: bool) -> Transfer:
        """Return how the buckets are combined."""
        check_wire(options.wire)
        ranks, buckets, wire = self._communicator, self._buckets, options.wire
        if not self._on_device:
            return InPlaceRoute(ranks, buckets, op, into_result=not in_place, wire=wire)
        packs = packs_of(layouts_of(self._own_arrays), 1, wire=None)  # each by itself
        path = path_word(options, reducer.algorithm._device_path)
        return gpu.GpuRoute(ranks, packs, op, path, wire, in_place=in_place)

    def _lines(self, reducer: Reducer, op: ReduceOp, options: CommunicationOptions, where: str) -> list[str]:
        """Return how `all_reduce` would combine the buckets, in the lines of `Strategy.explain`."""
        check_dtypes(self._buckets, op, where)
        ways = self._route(reducer, op, options, self._in_place).describe(self._own_arrays)
        packs = [pack for pack in self._packs if pack.size]
        return ways_in_words([(pack, way) for pack, (_, way) in zip(packs, ways, strict=True)])

    def _broadcast(self, reducer: Reducer, destinations: Any, call: Call) -> Any:
        """Send replica 0's arrays to all replicas, and return `values`; the caller has entered the guard's call."""
        destination = self._destination(destinations, call.where)
        self._check(reducer, call.where)
        call.structure = self._structure.text
        words = f"{destination}, arena {self._number}"
        write(broadcast(self._communicator, self._own_arrays, 0, call, words, in_place=True), self._own_arrays)
        return self._values

    def _destination(self, destinations: Any, where: str) -> str:
        """Return the ranks that want a result, in words; as `mpistrategy.reduction.inputs.resolve`."""
        is_own = destinations is self or destinations is self._values
        return EVERY_RANK.text if is_own else resolve(destinations, self._communicator, where).text


#: More than any arena has: all arrays of a dtype lie in one bucket.
_NO_LIMIT = 2**62


def buckets_for(ranks: Ranks, packs: Sequence[Pack], shared_result: bool, on_gpu: bool) -> tuple[Replicas, ...]:
    """Return the zeroed memory of these buckets for every rank, and one result for the node where it is asked for.

    Collective.  On a GPU there is none: results are new memory.
    """
    if on_gpu:
        return _on_gpu(ranks, packs)
    starts = [0, *accumulate(aligned(pack.nbytes) for pack in packs)]
    memory, result = ranks.shared(starts[-1]), None
    segments, me = memory.segments, memory.local_rank
    is_shared = memory.is_shared
    if shared_result and is_shared:  # each rank brings its part of the one result, whole pages side by side
        pages = -(-starts[-1] // (len(segments) * mmap.PAGESIZE))
        parts = ranks.shared(max(1, pages) * mmap.PAGESIZE)
        first, nbytes = parts.segments[0], sum(segment.nbytes for segment in parts.segments)
        is_shared, result = parts.is_shared, np.lib.stride_tricks.as_strided(first, (nbytes,), (1,))
    if shared_result and not is_shared:
        result = private_memory(starts[-1]).own_segment
    if not is_shared:
        segments, me = (memory.own_segment,), 0
    places = [(slice(start, start + pack.nbytes), pack.dtype) for pack, start in zip(packs, starts, strict=False)]
    return tuple(
        Replicas(
            tuple(segment[part].view(dtype) for segment in segments),
            me,
            is_shared,
            None if result is None else result[part].view(dtype),
        )
        for part, dtype in places
    )


def _on_gpu(ranks: Ranks, packs: Sequence[Pack]) -> tuple[Replicas, ...]:
    cupy, index, buckets = cupy_for("an arena in GPU memory"), gpu_of(ranks.devices, ranks.rank), []
    with cupy.cuda.Device(cupy.cuda.runtime.getDevice() if index is None else index):
        for pack in packs:
            array = communication_memory(cupy, pack.size, pack.dtype)
            array[...] = 0
            buckets.append(Replicas((array,)))
    return tuple(buckets)


def check_dtypes(buckets: Sequence[Replicas], op: ReduceOp, where: str) -> None:
    """Raise DTypeError for a MEAN of integers, which would not fit, and for MIN and MAX of complex numbers."""
    for bucket in buckets:
        dtype = bucket.own_array.dtype
        if op is ReduceOp.MEAN and dtype.kind in "iu":
            raise DTypeError.at(
                where,
                found=f"MEAN of {dtype_name(dtype)} in an arena",
                expected="a floating dtype: the mean of integers is not an integer, and does not fit into the arena",
                fix="Reduce with SUM, or pass arena.values without out=.",
            )
        check_order(dtype, op, where)


# ------------------------------------------------------------------------------------------------- where the arrays are


@dataclass(frozen=True)
class Replicas:
    """One flat array of each rank of a node, of one dtype and size.

    Attributes:
        arrays: by local rank; where `is_shared` is False only this rank's own.
        local_rank: this rank's index among them.
        is_shared: whether they are the peers' own memory.
        result: one array for the whole node that a result can be written to; None without such.
    """

    arrays: tuple[Array, ...]
    local_rank: int = 0
    is_shared: bool = False
    result: Array | None = None

    @property
    def own_array(self) -> Array:
        """This rank's own array."""
        return self.arrays[self.local_rank]


class InPlaceRoute(Transfer):
    """The route of the buckets of an arena: in place if the ranks see each other's arrays; else as other arrays go.

    Between nodes, sums of a node are sent from where they are, if some are large and all keep their dtype.

    Args:
        ranks: the ranks that take part.
        buckets: the arrays of this node, of each array of `bring` and `run` one.
        op: how they are combined; 16-bit floats in float32 and rounded once, integers wrap.
        into_result: write `Replicas.result` and leave the arrays as they are; else write every array.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
    """

    def __init__(
        self,
        ranks: Ranks,
        buckets: Sequence[Replicas],
        op: ReduceOp,
        *,
        into_result: bool,
        wire: str | None,
    ) -> None:
        self._ranks = ranks
        self._own_arrays = [bucket.own_array for bucket in buckets]
        self._results: list[Any] = [bucket.result for bucket in buckets] if into_result else self._own_arrays
        self._route = CommunicatorRoute(ranks, packs_of(layouts_of(self._own_arrays), 1), op, wire=wire)
        self.packs: tuple[Pack, ...] = tuple(sorted(self._route.packs, key=lambda pack: pack.members[0].index))
        is_shared = buckets[0].is_shared
        self._is_one_result: bool = into_result and is_shared
        #: Else the first rank of the node writes the result for all.
        self._writes_here: bool = not self._is_one_result or buckets[0].local_rank == 0
        lanes: Lanes | None = None
        if is_shared and not ranks.is_simulated and "lanes" in map(self._route.name_of, self.packs):
            lanes = across_nodes(ranks)
        keep_dtype = all(host_wire_dtype(array.dtype) == array.dtype for array in self._own_arrays)
        sends_sums = lanes is not None and lanes.node_sum is not None and keep_dtype
        #: How each bucket is combined where it is, on one node and between nodes; nothing where all go as other arrays.
        self._shares: list[ShareOfNode] = []
        self._sent_sums: list[tuple[Any, ...]] = []
        for bucket in buckets if sends_sums or (is_shared and ranks.nodes == 1) else ():
            arrays, text, dtype = bucket.arrays, op._on_the_wire, bucket.own_array.dtype
            targets: Any = (bucket.result,) if into_result else arrays
            divisor = op._divisor(dtype, ranks.size)
            if lanes is None:
                self._shares.append(ShareOfNode(arrays, targets, text, divisor, bucket.local_rank))
            else:
                self._sent_sums.append((arrays, targets, text, self._route.dtype_between_nodes(dtype), divisor))
        self._is_in_place = bool(self._shares or self._sent_sums)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Return the memory that messages need besides the arrays."""
        own_results = self._results if self._writes_here else None
        return None if self._is_in_place else self._route.bring(self._own_arrays, own_results)

    @quietly
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Combine the buckets on all nodes, and return the arrays with the results."""
        for share in self._shares:
            share.combine()
        for arguments in self._sent_sums:
            across_nodes(self._ranks).in_place(*arguments)
        if not self._is_in_place:
            if self._is_one_result:
                self._ranks.node_barrier()  # until the peers are here they may read the result of the call before
            totals = self._route.run(self._own_arrays, memory)
            write(totals if self._writes_here else [], self._results)
        self._ranks.node_barrier()
        return self._results

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a bucket is combined; see `Transfer.way`."""
        if not self._is_in_place or self._ranks.nodes > 1:
            return self._route.way(pack, self._own_arrays)
        target = "the node's one result" if self._is_one_result else "every one"
        return f"where the arrays are, each rank 1/{self._ranks.size} of them, into {target}", ()
