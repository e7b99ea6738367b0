"""`Strategy.explain`: which route a value would take, what is copied and sent on it, and about how long it would take.

Everything is asked of the objects that do the work.  Nothing is sent, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import any_array, is_on_device
from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype
from mpistrategy.arrays.values import IndexedSlices, Mirrored, PerReplica, contribution
from mpistrategy.errors import EmptyBatchError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.mpi.tuning.thresholds import Rates
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction.arena.arena import Arena
from mpistrategy.reduction.arena.layout import check_dtypes
from mpistrategy.reduction.explain_ways import (
    Buffer,
    Ground,
    in_words,
    lines_of,
    seconds_of,
    size_in_words,
    time_in_words,
)
from mpistrategy.reduction.inputs import checked_component, checked_leaves
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import EVERY_RANK, Destination
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.plan import Plan
from mpistrategy.reduction.reducer import Reducer
from mpistrategy.reduction.routes.in_place import is_in_place, is_seen_across


class _BuiltIn(Protocol):
    """An algorithm whose `is_built_in` is True; see `mpistrategy.cross_device_ops.built_in`."""

    num_packs: float
    device_path: str
    reduces_on_devices: bool

    def check_values(self, values: Sequence[Any], op: ReduceOp, where: str) -> None: ...

    def plan(
        self,
        communicator: Communicator,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Plan: ...


class _Extended(Protocol):
    """What is asked of a StrategyExtended."""

    bucket_orders: dict[tuple[tuple[int, ...], ...], None]

    @property
    def reducer(self) -> Reducer: ...


_WHERE = "Strategy.explain"


class Explained:
    """The methods of `Strategy` that tell how it communicates."""

    if TYPE_CHECKING:

        @property
        def extended(self) -> _Extended: ...

    def explain(self, value: Any, reduce_op: Any = "SUM", options: CommunicationOptions | None = None) -> str:
        """Say which route an all_reduce of `value` would take: in any context, on any number of ranks; nothing is sent.

        Args:
            value: what would be reduced: a nest of arrays, numbers and variables, or an `Arena`.
            reduce_op: a ReduceOp, or its name.
            options: hints; None for the strategy's own.

        Returns:
            The text, which replica 0 also prints: the buffers that are made of the value, the way that each takes,
            what is copied, what each rank writes or sends, where the thresholds come from, and the expected time.

        Raises:
            ReduceOpError, DTypeError, LeafError, EmptyBatchError, ContextError: as all_reduce, but on this rank alone.

        >>> import numpy as np, mpistrategy as ms
        >>> text = ms.OneDeviceStrategy("CPU:0").explain([np.ones(3), 2.0])
        all_reduce SUM of 2 arrays, 32 bytes, on 1 rank of 1 node by MpiAllReduce; about 2.5 us
          1 pack of 2 arrays, float64, 32 bytes: stays here, the only replica
            1 copy: all into the pack
          thresholds: the defaults; rates: the defaults
        """
        text = "\n".join(_lines(self.extended.reducer, value, ReduceOp.parse(reduce_op, _WHERE), options))
        if self.extended.reducer.communicator.rank == 0:
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
        communicator, algorithm = extended.reducer.communicator, extended.reducer.algorithm
        return {
            "ranks": communicator.size,
            "node_of": list(communicator.node_of),
            "mpi": communicator.library,
            "shared_memory": communicator.shares_memory,
            "algorithm": getattr(algorithm, "configuration", type(algorithm).__name__),
            "bytes_per_pack": int(extended.reducer.options.bytes_per_pack),
            "wire": extended.reducer.options.wire,
            "thresholds": communicator.thresholds.sizes(),
            "gradient_buckets": [[list(members) for members in order] for order in extended.bucket_orders],
            "source": communicator.thresholds.source,
        }


@dataclass
class _Found:
    """What a value consists of."""

    leaves: Sequence[Any]
    buffers: list[Buffer]
    nbytes: int
    others: list[str]


def _lines(reducer: Reducer, value: Any, op: ReduceOp, options: CommunicationOptions | None) -> Iterator[str]:
    communicator, chosen = reducer.communicator, reducer.options.merge(options)
    if isinstance(value, Arena):
        found = _of_arena(reducer, value, op, chosen)
    else:
        leaves = nest.flatten(value)[0]
        found = _of_leaves(reducer, leaves, value, op, chosen)
    ground = Ground.of(communicator)
    ranks = f"{_count(ground.size, 'rank')} of {_count(ground.nodes, 'node')}"
    seconds = seconds_of(found.buffers, ground)
    about = "" if found.others and not found.buffers else f"; about {time_in_words(seconds)}"
    what = f"{op.value} of {_count(len(found.leaves), 'array')}, {size_in_words(found.nbytes)}"
    yield f"all_reduce {what}, on {ranks} by {type(reducer.algorithm).__name__}{about}"
    for alike in _grouped(found.buffers):
        way, copies, moved = in_words(alike, ground)
        yield f"  {_named(alike)}: {way}"
        yield from (f"    {line}" for line in (copies, moved) if line)
    yield from (f"  {line}" for line in found.others)
    paths = communicator.thresholds
    yield f"  thresholds: {paths.source}; rates: {'the defaults' if paths.rates == Rates() else paths.source}"


def _of_arena(reducer: Reducer, arena: Arena, op: ReduceOp, options: CommunicationOptions) -> _Found:
    arena.check(reducer, _WHERE)
    ordinary = arena.is_ordinary(reducer)
    if arena.in_place or not ordinary:
        check_dtypes(arena.buckets, op, _WHERE)
    if ordinary:
        return _of_leaves(reducer, arena.leaves, arena.values, op, options)
    reduced_precision.check(options.wire)
    communicator = reduced_precision.on(reducer.communicator, options.wire)
    if arena.on_device:
        lines = lines_of(communicator, arena.leaves, arena.path(reducer, options), options)
        return _Found(arena.leaves, [], arena.nbytes, [line.replace("packed on", "ready on") for line in lines])
    counts = [sum(place.bucket == number for place in arena.places) for number in range(len(arena.buckets))]
    buffers = []
    for count, bucket in zip(counts, arena.buckets, strict=True):
        dtype, wide = bucket.mine.dtype, host_wire_dtype(bucket.mine.dtype)
        buffer = Buffer("bucket", dtype, bucket.mine.nbytes, count, "arena", in_place=arena.in_place)
        if not is_in_place(communicator, bucket):
            nbytes = bucket.mine.size * wide.itemsize
            way = communicator.route(nbytes, wide, op.on_the_wire)
            converted = wide != dtype and way != "none"
            seen = is_seen_across(communicator, bucket, op.on_the_wire)
            buffer = replace(
                buffer, dtype=wide if converted else dtype, nbytes=nbytes, way=way, converted=converted, is_seen=seen
            )
        buffers.append(buffer)
    return _Found(arena.leaves, buffers, arena.nbytes, [])


def _of_leaves(
    reducer: Reducer, leaves: Sequence[Any], value: Any, op: ReduceOp, options: CommunicationOptions
) -> _Found:
    if not leaves and not reducer.is_alone:
        raise EmptyBatchError.at(_WHERE, found="an empty structure", expected="at least one array to reduce")
    values = [leaf if isinstance(leaf, Mirrored) else PerReplica((contribution(leaf),)) for leaf in leaves]
    checked_leaves(values, lambda: nest.leaf_paths(value), False, _WHERE)
    algorithm = cast(_BuiltIn, reducer.algorithm)
    if not reducer.algorithm.is_built_in:
        nbytes = sum(any_array(contribution(leaf)).nbytes for leaf in leaves if not isinstance(leaf, IndexedSlices))
        return _Found(leaves, [], nbytes, [f"what {type(algorithm).__name__} does with them is its own business"])
    reduced_precision.check(options.wire)
    communicator = reduced_precision.on(reducer.communicator, options.wire)
    parts = [checked_component(each, op, _WHERE) for each in values]
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    algorithm.check_values(parts, op, _WHERE)
    route = algorithm.plan(communicator, packing.layouts_of(dense), op, options, EVERY_RANK).route
    buffers = [_buffer(pack, dense, name) for pack, name in zip(route.packs, route.describe(), strict=True)]
    rounds = getattr(communicator, "rounds", False)
    buffers = [replace(each, rounds=rounds) for each in buffers if each.nbytes]
    slices = [part for part in parts if isinstance(part, IndexedSlices)]
    sparse = sum(part.values.nbytes + part.indices.nbytes for part in slices)
    others = [f"{len(slices)} IndexedSlices, {size_in_words(sparse)}: gathered on all ranks by MPI"] if slices else []
    placed = [part for part in parts if is_on_device(part)]
    word = path_word(options, algorithm.device_path) if placed and algorithm.reduces_on_devices else None
    others += lines_of(communicator, placed, word, options, algorithm.num_packs)
    mirrored = len(parts) - len(dense) - len(slices) - len(placed)
    if mirrored:
        others.append(f"{mirrored} Mirrored: the same everywhere, nothing is sent")
    return _Found(leaves, buffers, sum(array.nbytes for array in (*dense, *placed)) + sparse, others)


def _buffer(pack: packing.Pack, arrays: Sequence[Array], way: str) -> Buffer:
    return Buffer(
        "pack" if len(pack.members) > 1 else "array",
        pack.dtype,
        pack.nbytes,
        len(pack.members),
        way,
        is_copy=way == "root" or not pack.is_array(arrays),
        converted=any(arrays[member.index].dtype != pack.dtype for member in pack.members),
    )


def _grouped(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    alike: dict[Buffer, list[Buffer]] = {}
    for buffer in buffers:
        alike.setdefault(replace(buffer, nbytes=0, arrays=0), []).append(buffer)
    yield from alike.values()


def _named(alike: Sequence[Buffer]) -> str:
    first, arrays = alike[0], sum(each.arrays for each in alike)
    nbytes = f"{dtype_name(first.dtype)}, {size_in_words(sum(each.nbytes for each in alike))}"
    if first.kind == "array":
        return (
            f"{_count(len(alike), 'array')} by itself, {nbytes}"
            if len(alike) == 1
            else (f"{len(alike)} arrays by themselves, {nbytes}")
        )
    return f"{_count(len(alike), first.kind)} of {_count(arrays, 'array')}, {nbytes}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
