"""The route of values that a function of the program's puts together: all ranks' copies meet on one rank.

The function gets all copies of a value at once, so that rank must hold them.  It holds those of one pack at a time, and
packs are so small that their copies are no more than some hundred MiB, unless those of a single value are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by, dtype_name
from mpistrategy.errors import DTypeError, OptionWarning, ShapeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory import memory_limits
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.base import Description, Targets, grouped
from mpistrategy.reduction.routes.communicator import described

#: The copies of several values that are gathered together take no more.
_TOGETHER_BYTES = 256 * 2**20
#: Up to here nobody is asked how much memory is free.
_FEW_BYTES = 2**24
_WHERE = "ReductionToOneDevice(accumulation_fn=...)"


def bytes_per_pack(options: CommunicationOptions, ranks: int) -> int:
    """Return the size of packs of several values, so that the copies of so many ranks take bounded memory."""
    most = max(1, _TOGETHER_BYTES // ranks)
    return min(options.bytes_per_pack or most, most)


class AccumulationRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        packs: the buffers.
        op: MEAN divides what the function returned.
        function: gets all ranks' arrays in rank order, and returns one.
        root: the rank that calls it.
        destination: where the results are wanted.
    """

    def __init__(
        self,
        communicator: Communicator,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        function: Callable[[list[Array]], object],
        root: int,
        destination: Destination,
    ) -> None:
        self.packs = packs
        self._communicator, self._op, self._function = communicator, op, function
        self._root, self._is_sent = root, destination.only_rank != root
        #: What all ranks' copies of one pack take at most, with those that are converted for the function.
        self._nbytes = communicator.size * max((_held(pack) for pack in packs), default=0)
        self._largest = max((pack.nbytes for pack in packs), default=0)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        """Pack this rank's arrays; see whether all ranks' copies have room where they meet.

        Raises:
            UnsupportedError: when they have not.
        """
        if self._communicator.rank == self._root:
            self._check_room()
        self._buffers = [pack.fill(arrays) for pack in self.packs]
        self._together = self._new_together(0)

    def _new_together(self, number: int) -> Array | None:
        """Return memory for all ranks' copies of a pack on the rank where they meet, before they are sent.

        It is new for each pack: the function may keep what it gets.
        """
        if self._communicator.rank != self._root or number == len(self.packs):
            return None
        pack = self.packs[number]
        return np.empty((self._communicator.size, pack.size), pack.dtype)

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return what the function has made of all ranks' arrays."""
        communicator, results = self._communicator, cast("list[Array]", [None] * len(arrays))
        with Call(communicator.guard, "ReductionToOneDevice") as call:
            for number, (pack, buffer) in enumerate(zip(self.packs, self._buffers, strict=True), 1):
                together, self._together = self._together, None
                communicator.gatherv(buffer, [pack.size] * communicator.size, together, self._root)
                # The function is the user's: if it raises on the summing rank, the others must not wait for its result.
                call.expect_more()
                if together is not None:
                    self._accumulate(pack, together, buffer, arrays, call.where)
                    together = None  # before there is memory for the next pack
                    self._together = self._new_together(number)
                call.agree("accumulated")
                if self._is_sent:
                    communicator.bcast(buffer, self._root)
                with np.errstate(all="ignore"):
                    divide_by(self._op._divisor(buffer.dtype, communicator.size), buffer)
                for index, view in pack.views(buffer):
                    results[index] = view
        return results

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        return [described(ranks, *group) for group in grouped(self.packs, ["root"] * len(self.packs), arrays)]

    def _check_room(self) -> None:
        """Compare what all ranks' copies of the largest pack take with the memory that is free."""
        if self._nbytes <= _FEW_BYTES:
            return
        room = memory_limits.memory()
        if room is not None:
            free = f"{size_in_words(room.free)} are free of {room.of}"
            if self._nbytes > room.free:
                raise self._too_large(free)
            if self._nbytes > room.free // 2:
                self._warn_once(free)
        try:
            np.empty(self._nbytes, np.uint8)  # a limit of this process may forbid it
        except MemoryError as error:
            raise self._too_large("the system gives no more") from error

    def _warn_once(self, free: str) -> None:
        """Warn once for each call site and size."""
        told: set[tuple[str, int]] = self._communicator.once(AccumulationRoute, set)
        key = (self._communicator.guard.here().text, self._nbytes)
        if key not in told:
            told.add(key)
            warn(f"{_WHERE}: {self._needed}, where {free}. {self._cure}", OptionWarning)

    def _too_large(self, why: str) -> UnsupportedError:
        return UnsupportedError.at(
            _WHERE, found=f"{self._needed}, where {why}", expected="as much memory as that", fix=self._cure
        )

    @property
    def _needed(self) -> str:
        """What is held at a time, in words."""
        one = size_in_words(self._largest)
        return (
            f"the function gets all {self._communicator.size} ranks' copies of {one} at once, which take "
            f"{size_in_words(self._nbytes)} on rank {self._root}"
        )

    @property
    def _cure(self) -> str:
        return (
            "Reduce a list of parts instead of one large array: each part is a value of its own. For a sum leave "
            "accumulation_fn out, or use OrderedAllReduce() for one that does not depend on the order."
        )

    def _accumulate(self, pack: Pack, together: Array, buffer: Array, arrays: Sequence[Array], where: str) -> None:
        by_rank = [pack.views(theirs) for theirs in together]
        for position, (index, target) in enumerate(pack.views(buffer)):
            values = [views[position][1].astype(arrays[index].dtype, copy=False) for views in by_rank]
            result = np.asarray(self._function(values))
            if result.shape != target.shape:
                raise ShapeError.at(
                    where,
                    found=f"shape {result.shape} returned by accumulation_fn",
                    expected=f"the shape {target.shape} of each value",
                )
            if not np.can_cast(result.dtype, target.dtype, "same_kind"):
                raise DTypeError.at(
                    where,
                    found=f"dtype {dtype_name(result.dtype)} returned by accumulation_fn",
                    expected=f"the dtype of each value, {dtype_name(arrays[index].dtype)}",
                )
            target[...] = result


def _held(pack: Pack) -> int:
    """Return how many bytes one rank's copy of a pack takes while the function runs."""
    if not pack.converts:
        return pack.nbytes
    return pack.nbytes + max(member.stop - member.start for member in pack.members) * pack.dtype.itemsize
