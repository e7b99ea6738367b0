"""The checks of leaves, targets and arguments, before they are reduced or passed to a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import check_places, is_on_device, like_given, reducible
from mpistrategy.arrays.dtypes import (
    Array,
    dtype_name,
    is_buffer,
    is_python_number,
    mean_dtype,
    span,
)
from mpistrategy.arrays.foreign import is_foreign
from mpistrategy.arrays.nest import Leaves, alike
from mpistrategy.arrays.values import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    contribution,
    local_component,
)
from mpistrategy.errors import (
    DTypeError,
    MpiStrategyError,
    OptionError,
    PlacementError,
    ShapeError,
    StructureError,
)
from mpistrategy.options import ReduceOp
from mpistrategy.reduction import sparse
from mpistrategy.reduction.layout.destinations import EVERY_RANK
from mpistrategy.reduction.layout.packing import Layout

#: Numbers whose results are NumPy scalars, by the dtype in which they travel.
NUMBERS: dict[type, np.dtype[Any]] = {
    float: np.dtype(np.float64),
    int: np.dtype(np.int64),
    **{kind: np.dtype(kind) for kind in (np.float64, np.float32, np.int64, np.int32)},
}


def checked_leaves(
    values: Sequence[Any], paths: Callable[[], list[str]], where: str, dense: type[MpiStrategyError] | None = None
) -> list[Any]:
    """Return the array of every leaf, or its IndexedSlices; where arrays are needed, `dense` is raised for these.

    Raises:
        LeafError, DTypeError, UnsupportedError: for what cannot be reduced; names the leaf.
    """
    try:
        return [_checked(value, "", where, dense) for value in values]
    except MpiStrategyError:
        pass  # once more, to say which leaf it is
    return [_checked(value, path, where, dense) for value, path in zip(values, paths(), strict=True)]


def _checked(value: Any, path: str, where: str, dense: type[MpiStrategyError] | None) -> Any:
    component = local_component(value)
    if not isinstance(component, IndexedSlices):
        return reducible(component, where, path)
    if dense is not None:
        raise dense.at(
            where,
            found=f"IndexedSlices at leaf {path}",
            expected="an array: with out=, with weight= and in an arena",
            fix="Use to_dense().",
        )
    return component


def arrays_of(leaves: Sequence[Any], layouts: tuple[Layout, ...] | None = None) -> list[Any] | None:
    """Return arrays on the host, numbers among them, as ndarrays; None unless all leaves are such, and can be reduced.

    A plan is made for these; all others are left to the general call, which raises the errors.  With `layouts`, those
    of a plan, they are None unless they have these dtypes and shapes.
    """
    try:
        arrays = [leaf if type(leaf) is np.ndarray else _on_host(leaf) for leaf in leaves]
    except (OverflowError, TypeError, MpiStrategyError):  # such as an int that has no such dtype
        return None
    if layouts is None or layouts == tuple([(array.dtype, array.shape) for array in arrays]):
        return arrays
    return None


def is_plain_array(leaf: Any) -> bool:
    """Return whether a leaf is NumPy's own array, of a dtype that travels as it is."""
    return type(leaf) is np.ndarray and leaf.dtype.isnative and not leaf.dtype.hasobject


def _on_host(leaf: Any) -> Array:
    kind = type(leaf)
    if kind in NUMBERS:
        return np.asarray(leaf, NUMBERS[kind])
    if not is_foreign(leaf) or is_on_device(leaf):
        raise TypeError
    return reducible(leaf, "")  # type: ignore[no-any-return]


def as_leaf(result: Any, leaf: Any) -> Any:
    """Return the result of one of the leaves of `arrays_of`: in its kind, and a NumPy scalar for a number."""
    kind = type(leaf)
    if kind is np.ndarray:
        return result
    return result[()] if kind in NUMBERS else like_given(result, leaf)


def takes(out: Any, value: Any, where: Leaves, arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Return whether `out` is a nest like `value` of ordinary arrays, of these dtypes, and of the shapes of arrays."""
    if not where.single and not alike(value, out):
        return False
    rows = zip(where.take(out), arrays, dtypes, strict=True)
    return all(type(each) is np.ndarray and (each.dtype, each.shape) == (kind, like.shape) for each, like, kind in rows)


def writable(targets: Sequence[Array]) -> bool:
    """Return whether results can be written to all these, each to another one."""
    for target in targets:
        if not target.flags.writeable:
            return False
    return len(targets) == 1 or len({*map(id, targets)}) == len(targets)


def direct(targets: Sequence[Array], arrays: Sequence[Array]) -> list[Array | None] | None:
    """Return for each array the target itself where its result may be written there while others are read.

    None for an array means that its result is copied there at the end; None instead of a list, that all are.
    """
    sources = [array for target, array in zip(targets, arrays, strict=True) if target is not array]
    # Arrays that own their memory share none with each other.
    alone = not sources and all(target.base is None for target in targets)
    if alone or _apart([*targets, *sources]):
        return [target if is_buffer(target) else None for target in targets]
    return None


def _apart(arrays: Sequence[Array]) -> bool:
    """Return whether no two arrays reach into the same span of memory."""
    if len(arrays) == 2:
        return not np.may_share_memory(arrays[0], arrays[1])  # the same, in a fifth of the time
    spans = sorted(span(array) for array in arrays if array.size)
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def unpacked(value: Any) -> Any:
    """Return a nest with this rank's components in place of the containers that have one here."""
    leaves, structure = nest.flatten(value)
    if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return value
    return structure.pack([*map(_own_part, leaves)])


def _own_part(leaf: Any) -> Any:
    return leaf.values[0] if isinstance(leaf, DistributedValues) and leaf.values else leaf


def unwrapped(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """Replace the containers among the arguments by this rank's components; leave arguments without any alone."""

    def component(argument: Any) -> Any:
        for leaf in nest.flatten(argument)[0]:
            if isinstance(leaf, Mirrored) and leaf._lives_on != EVERY_RANK.text:
                raise PlacementError.at(
                    "an argument", found=f"a value that lives on {leaf._lives_on} only", expected="one on every rank"
                )
        return unpacked(argument)

    return [component(argument) for argument in args], {key: component(value) for key, value in (kwargs or {}).items()}


def leaves_like(out: Any, structure: nest.Structure, where: str) -> list[Any] | None:
    """Return the leaves of a nest for results; None without one.

    Raises:
        StructureError: when its structure is another one.
    """
    if out is None:
        return None
    leaves, found = nest.flatten_without_none(out)
    if found.text != structure.text:
        raise StructureError.at(where, found=f"out with structure {found.text}", expected=f"structure {structure.text}")
    return leaves


def check_target(target: Any, value: Any, op: ReduceOp, where: str) -> None:
    if is_on_device(target) or is_on_device(value):
        check_places([value, target], where)
    dtype = mean_dtype(value.dtype) if op is ReduceOp.MEAN else value.dtype
    if target.shape != value.shape or target.dtype.newbyteorder("=") != dtype:
        raise ShapeError.at(
            where,
            found=f"{dtype_name(target.dtype)}{list(target.shape)}",
            expected=f"{dtype_name(dtype)}{list(value.shape)}, as the result",
        )


def as_given(result: Any, value: Any) -> Any:
    """Return a 0-d result as a NumPy scalar where the input was a scalar or a number."""
    scalar = isinstance(value, np.generic) or is_python_number(value)
    return result[()] if scalar and isinstance(result, np.ndarray) and result.ndim == 0 else result


def in_kind(result: Any, given: Any) -> Any:
    """Return a result as the kind of array, or of slices, that was given; None on ranks that want none."""
    if result is None:
        return None
    if isinstance(result, IndexedSlices) and isinstance(given, IndexedSlices):
        return IndexedSlices(
            like_given(result.values, given.values), like_given(result.indices, given.indices), result.dense_shape
        )
    return like_given(result, given)


def refuse_mirrored_sum(value: Any, op: ReduceOp, where: str) -> None:
    """Raise OptionError for a Mirrored value under SUM or PROD: is it one value, or one of each replica?"""
    if isinstance(value, Mirrored) and op in (ReduceOp.SUM, ReduceOp.PROD):
        raise OptionError.at(
            where,
            found=f"a Mirrored value under {op.name}",
            expected="a value that each replica contributes",
            fix="A Mirrored value is the same everywhere: use MEAN (it is itself), or multiply it by the number of "
            "replicas.",
        )


def own_component(value: Any, op: ReduceOp, where: str) -> Any:
    """Return this rank's component as the caller gave it; OptionError as `refuse_mirrored_sum`."""
    refuse_mirrored_sum(value, op, where)
    return value if isinstance(value, Mirrored) else contribution(value)


def checked_value(value: Any, op: ReduceOp, where: str) -> Any:
    """Return a component as what `op` can reduce: an array, IndexedSlices, or the value itself when it is Mirrored.

    Raises:
        LeafError, DTypeError, UnsupportedError, ShapeError: for what cannot be.
    """
    if isinstance(value, Mirrored):
        return value
    if isinstance(value, IndexedSlices):
        return sparse.checked(value, op, where)
    array = reducible(value, where)
    check_order(array.dtype, op, where)
    return array


def check_order(dtype: np.dtype[Any], op: ReduceOp, where: str) -> None:
    """Raise DTypeError for MIN and MAX of complex numbers."""
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.kind == "c":
        raise DTypeError.at(
            where,
            found=f"{op.name} of {dtype_name(dtype)}",
            expected="numbers that have an order",
            fix="Reduce the magnitudes: np.abs(x).",
        )
