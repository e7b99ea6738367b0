"""Arenas: nests of arrays that live in memory which the ranks of a node share, so that reducing them copies nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.values import contribution
from mpistrategy.errors import ContextError, CopyError, EmptyBatchError, OptionTypeError, StructureError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.reduction.arena.layout import belongs_on_device, buckets_for, laid_out, layouts_of
from mpistrategy.reduction.arena.plan import ArenaReductions
from mpistrategy.reduction.arena.unchanged import UnchangedNest
from mpistrategy.reduction.reducer import Reducer


class _Extended(Protocol):
    bucket_orders: dict[tuple[tuple[int, ...], ...], None]

    @property
    def reducer(self) -> Reducer: ...


class _Strategy(Protocol):
    @property
    def extended(self) -> _Extended: ...


class Arena(ArenaReductions):
    """A nest of arrays that the strategy lays out, and reduces where they are.  Creation is collective.

    `Strategy.arena` makes one.  Fill `values` in place (``np.multiply(a, b, out=arena.values["w"])``,
    ``arena.values["b"][...] = x``), then pass the arena itself: ``context.all_reduce("SUM", arena)``.  On a node no
    array is copied: each rank combines its share of all ranks' arrays.

    Args:
        strategy: the strategy whose ranks take part.
        like: a nest of arrays, numbers and variables: their structure, shapes and dtypes count.
        shared_result: all ranks of a node get the same memory as result, read-only, and `values` stay as they are;
            it holds until the next reduction of this arena.  Else the result is written over `values`.

    Attributes:
        strategy: the strategy.
        buckets: for each dtype, one flat array of every rank of the node; in the order of the first array of each.
        places: where each array lies, in the order of the leaves.
        leaves: the arrays, in order.
        in_place: whether results are written over `values`.
        communicator: the ranks.

    Raises:
        EmptyBatchError: for a structure without arrays.
        DTypeError, LeafError: for what cannot be reduced.
        CollectiveMismatchError: when the ranks' structures, shapes or dtypes differ.
    """

    def __init__(self, strategy: _Strategy, like: Any, shared_result: bool = False) -> None:
        self.strategy = strategy
        reducer = strategy.extended.reducer
        self.communicator = communicator = reducer.communicator
        with Call(communicator.guard, "Strategy.arena") as call:
            if not isinstance(shared_result, bool):
                raise OptionTypeError.at(call.where, found=f"shared_result={shared_result!r}", expected="a bool")
            given, self._structure = nest.flatten(like)
            call.structure = self._structure.text
            if not given:
                raise EmptyBatchError.at(call.where, found="an empty structure", expected="at least one array")
            layouts = layouts_of(given, like, call.where)
            #: Whether it is in GPU memory.
            self.on_device = belongs_on_device(communicator, list(map(contribution, given)))
            call.agree(
                "make an arena",
                values=tuple((dtype_name(dtype), shape) for dtype, shape in layouts),
                options=f"shared_result={shared_result}{', on a GPU' if self.on_device else ''}",
            )
            call.expect_more()
            self.places, dtypes, sizes = laid_out(layouts)
            self.buckets = buckets_for(communicator, dtypes, sizes, shared_result, self.on_device)
            call.agree("use an arena")  # no rank has run out of memory
        self._number = reducer.next_arena_number()
        self._summary = tuple((dtype_name(dtype), (size,)) for dtype, size in zip(dtypes, sizes, strict=True))
        self.leaves = self._views([bucket.mine for bucket in self.buckets])
        self._nest = UnchangedNest(self._structure, self.leaves)
        self._values = self._nest.value
        self.in_place = not shared_result
        self.is_unchanged = self._nest.is_unchanged
        #: What an all-reduce returns.
        self.result = self._values if self.in_place else self._structure.pack(self._result_views())
        #: Its plans, kept by `mpistrategy.reduction.plans`.
        self.plans: dict[Any, Any] = {}
        self.shares: list[Any] = []
        self._closed = False
        resident_values[id(self._values)] = weakref.ref(self, _forgetting(id(self._values)))

    # ------------------------------------------------------------------------------------------- what it holds

    @property
    def values(self) -> Any:
        """The nest of this rank's arrays, to be written in place; zeros at first.

        Raises:
            ContextError: after `close`.
        """
        self._require_open("Arena.values")
        return self._values

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of the node see each other's arrays; else everything works as for other arrays."""
        return all(bucket.is_shared for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, and of the gaps that align them."""
        return sum(bucket.mine.nbytes for bucket in self.buckets)

    def __contains__(self, array: object) -> bool:
        """Return whether `array` is one of the arena's, where the arena put it: by itself, or another view of it."""
        if any(array is leaf for leaf in self.leaves):
            return True
        if self.on_device or not isinstance(array, np.ndarray):
            return False
        layout = array.__array_interface__
        return any(
            array.shape == leaf.shape
            and array.dtype == leaf.dtype
            and layout["data"][0] == leaf.__array_interface__["data"][0]
            and layout["strides"] is None
            for leaf in self.leaves
        )

    def __repr__(self) -> str:
        if self._closed:
            return f"<Arena {self._number}, closed>"
        size, count = f"{self.nbytes / 2**20:.1f} MiB", len(self.leaves)
        memory = f"shared by {len(self.buckets[0].arrays)} ranks" if self.is_shared else "of this rank alone"
        memory = "on a GPU" if self.on_device else memory
        return f"<Arena {self._number}: {count} arrays in {len(self.buckets)} buckets, {size} {memory}>"

    def __copy__(self) -> NoReturn:
        raise self._no_copy()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise self._no_copy()

    def __reduce__(self) -> NoReturn:
        raise self._no_copy()

    def _no_copy(self) -> CopyError:
        return CopyError.at(
            "copying or pickling an Arena",
            found="a copy of memory that all ranks share",
            expected="a new arena, which all ranks make together",
            fix="Copy the arrays in arena.values, or call strategy.arena(arena.values).",
        )

    # --------------------------------------------------------------------------------------------- its life

    def close(self) -> None:
        """Give the memory back, as soon as no array in it is in use.  Collective; the arena cannot be used afterwards.

        Arrays that are held elsewhere stay as they are.
        """
        if self._closed:
            return
        guard = self.communicator.guard
        if not guard.closed:
            with Call(guard, "Arena.close", anywhere=True) as call:
                call.agree("close an arena", options=f"arena {self._number}")
        self._closed = True
        self.plans.clear()
        self.shares.clear()
        resident_values.pop(id(self._values), None)
        self.buckets, self.leaves, self._values, self.result = (), [], None, None
        del self._nest, self.is_unchanged

    # -------------------------------------------------------------------------------------------------- checks

    def check(self, reducer: Reducer, where: str) -> None:
        """Raise unless a strategy can reduce the arena as it is.

        Raises:
            ContextError, OptionTypeError, StructureError: see `all_reduce`.
        """
        self._require_open(where)
        if reducer.communicator is not self.communicator:
            raise OptionTypeError.at(
                where, found="an arena of another strategy", expected="one that this strategy's arena() made"
            )
        if not self.is_unchanged():
            raise StructureError.at(
                where,
                found="other arrays in arena.values than the arena's own",
                expected="values that were written in place",
                fix="Write arena.values[key][...] = x, or pass out=arena.values[key] to NumPy's functions.",
            )

    def _require_open(self, where: str) -> None:
        if self._closed:
            raise ContextError.at(where, found="an arena after its close()", expected="an open arena")

    def _views(self, flat: Sequence[Array]) -> list[Array]:
        return [place.view(flat[place.bucket]) for place in self.places]

    def _result_views(self) -> list[Array]:
        views = self._views([bucket.result for bucket in self.buckets if bucket.result is not None])
        if not self.on_device:  # CuPy has no read-only arrays
            for view in views:
                view.flags.writeable = False
        return views


#: The arenas that are in use, by the identity of their `values`: ``id(x) in resident_values`` is quick.
resident_values: dict[int, weakref.ref[Arena]] = {}


def _forgetting(identity: int) -> Callable[[weakref.ref[Arena]], None]:
    def forget(arena: weakref.ref[Arena]) -> None:
        if resident_values.get(identity) is arena:  # else it was closed, and the number is another one's now
            del resident_values[identity]

    return forget


def resident(value: Any, out: Any) -> Arena | None:
    """Return the arena in which ``all_reduce(op, value, out=out)`` can be done where the arrays are; else None.

    It is `value` itself, or the one whose `values` both `value` and `out` are.
    """
    if type(value) is Arena:
        return value
    if out is None or value is not out:
        return None
    found = resident_values.get(id(value))
    arena = None if found is None else found()
    return arena if arena is not None and arena._values is value else None


def has_arenas(pairs: Any) -> bool:
    """Return whether `pairs` is a list of (value, destinations) tuples, and some of the values are arenas."""
    if not isinstance(pairs, (list, tuple)):
        return False
    sound = [pair[0] for pair in pairs if type(pair) is tuple and len(pair) == 2]
    return len(sound) == len(pairs) and any(type(value) is Arena for value in sound)
