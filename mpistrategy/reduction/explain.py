"""`Strategy.explain`: which route a value would take, and what is copied and sent on it.

Everything is asked of the plans that do the work.  Nothing is sent, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import any_array, is_on_device
from mpistrategy.arrays.dtypes import dtype_name
from mpistrategy.arrays.values import IndexedSlices, Mirrored, PerReplica, contribution
from mpistrategy.errors import EmptyBatchError
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.reduction.arena import Arena, check_dtypes
from mpistrategy.reduction.inputs import checked_leaves, checked_value, own_component
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import EVERY_RANK
from mpistrategy.reduction.reducer import Reducer
from mpistrategy.reduction.routes.base import Description

_WHERE = "Strategy.explain"
#: What is reduced by plans, and the lines about what is not.
_Found = tuple[list[Description], list[str]]


def explanation(reducer: Reducer, value: Any, reduce_op: Op, options: CommunicationOptions | None) -> str:
    """Return the text of `Strategy.explain`."""
    return "\n".join(_lines(reducer, value, ReduceOp._parse(reduce_op, _WHERE), options))


def _lines(reducer: Reducer, value: Any, op: ReduceOp, options: CommunicationOptions | None) -> Iterator[str]:
    ranks, chosen = reducer.communicator, reducer.options.merge(options)
    found: list[Description] = []
    others: list[str] = []
    if isinstance(value, Arena):
        leaves, absent = value._leaves, 0
        found, others = _of_arena(reducer, leaves, value, op, chosen)
    else:
        leaves, structure = nest.flatten_without_none(value)
        absent = structure.num_none
        if leaves or not absent:  # without leaves but None the ranks compare the call, and that is all
            found, others = _of_leaves(reducer, leaves, value, op, chosen)
    if absent:
        others.append(f"{absent} None: left as None, nothing is sent")
    size = value.nbytes if isinstance(value, Arena) else sum(map(_nbytes, leaves))
    what = f"{op.value} of {_count(len(leaves), 'array')}, {size_in_words(size)}"
    where = f"{_count(ranks.size, 'rank')} of {_count(ranks.nodes, 'node')}"
    yield f"all_reduce {what}, on {where} by {type(reducer.algorithm).__name__}"
    alike: dict[Any, list[Description]] = {}
    for each in found:
        alike.setdefault((each.way, each.copies, each.pack.dtype, len(each.pack.members) > 1), []).append(each)
    for each, *more in alike.values():
        yield f"  {_name_of([each, *more])}: {each.way}"
        total = f"{sum(amount for amount, _ in each.copies):.3g}"
        copied = f"{total} {'copy' if total == '1' else 'copies'}: {', '.join(text for _, text in each.copies)}"
        yield f"    {copied if each.copies else 'no copies'}"
    yield from (f"  {line}" for line in others)
    yield f"  thresholds: {ranks.thresholds.source}"


def _of_arena(
    reducer: Reducer, leaves: Sequence[Any], arena: Arena[Any], op: ReduceOp, options: CommunicationOptions
) -> _Found:
    arena._check(reducer, _WHERE)
    ordinary = not reducer.algorithm._in_rank_order
    if arena._in_place or not ordinary:
        check_dtypes(arena._buckets, op, _WHERE)
    if ordinary:
        return _of_leaves(reducer, leaves, arena.values, op, options)
    reduced_precision.check(options.wire)
    return arena._describe(reducer, op, options), []


def _of_leaves(
    reducer: Reducer, leaves: Sequence[Any], value: Any, op: ReduceOp, options: CommunicationOptions
) -> _Found:
    if not leaves and not reducer.is_alone:
        raise EmptyBatchError.at(_WHERE, found="an empty structure", expected="at least one array to reduce")
    values = [leaf if isinstance(leaf, Mirrored) else PerReplica((contribution(leaf),)) for leaf in leaves]
    checked_leaves(values, lambda: nest.paths_without_none(value), _WHERE)
    algorithm: Any = reducer.algorithm
    if not algorithm._is_built_in:
        return [], [algorithm.explain_implementation(op, len(leaves))]
    reduced_precision.check(options.wire)
    communicator = reducer.communicator
    parts = [checked_value(own_component(each, op, _WHERE), op, _WHERE) for each in values]
    algorithm._check_values(parts, op, _WHERE)
    placed = [part for part in parts if is_on_device(part)]
    others = []
    operation = algorithm._gpu_operation(communicator, EVERY_RANK)
    if placed and operation is None:
        size = f"{_count(len(placed), 'array')} on a GPU, {size_in_words(sum(map(_nbytes, placed)))}"
        others.append(f"{size}: copied to the host, reduced as other arrays are, and copied back")
        parts = [np.empty(part.shape, part.dtype) if is_on_device(part) else part for part in parts]
        placed = []
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    plan = algorithm._plan(communicator, packing.layouts_of(dense), op, options, EVERY_RANK)
    found = plan.route.describe(communicator, dense)
    if placed:
        found += algorithm._gpu_route(communicator, placed, op, options, operation).describe(communicator, placed)
    slices = [part for part in parts if isinstance(part, IndexedSlices)]
    if slices:
        size = size_in_words(sum(map(_nbytes, slices)))
        others.append(f"{len(slices)} IndexedSlices, {size}: gathered on all ranks by MPI")
    mirrored = sum(isinstance(part, Mirrored) for part in parts)
    if mirrored:
        others.append(f"{mirrored} Mirrored: the same everywhere, nothing is sent")
    return found, others


def _nbytes(leaf: Any) -> int:
    part = contribution(leaf)
    if isinstance(part, IndexedSlices):
        return _nbytes(part.values) + _nbytes(part.indices)
    return int(any_array(part).nbytes)


def _name_of(alike: Sequence[Description]) -> str:
    packs, count = [each.pack for each in alike], len(alike)
    nbytes = f"{dtype_name(packs[0].dtype)}, {size_in_words(sum(pack.nbytes for pack in packs))}"
    arrays, in_arena = sum(len(pack.members) for pack in packs), sum(each.in_arena for each in alike)
    if in_arena:
        return f"{_count(count, 'bucket')} of {_count(in_arena, 'array')}, {nbytes}"
    if arrays > count:
        return f"{_count(count, 'pack')} of {_count(arrays, 'array')}, {nbytes}"
    return f"{_count(count, 'array')} by {'itself' if count == 1 else 'themselves'}, {nbytes}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
