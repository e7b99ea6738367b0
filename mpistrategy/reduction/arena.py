"""Arenas: nests of arrays that live in memory which the ranks of a node share, so that reducing them copies nothing."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, Generic, NoReturn, SupportsIndex, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.arrays.values import ArenaBase, contribution
from mpistrategy.errors import (
    ContextError,
    CopyError,
    DTypeError,
    EmptyBatchError,
    LeafError,
    OptionError,
    OptionTypeError,
    StructureError,
)
from mpistrategy.mpi.contract import timeouts
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature, digest_of
from mpistrategy.mpi.interface.gpu_transport import communication_memory
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.mpi.multi_node.two_level import across_nodes
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, aligned, private_memory
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Fixed
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction.inputs import check_order, checked_leaves
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import EVERY_RANK_TEXT, resolve
from mpistrategy.reduction.layout.packing import Layout, Member, Pack
from mpistrategy.reduction.reducer import Reducer
from mpistrategy.reduction.routes.base import CallPlan, Description, Route
from mpistrategy.reduction.routes.in_place import InPlaceRoute, Replicas, broadcast_replicas, joined, typed

T = TypeVar("T")


class Arena(ArenaBase, Generic[T]):
    """A nest of arrays that the strategy lays out, and reduces where they are.  Creation is collective.

    `Strategy.arena` makes one.  Fill `values` in place (``np.multiply(a, b, out=arena.values["w"])``,
    ``arena.values["b"][...] = x``), then pass the arena itself: ``context.all_reduce("SUM", arena)``.  On a node no
    array is copied: each rank combines its share of all ranks' arrays.

    Args:
        strategy: the strategy whose ranks take part.
        like: a nest of arrays, numbers and variables: their structure, shapes and dtypes count.
        shared_result: all ranks of a node get the same memory as result, read-only, and `values` stay as they are;
            it holds until the next reduction of this arena.  Else the result is written over `values`.
        name: is compared between the ranks instead of the call site.

    Attributes:
        strategy: the strategy.

    Raises:
        EmptyBatchError: for a structure without arrays.
        DTypeError, LeafError: for what cannot be reduced.
        CollectiveMismatchError: when the ranks' structures, shapes or dtypes differ.
    """

    strategy: Fixed[Any] = Fixed()

    def __init__(self, strategy: Any, like: T, *, shared_result: bool = False, name: str | None = None) -> None:
        self.strategy = strategy
        reducer: Reducer = strategy.extended._reducer
        communicator = reducer.communicator
        self._communicator: Ranks = communicator
        with Call(communicator.guard, "Strategy.arena", called=name) as call:
            if not isinstance(shared_result, bool):
                raise OptionTypeError.at(call.where, found=f"shared_result={shared_result!r}", expected="a bool")
            given, self._structure = nest.flatten(like)
            call.structure = self._structure.text
            if not given:
                raise EmptyBatchError.at(call.where, found="an empty structure", expected="at least one array")
            mine = [contribution(leaf) for leaf in given]
            arrays = checked_leaves(mine, lambda: nest.leaf_paths(like), call.where, LeafError)
            layouts = packing.layouts_of(arrays)
            #: Whether it is in GPU memory: of this rank's GPU, or of that of an array.
            self._on_device: bool = gpu_of(communicator.devices, communicator.rank) is not None or any(
                map(is_on_device, mine)
            )
            #: For each dtype a bucket, in the order of the first array of each; and where each array lies, in order.
            self._packs, self._places = laid_out(layouts)
            call.agree(
                "make an arena",
                values=tuple((dtype_name(dtype), shape) for dtype, shape in layouts),
                options=f"shared_result={shared_result}{', on a GPU' if self._on_device else ''}",
            )
            if self._on_device:  # each rank takes memory of its own; on a node they take it together
                call.expect_more()
            #: Of each bucket, one flat array of every rank of the node.
            self._buckets: tuple[Replicas, ...] = buckets_for(communicator, self._packs, shared_result, self._on_device)
            if not self._on_device and communicator.nodes > 1 and communicator.has_links:
                across_nodes(communicator)  # also for `explain`, which sends nothing
            call.expect_more()
            call.agree("use an arena")  # no rank has run out of memory
        self._number = next(reducer.arena_numbers)
        self._summary = tuple((dtype_name(pack.dtype), (pack.size,)) for pack in self._packs)
        #: What each bucket holds of this rank.
        self._mine = [bucket.mine for bucket in self._buckets]
        #: The arrays, in order.
        self._leaves: list[Array] = self._views(self._mine)
        self._values: Any = self._structure.pack(self._leaves)
        #: A nest that the program cannot get at, and how to reach its arrays; None for containers that are not plain.
        self._twin, self._where = self._structure.pack(self._leaves), nest.leaves_of(self._values)
        #: Whether results are written over `values`.
        self._in_place: bool = not shared_result
        #: What an all-reduce returns.
        self._result: Any = self._values
        if shared_result:
            views = self._views([bucket.result for bucket in self._buckets if bucket.result is not None])
            for view in [] if self._on_device else views:  # CuPy has no read-only arrays
                view.flags.writeable = False
            self._result = self._structure.pack(views)
        #: How it is reduced, by operation, dtype between nodes, and whether in place.
        self._routes: dict[Any, InPlaceRoute] = {}
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
        return sum(mine.nbytes for mine in self._mine)

    def _views(self, flat: Sequence[Array]) -> list[Array]:
        return [flat[bucket][place.start : place.stop].reshape(place.shape) for bucket, place in self._places]

    def __repr__(self) -> str:
        if self._closed:
            return f"<Arena {self._number}, closed>"
        size, count = f"{self.nbytes / 2**20:.1f} MiB", len(self._leaves)
        memory = f"shared by {len(self._buckets[0].arrays)} ranks" if self.is_shared else "of this rank alone"
        memory = "on a GPU" if self._on_device else memory
        return f"<Arena {self._number}: {count} arrays in {len(self._buckets)} buckets, {size} {memory}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyError.at(
            "copying or pickling an Arena",
            found="a copy of memory that all ranks share",
            expected="a new arena, which all ranks make together",
            fix="Copy the arrays in arena.values, or call strategy.arena(arena.values).",
        )

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
        self._routes.clear()
        self._buckets, self._mine, self._leaves, self._values, self._result = (), [], [], None, None
        self._twin = None

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
        if self._where is not None:
            is_alike = nest.alike(self._twin, value)
            return is_alike and all(map(is_, self._where.take(value), self._leaves))
        leaves, structure = nest.flatten(value)
        return structure.text == self._structure.text and all(map(is_, leaves, self._leaves))

    def _require_open(self, where: str) -> None:
        if self._closed:
            raise ContextError.at(where, found="an arena after its close()", expected="an open arena")

    def _all_reduce(
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
            weight: for MEAN, the weight of this rank's values.
            out: None, the arena or its `values`, which asks for the result in place.
            destination: what the ranks must agree on besides; in words.

        Returns:
            `values`, which hold the result, or with shared_result read-only views of the node's one result.

        Raises:
            ContextError, OptionTypeError, StructureError: see `_check`.
            DTypeError: for a MEAN of integers, which has another dtype than they, and MIN and MAX of complex numbers.
        """
        op, chosen = ReduceOp._parse(reduce_op, call.where), reducer.options.merge(options)
        plan = self._plan(reducer, op, call, chosen, out, is_weighted=weight is not None, destination=destination)
        if plan is not None:
            return plan.run(call, self, out, None)
        in_place = self._in_place or out is not None
        targets, paths = self._leaves if in_place else None, partial(nest.leaf_paths, self._values)
        results = reducer.all_reduce_leaves(
            call, op, self._leaves, paths, options=options, weight=weight, targets=targets
        )
        return self._values if in_place else self._structure.pack(results)

    def _route(self, op: ReduceOp, path: str, wire: str | None, in_place: bool) -> Route:
        """Return how the buckets are reduced where they are; `path` is asked for in GPU memory."""
        if not self._on_device:
            key = (op.value, wire, in_place)
            known = self._routes.get(key)
            if known is None:
                ranks, into_result = self._communicator, not in_place
                known = self._routes[key] = InPlaceRoute(ranks, self._buckets, op, into_result=into_result, wire=wire)
            return known
        from mpistrategy.reduction.routes.gpu import GpuRoute, gpu_packs  # here: on CPUs nothing reads it

        packs = gpu_packs(packing.layouts_of(self._mine), 1, 0)  # each by itself
        targets = self._mine if in_place else [bucket.result for bucket in self._buckets]
        return GpuRoute(self._communicator, packs, op, path, wire, targets=targets)

    def _plan(
        self,
        reducer: Reducer,
        op: ReduceOp,
        call: Call,
        options: CommunicationOptions,
        out: Any,
        *,
        is_weighted: bool,
        destination: str = "",
    ) -> ArenaPlan | None:
        """Return how it is reduced where it is; None where it is reduced like other arrays.

        Raises:
            MpiStrategyError: as `_all_reduce`.
        """
        self._check(reducer, call.where, out)
        call.structure = self._structure.text
        in_place, is_ordinary = self._in_place or out is not None, is_weighted or not reducer.algorithm._in_rank_order
        if in_place or not is_ordinary:
            check_dtypes(self._buckets, op, call.where)
        if is_ordinary:
            return None
        reduced_precision.check(options.wire)
        path = self._path(reducer, options)
        more = path and f", path={path}"
        compared = f"arena {self._number}, {in_place=}, wire={options.wire}{more}"
        signature = Signature(
            *("reduce an arena", op.value, self._structure.text, self._summary, destination, compared),
            *(call.name, call.where, call.place, call.step),
        )
        return ArenaPlan(reducer, (op, path, options.wire, in_place), signature, options.timeout_seconds)

    def _describe(self, reducer: Reducer, op: ReduceOp, options: CommunicationOptions) -> list[Description]:
        """Return what `all_reduce` would do, for `Strategy.explain`."""
        route = self._route(op, self._path(reducer, options), options.wire, self._in_place)
        return [
            replace(each, in_arena=len(self._packs[each.pack.members[0].index].members))
            for each in route.describe(self._communicator, self._mine)
        ]

    def _broadcast(self, reducer: Reducer, destinations: Any, call: Call) -> Any:
        """Write replica 0's arrays into everybody's, and return `values`; the caller has entered the guard's call."""
        destination = self._destination(destinations, call.where)
        self._check(reducer, call.where)
        call.structure = self._structure.text
        call.agree("broadcast an arena", values=self._summary, destination=destination, options=f"arena {self._number}")
        for bucket in self._buckets:
            broadcast_replicas(self._communicator, bucket)
        if self.is_shared:
            self._communicator.node_barrier()
        return self._values

    def _destination(self, destinations: Any, where: str) -> str:
        """Return the ranks that want a result, in words; as `mpistrategy.reduction.layout.destinations.resolve`."""
        if destinations is self or destinations is self._values:
            return EVERY_RANK_TEXT
        return resolve(destinations, self._communicator, where).text

    def _path(self, reducer: Reducer, options: CommunicationOptions) -> str:
        """Return which path is asked for, where the arena is in GPU memory; "" elsewhere."""
        return path_word(options, reducer.algorithm._device_path) if self._on_device else ""


class ArenaPlan(CallPlan):
    """The plan of an arena that is reduced where it is.  It keeps nothing of the arena, which may be closed.

    Args:
        reducer: of the strategy.
        how: the operation, the path in GPU memory, the dtype between nodes, and whether it is reduced in place.
        signature: of the call.
        timeout_seconds: how long the call may wait for the other ranks; None: as long as the strategy says.
    """

    def __init__(
        self,
        reducer: Reducer,
        how: tuple[ReduceOp, str, str | None, bool],
        signature: Signature,
        timeout_seconds: float | None,
    ) -> None:
        self._reducer, self._how = reducer, how
        self._signature, self._digest = signature, digest_of(signature)
        self._timeout = None if timeout_seconds is None else timeouts.limit(timeout_seconds)

    def run(self, call: Call, value: Arena[Any], out: Any, weight: Any) -> Any:
        """Return the arena's `values`, or the one result of the node; see `CallPlan.run`."""
        value._check(self._reducer, call.where, out)
        route = value._route(*self._how)
        memory = route.bring(value._mine)
        if self._timeout is not None:
            call.timeout = self._timeout
        call.agree_on(self._signature, self._digest, sparingly=not value._on_device)
        route.run(value._mine, memory)
        return value._values if self._how[3] else value._result


#: More than any arena has: all arrays of a dtype lie in one bucket.
_NO_LIMIT = 2**62


def laid_out(layouts: tuple[Layout, ...]) -> tuple[tuple[Pack, ...], list[tuple[int, Member]]]:
    """Return the buckets of arrays with these layouts; and for each array the number of its bucket, and its place."""
    packs = packing.plan(layouts, _NO_LIMIT, 0, _itself, None, ALIGNMENT)
    places = {m.index: (number, m) for number, pack in enumerate(packs) for m in pack.members}
    return packs, [places[index] for index in range(len(layouts))]


def _itself(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype


def buckets_for(
    communicator: Ranks, packs: Sequence[Pack], shared_result: bool, on_device: bool
) -> tuple[Replicas, ...]:
    """Return the zeroed memory of these buckets for every rank, and one result for the node where it is asked for.

    Collective.
    """
    if on_device:
        return _on_device(communicator, packs, shared_result)
    starts, total = [], 0
    for pack in packs:
        starts.append(total)
        total += aligned(pack.nbytes)
    memory = communicator.shared(total)
    is_shared, result = memory.is_shared, None
    if shared_result:
        # Each rank brings its part of the one result: the parts lie side by side.
        if is_shared:
            pages = -(-total // (len(memory.segments) * mmap.PAGESIZE))
            parts = communicator.shared(max(1, pages) * mmap.PAGESIZE)
            is_shared, result = parts.is_shared, joined(parts)
        if not is_shared:
            result = private_memory(total).mine
    buckets = []
    for pack, start in zip(packs, starts, strict=True):
        arrays = typed(memory, start, pack.size, pack.dtype)
        one = None if result is None else result[start : start + pack.nbytes].view(pack.dtype)
        if not is_shared:
            arrays = (arrays[memory.local_rank],)
        buckets.append(Replicas(arrays, memory.local_rank if is_shared else 0, is_shared, one))
    return tuple(buckets)


def _on_device(communicator: Ranks, packs: Sequence[Pack], shared_result: bool) -> tuple[Replicas, ...]:
    cupy = cupy_for("an arena in GPU memory")
    index = gpu_of(communicator.devices, communicator.rank)
    with cupy.cuda.Device(cupy.cuda.runtime.getDevice() if index is None else index):
        made = []
        for pack in packs:
            mine, *result = (communication_memory(cupy, pack.size, pack.dtype) for _ in range(1 + shared_result))
            for array in (mine, *result):
                array[...] = 0
            made.append(Replicas((mine,), result=result[0] if shared_result else None))
    return tuple(made)


def check_dtypes(buckets: Sequence[Replicas], op: ReduceOp, where: str) -> None:
    """Raise DTypeError for a MEAN of integers, which does not fit where they are, and an order of complex numbers."""
    for bucket in buckets:
        dtype = bucket.mine.dtype
        if op is ReduceOp.MEAN and dtype.kind in "iu":
            raise DTypeError.at(
                where,
                found=f"MEAN of {dtype_name(dtype)} in an arena",
                expected="a floating dtype: the mean of integers is not an integer, and does not fit into the arena",
                fix="Reduce with SUM, or pass arena.values without out=.",
            )
        check_order(dtype, op, where)
