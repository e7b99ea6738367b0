"""The checks of leaves, targets, destinations and arguments, before they are reduced or passed to a function.

A destination is where a reduced value goes: the ranks that a device string, a value, a variable or a list of devices
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrategy.arrays import devices, nest
from mpistrategy.arrays.convert import (
    array_where_it_is,
    as_device_array,
    check_places,
    host_array,
    is_foreign,
    is_on_device,
    layout_of,
    like_given,
    reducible,
)
from mpistrategy.arrays.dtypes import Array, dtype_name, is_python_number, mean_dtype
from mpistrategy.arrays.nest import Structure
from mpistrategy.arrays.values import (
    ArrayLike,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    contribution,
    local_component,
)
from mpistrategy.errors import (
    DestinationError,
    DeviceError,
    DTypeError,
    MpiStrategyError,
    OptionError,
    PlacementError,
    ShapeError,
    StructureError,
    UnsupportedError,
)
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.gpu import move
from mpistrategy.reduction.transfer import Layout

#: Numbers whose results are NumPy scalars, by the dtype in which they travel.
NUMBERS: dict[type, np.dtype[Any]] = {
    float: np.dtype(np.float64),
    int: np.dtype(np.int64),
    **{kind: np.dtype(kind) for kind in (np.float64, np.float32, np.int64, np.int32)},
}

_is_writeable = attrgetter("flags.writeable")


def checked_leaves(
    values: Sequence[Any],
    paths: Callable[[], list[str]],
    where: str,
    dense: type[MpiStrategyError] | None = None,
    op: ReduceOp | None = None,
) -> list[Any]:
    """Return each leaf as what `op`, or some operation, can reduce; see `checked_value`.

    Raises:
        LeafError, DTypeError, UnsupportedError: for values that cannot be reduced; names the leaf.
    """
    try:
        return [checked_value(value, where, op, "", dense) for value in values]
    except MpiStrategyError:
        pass  # once more, to say which leaf it is
    return [checked_value(value, where, op, path, dense) for value, path in zip(values, paths(), strict=True)]


def checked_value(
    value: Any, where: str, op: ReduceOp | None = None, path: str = "", dense: type[MpiStrategyError] | None = None
) -> Any:
    """Return a value as what `op` can reduce: its array, or its IndexedSlices.

    Args:
        value: of this rank.
        where: the public name in the error.
        op: the operation; None: not known yet.
        path: how the leaf is reached in the caller's structure.
        dense: is raised for IndexedSlices.

    Raises:
        LeafError, DTypeError, UnsupportedError, ShapeError: for values that cannot be reduced.
    """
    component = local_component(value)
    if not isinstance(component, IndexedSlices):
        array = reducible(component, where, path)
        check_order(array.dtype, op, where)
        return array
    if dense is not None:
        raise dense.at(
            where,
            found=f"IndexedSlices at leaf {path}",
            expected="an array: with out=, with weight= and in an arena",
            fix="Use to_dense().",
        )
    return component if op is None else checked_slices(component, op, where)


def arrays_of(leaves: Sequence[Any], layouts: tuple[Layout, ...] | None = None) -> list[Any] | None:
    """Return arrays on the host, numbers among them, as ndarrays; None where a leaf is neither or cannot be reduced.

    A plan is made for these arrays; other values are left to the general call, which raises the errors.  With the
    `layouts` of a plan, the result is None unless the arrays have these dtypes and shapes.
    """
    try:
        arrays = [leaf if type(leaf) is np.ndarray else _on_host(leaf) for leaf in leaves]
    except (OverflowError, TypeError, MpiStrategyError):  # such as an int that has no such dtype
        return None
    fits = layouts is None or layouts == tuple([(array.dtype, array.shape) for array in arrays])
    return arrays if fits else None


def _on_host(leaf: Any) -> Array:
    kind = type(leaf)
    if kind in NUMBERS:
        return np.asarray(leaf, NUMBERS[kind])
    if not is_foreign(leaf) or is_on_device(leaf):
        raise TypeError
    return reducible(leaf, "")  # type: ignore[no-any-return]


def takes(out: Any, where: Structure, arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Return whether `out` is such a nest of arrays like these, of these dtypes."""
    structure = nest.leaves_of(out)
    if structure is None or structure.text != where.text:
        return False
    rows = zip(where.take(out), arrays, dtypes, strict=True)
    return all(
        type(target) is type(like) and (target.dtype, target.shape) == (kind, like.shape) for target, like, kind in rows
    )


def writable(targets: Sequence[Array]) -> bool:
    """Return whether results can be written to all targets, and no target occurs twice."""
    if len(targets) == 1:
        return targets[0].flags.writeable
    return all(map(_is_writeable, targets)) and len({*map(id, targets)}) == len(targets)


def unpacked(value: Any) -> Any:
    """Return a nest with this rank's components in place of containers with a component here."""
    if isinstance(value, DistributedValues):
        return own_part(value)
    leaves, structure = nest.flatten(value)
    if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return value
    return structure.pack([*map(own_part, leaves)])


def own_part(leaf: Any) -> Any:
    """Return this rank's component of a container that has one here; anything else as it is."""
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
        StructureError: when its structure differs.
    """
    if out is None:
        return None
    leaves, out_structure = nest.flatten_without_none(out)
    if out_structure.text != structure.text:
        raise StructureError.at(
            where, found=f"out with structure {out_structure.text}", expected=f"structure {structure.text}"
        )
    return leaves


def checked_target(target: Any, value: Any, op: ReduceOp, where: str) -> Any:
    """Return an array for the result of a value; ShapeError for another shape or dtype than the result's."""
    if is_on_device(target) or is_on_device(value):
        check_places([value, target], where)
    dtype = mean_dtype(value.dtype) if op is ReduceOp.MEAN else value.dtype
    if target.shape != value.shape or target.dtype.newbyteorder("=") != dtype:
        raise ShapeError.at(
            where,
            found=f"{dtype_name(target.dtype)}{list(target.shape)}",
            expected=f"{dtype_name(dtype)}{list(value.shape)}, as the result",
        )
    return target


def in_kind(result: Any, like: Any) -> Any:
    """Return a result in the kind of `like`: a number, an array of its library, or slices; None where there is none."""
    kind = type(like)
    if kind is np.ndarray or result is None:
        return result
    if kind in NUMBERS or isinstance(like, np.generic) or is_python_number(like):
        return result[()] if type(result) is np.ndarray else result
    if isinstance(result, IndexedSlices) and isinstance(like, IndexedSlices):
        parts = like_given(result.values, like.values), like_given(result.indices, like.indices)
        return IndexedSlices(*parts, result.dense_shape)
    return like_given(result, like)


def own_component(value: Any, op: ReduceOp, where: str) -> Any:
    """Return this rank's component, a Mirrored value as it is.

    Raises:
        OptionError: for a Mirrored value under SUM or PROD: is it one value, or a value of each replica?
    """
    if isinstance(value, Mirrored) and op in (ReduceOp.SUM, ReduceOp.PROD):
        raise OptionError.at(
            where,
            found=f"a Mirrored value under {op.name}",
            expected="a value that each replica contributes",
            fix="A Mirrored value is the same everywhere: use MEAN (it is itself), or multiply it by the number of "
            "replicas.",
        )
    return value if isinstance(value, Mirrored) else contribution(value)


def check_order(dtype: np.dtype[Any], op: ReduceOp | None, where: str) -> None:
    """Raise DTypeError for MIN and MAX of complex numbers."""
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.kind == "c":
        raise DTypeError.at(
            where,
            found=f"{op.name} of {dtype_name(dtype)}",
            expected="numbers that have an order",
            fix="Reduce the magnitudes: np.abs(x).",
        )


def checked_slices(slices: IndexedSlices, op: ReduceOp, where: str) -> IndexedSlices:
    """Return `slices` with arrays for values and indices.

    Raises:
        ShapeError: when there is not one index for each row of values.
        DTypeError: for indices that are no integers.
        UnsupportedError: for an operation other than SUM and MEAN.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError.at(
            where, found=f"{op.name} of IndexedSlices", expected="SUM or MEAN", fix="Use to_dense()."
        )
    values = reducible(slices.values, where, ".values")
    indices = array_where_it_is(slices.indices, where, ".indices")
    if indices.dtype.kind not in "iu":
        raise DTypeError.at(where, found=f"indices of dtype {dtype_name(indices.dtype)}", expected="integer indices")
    shape: Any = (0,) if slices.dense_shape is None else slices.dense_shape
    is_shape = np.ndim(shape) == 1 and host_array(shape).dtype.kind in "iu"
    if values.ndim == 0 or indices.shape != values.shape[:1] or not is_shape:
        raise ShapeError.at(
            where,
            found=f"IndexedSlices with values {values.shape}, indices {indices.shape}, {slices.dense_shape=!r:.60}",
            expected="one index for each row of values, and a dense_shape of ints or None",
        )
    return IndexedSlices(values, indices, slices.dense_shape)


def layout_of_slices(slices: IndexedSlices) -> tuple[str, tuple[int, ...]]:
    """Return what must be equal on all ranks: dtypes and the rows' shape, not the number of rows."""
    dense = "?" if slices.dense_shape is None else str([int(n) for n in host_array(slices.dense_shape)])
    kinds = [layout_of(part)[0] for part in (slices.values, slices.indices)]
    return f"IndexedSlices<{','.join(kinds)},{dense}>", slices.values.shape[1:]


def write(results: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy results into arrays of their dtypes and shapes: arrays in GPU memory all at once, on the current stream."""
    on_gpu: list[tuple[Any, Any]] = []
    for result, target in zip(results, targets):  # noqa: B905  # `strict` takes as long as a copy
        if is_on_device(target):
            on_gpu.append((as_device_array(result, "a result in GPU memory"), target))
        elif result is not target:
            target[...] = host_array(result)
    if on_gpu:
        with on_gpu[0][0].device:
            move(*zip(*on_gpu, strict=True))


# ------------------------------------------------------------------------------------------------- destinations


@dataclass(frozen=True)
class Destination:
    """The ranks on which a result lives.

    Attributes:
        ranks: in rising order; None means every rank.
        is_here: whether this rank is one of them.
    """

    ranks: tuple[int, ...] | None = None
    is_here: bool = True

    @cached_property
    def text(self) -> str:
        """The same words on every rank."""
        return "every rank" if self.ranks is None else f"rank {', '.join(map(str, self.ranks))}"

    @property
    def only_rank(self) -> int | None:
        """The single rank on which the result lives, or None when there are several."""
        return self.ranks[0] if self.ranks is not None and len(self.ranks) == 1 else None

    def mirrored(self, values: Sequence[Any]) -> Iterable[Mirrored]:
        """Wrap results that live on these ranks."""
        return map(Mirrored, zip(values) if self.is_here else repeat((), len(values)), repeat(self.text))


EVERY_RANK = Destination()


def for_value(value: Any, destinations: Any) -> Any:
    """Return `destinations`, or a value that means every rank if `destinations` is a number, or a nest, like `value`.

    A number alone says nothing: 0 might be meant as rank 0.
    """
    if destinations is None or (nest.flatten(destinations)[1] is nest.LEAF and not _is_number(destinations)):
        return destinations
    (leaves_of_destinations, structure_of_destinations), (leaves_of_value, structure_of_value) = (
        nest.flatten(destinations),
        nest.flatten(value),
    )
    are_numbers = [*map(_is_number, leaves_of_destinations)] == [
        *map(_is_number, map(local_component, leaves_of_value))
    ]
    is_like = (
        structure_of_destinations.text == structure_of_value.text
        and are_numbers
        and not any(isinstance(leaf, str) for leaf in leaves_of_destinations)
    )
    return PerReplica((0,)) if is_like else destinations


def _is_number(value: Any) -> bool:
    return isinstance(value, bool) or is_python_number(value)


def resolve(destinations: Any, communicator: Ranks, where: str) -> Destination:
    """Return the ranks that `destinations` names.

    Args:
        destinations: a device string (``"task:1"``, ``"CPU:0"``, a full one), a list of these, or a value or variable,
            which stands for every rank and is never changed.

    Raises:
        DestinationError: for anything else, including None and the empty string.
        DeviceError: for a device that no rank of this communicator drives.
    """
    kinds = (ArrayLike, IndexedSlices, np.ndarray, np.generic)
    is_value = isinstance(destinations, kinds) or is_on_device(destinations) or is_foreign(destinations)
    if is_value and not isinstance(destinations, str):  # np.str_ is both
        return EVERY_RANK
    texts = [destinations] if isinstance(destinations, str) else destinations
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise DestinationError.at(
            where,
            found=f"destinations={destinations!r}",
            expected="a device string, a list of device strings, a value or a variable",
            fix="Pass the value itself to have the result on every rank, or 'task:0' to have it on rank 0.",
        )
    ranks = {rank for text in texts for rank in ranks_of(text, communicator, where)}
    if len(ranks) == communicator.size:
        return EVERY_RANK
    return Destination(tuple(sorted(ranks)), communicator.rank in ranks)


def ranks_of(text: str, communicator: Ranks, where: str) -> list[int]:
    """Return the ranks whose device matches a device string.

    Raises:
        DeviceError: when there are none, or the string cannot be read.
    """
    pattern = devices.parse(text, where, "destinations")
    ranks = [rank for rank, device in enumerate(communicator.devices) if pattern.matches(device)]
    if not ranks:
        names = sorted({str(device) for device in communicator.devices})
        text_of_names = ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
        raise DeviceError.at(where, found=f"device {text!r}", expected=f"one of {text_of_names}")
    return ranks
