"""`Strategy.explain`: the way that a value would take, and the copies on it.

The descriptions come from the plans that do the work.  Nothing is sent, nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import any_array
from mpistrategy.arrays.dtypes import dtype_name
from mpistrategy.arrays.values import IndexedSlices, contribution
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.reduction.arena import Arena, check_dtypes
from mpistrategy.reduction.reducer import Reducer, checked_inputs
from mpistrategy.reduction.transfer import Pack, Way

_WHERE = "Strategy.explain"


def explanation(reducer: Reducer, value: Any, reduce_op: Op, options: CommunicationOptions | None) -> str:
    """Return the text of `Strategy.explain`."""
    op, settings = ReduceOp._parse(reduce_op, _WHERE), reducer.options.merge(options)
    ranks, algorithm = reducer.communicator, reducer.algorithm
    arena = value if isinstance(value, Arena) else None
    if arena is not None:
        arena._check(reducer, _WHERE)
        value = arena.values
    leaves, structure = nest.flatten_without_none(value)
    descriptions: list[tuple[Pack, Way]] = []
    notes: list[str] = []
    if arena is not None and algorithm._works_in_place:
        check_dtypes(arena._buckets, op, _WHERE)
        descriptions = arena._describe(reducer, op, settings)
    elif leaves or not (structure.num_none or reducer.is_alone):
        components, _, _ = checked_inputs(op, leaves, lambda: nest.paths_without_none(value), _WHERE, None, None)
        descriptions, notes = algorithm._explanation(ranks, op, components, settings)
    if structure.num_none:
        notes.append(f"{structure.num_none} None: left as None, nothing is sent")
    subject = f"{op.value} of {_count(len(leaves), 'array')}, {size_in_words(sum(map(_nbytes, leaves)))}"
    where = f"{_count(ranks.size, 'rank')} of {_count(ranks.nodes, 'node')}"
    head = f"all_reduce {subject}, on {where} by {type(algorithm).__name__}"
    lines = [*_lines(descriptions), *notes, f"thresholds: {ranks.thresholds.source}"]
    return "\n  ".join([head, *lines])


def _lines(descriptions: Sequence[tuple[Pack, Way]]) -> list[str]:
    """Return two lines for the buffers of a dtype that take one way."""
    groups: dict[Any, list[Pack]] = {}
    for pack, way in descriptions:
        groups.setdefault((way, pack.dtype, len(pack.members) > 1), []).append(pack)
    lines = []
    for ((way, copies), dtype, _), group in groups.items():
        count, nbytes = sum(len(pack.members) for pack in group), sum(pack.nbytes for pack in group)
        buffers = f"{_count(count, 'array')} in {_count(len(group), 'buffer')}"
        subject = f"{buffers}, {dtype_name(dtype)}, {size_in_words(nbytes)}"
        lines += [f"{subject}: {way}", f"  copies: {', '.join(copies) or 'none'}"]
    return lines


def _nbytes(leaf: Any) -> int:
    part = contribution(leaf)
    if isinstance(part, IndexedSlices):
        return _nbytes(part.values) + _nbytes(part.indices)
    return int(any_array(part).nbytes)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
