"""Broadcast: one rank's arrays on every rank."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import array_where_it_is, is_on_device, like_given
from mpistrategy.arrays.dtypes import Array, is_python_number
from mpistrategy.arrays.gpu import layout_of
from mpistrategy.arrays.values import contribution, event_of_reads
from mpistrategy.errors import LeafError, OptionError, OptionTypeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.mismatch_report import ASKS
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.reduction.collectives import Collective, EachArray, check_gpus, dense
from mpistrategy.reduction.layout.packing import Layout, layouts_of
from mpistrategy.reduction.plans import NestPlan
from mpistrategy.reduction.routes import on_device
from mpistrategy.reduction.routes.base import CallPlan, Targets
from mpistrategy.reduction.routes.mailboxes import MailboxArrays


def broadcast(
    ranks: Ranks, values: Sequence[Any], root: int, call: Call, destination: str = "", *, in_place: bool = False
) -> list[Any]:
    """Return rank `root`'s value of each of `values`, of the kind that was given.  Arrays in GPU memory stay there.

    Args:
        ranks: who takes part.
        values: this rank's arrays and numbers, of any dtype of fixed size; dtypes and shapes are equal on all ranks.
        root: whose values they get.
        call: the guard's call that all ranks make.
        destination: of the results, as the ranks compare it.
        in_place: whether a result may be the value itself, on the host, where that is contiguous.

    Raises:
        LeafError, DTypeError: for what is not an array of a fixed size.
        UnsupportedError: for IndexedSlices.
    """
    given = [dense(value, call.where) for value in values]
    arrays = [array_where_it_is(value, call.where) for value in given]
    check_gpus(ranks, arrays, call.where)
    way = FromRoot(ranks, arrays, root)
    results = way.sent(call, arrays, way.signature(call, destination), targets=arrays if in_place else None)
    ranks.guard.wait_for_gpu(event_of_reads(given))
    return [*map(like_given, results, given)]


class FromRoot(Collective):
    """How one rank's arrays come to all ranks.

    On a node small arrays on the host lie in its mailbox, beside the check of the call; else MPI sends them after it.

    Args:
        ranks: who takes part.
        arrays: this rank's, or arrays like them.
        root: whose they are.
    """

    verb = "broadcast"

    def __init__(self, ranks: Ranks, arrays: Sequence[Any], root: int) -> None:
        self._ranks, self._root, boxes = ranks, root, ranks.mailboxes
        self.op: str = f"from rank {root}"
        self.layouts: tuple[Layout, ...] = layouts_of(arrays)
        self.values: tuple[tuple[str, tuple[int, ...]], ...] = tuple(map(layout_of, arrays))
        self._in_mailboxes: MailboxArrays | None = None
        on_host = not any(map(is_on_device, arrays))
        if boxes is not None and on_host and MailboxArrays.has_room(boxes, self.layouts, 2):
            self._in_mailboxes = MailboxArrays(boxes, self.layouts)

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> Any:
        """Copy the arrays, before the ranks agree on the call; return memory for the results.

        If the arrays are their `targets`, contiguous ones are sent themselves.
        """
        if self._in_mailboxes is not None:
            if self._ranks.rank == self._root:
                self._in_mailboxes.put(arrays)
            return None, [np.empty(shape, dtype) for dtype, shape in self.layouts]
        placed = [array for array in arrays if is_on_device(array)]
        memory, copies = on_device.packed(placed) if placed else (None, [])
        own = targets is not None
        return memory, [
            copies.pop(0) if is_on_device(a) else a if own and a.flags.c_contiguous else np.array(a, order="C")
            for a in arrays
        ]

    def run(self, arrays: Sequence[Any], memory: tuple[Any, list[Array]]) -> list[Array]:
        """Return the root's arrays, after that."""
        on_gpu, results = memory
        if self._in_mailboxes is not None:
            for result, array in zip(results, self._in_mailboxes.seen()[self._root], strict=True):
                result[...] = array
            return results
        for result in results:
            if not is_on_device(result):
                self._ranks.bcast(result, self._root)
        if on_gpu is not None:
            on_device.bcast(self._ranks, on_gpu, self._root)
        return results

    def sent(
        self,
        call: Call,
        arrays: Sequence[Any],
        signature: Signature,
        digest: int | None = None,
        describe: Callable[[], str] = str,
        targets: Targets = None,
    ) -> list[Array]:
        """Return the root's arrays, once all ranks make the same call.

        Args:
            call: the public call.
            arrays: this rank's.
            signature: what the ranks compare.
            digest: of the signature, where it is known.
            describe: returns the structure of the values, for ranks that ask for it.
            targets: see `bring`.
        """
        memory = self.bring(arrays, targets)
        while call.agree_on(signature, digest):  # some ranks ask what the root has
            structure_of(self._ranks, self._root, describe)
            call.expect_more()
            memory = self.bring(arrays, targets)
        return self.run(arrays, memory)


class _BroadcastPlan(NestPlan):
    """The plan of broadcasts, which may have to tell ranks that give None what the others have."""

    _transfer: FromRoot
    #: What these ranks are told.
    description: str = ""

    def _sent(self, call: Call, arrays: Sequence[Array], targets: Targets, weight: Any = None) -> list[Array]:
        call.structure = self._signature.structure
        return self._transfer.sent(call, arrays, self._signature, self._digest, lambda: self.description)


class Broadcast(EachArray):
    """`Strategy.broadcast` of any nest; the argument is the root."""

    plan_type: type[NestPlan] = _BroadcastPlan

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the root's values; see `CallPlan.run`.  A rank without a value asks the root what it is like."""
        ranks, where = self.reducer.communicator, call.where
        root = checked_root(self.argument, ranks.size, where)
        if value is None:
            if ranks.rank == root:
                expected = "a value there; the other ranks may give None"
                raise LeafError.at(where, found=f"the value None on the root, rank {root}", expected=expected)
            call.structure = ASKS
            call.agree("broadcast", op=f"from rank {root}")
            text = structure_of(ranks, root)
            call.expect_more()
            value = described(text)
        return super().run(call, value, out, weight)

    def collective(self, call: Call, arrays: Sequence[Any]) -> FromRoot:
        ranks = self.reducer.communicator
        return FromRoot(ranks, arrays, checked_root(self.argument, ranks.size, call.where))

    def moved(self, call: Call, collective: Collective, arrays: Sequence[Any], value: Any) -> list[Array]:
        assert isinstance(collective, FromRoot)
        check_gpus(self.reducer.communicator, arrays, call.where)
        describe = partial(description, value, call.where)
        return collective.sent(call, arrays, collective.signature(call), describe=describe)

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of a nest of arrays and numbers on the host, which can be described; None for others."""
        made = super().plan(call, value, out, weight)
        if isinstance(made, _BroadcastPlan):
            made.description = description(value, call.where)
        return made


def structure_of(ranks: Ranks, root: int, describe: Callable[[], str] = str) -> str:
    """Return the description of rank `root`'s nest, on ranks that have agreed to exchange it."""
    return ranks.allgather_text(ranks.guard.on_all(describe if ranks.rank == root else str))[root]


def description(value: Any, where: str) -> str:
    """Return the structure, the dtypes and the shapes of a nest as a text, from which other ranks make one like it.

    Raises:
        UnsupportedError: for containers other than dict, list and tuple, for keys that are no plain values, and for
            arrays of other libraries, on GPUs, and with fields.
    """
    leaves, structure = nest.flatten_without_none(value)
    try:
        text = repr((structure.pack([*range(len(leaves))]), [*map(_layout, leaves)]))
        if nest.flatten_without_none(ast.literal_eval(text)[0])[1] == structure:
            return text
    except (SyntaxError, TypeError, ValueError):  # no literals
        pass
    raise UnsupportedError.at(
        where,
        found=f"a nest {structure.text:.200}, and None on other ranks",
        expected="numbers and NumPy arrays in dict, list and tuple, whose structure is sent to ranks that give None",
        fix="Give every rank a value of this structure; only the root's numbers matter.",
    )


def _layout(leaf: Any) -> tuple[str, tuple[int, ...], bool]:
    """Return the dtype of a leaf, its shape, and whether it is a number."""
    part = contribution(leaf)
    is_number = isinstance(part, np.generic) or is_python_number(part)
    dtype = np.asarray(part).dtype if is_number or isinstance(part, (np.ndarray, bool, str, bytes)) else None
    if dtype is None or dtype.names is not None:
        raise TypeError
    return (
        dtype.name if dtype.type.__module__ == "ml_dtypes" else dtype.newbyteorder("=").str,
        np.shape(part),
        is_number,
    )


def described(text: str) -> Any:
    """Return a nest of zeros like the one of a description."""
    skeleton, layouts = ast.literal_eval(text)
    return nest.flatten_without_none(skeleton)[1].pack([_zeros(*each) for each in layouts])


def _zeros(name: str, shape: tuple[int, ...], is_number: bool) -> Any:
    # The root has ml_dtypes; it is imported here, for the quick import.
    zeros = np.zeros(shape, name if name[0] in "<>|=" else getattr(importlib.import_module("ml_dtypes"), name))
    return zeros[()] if is_number else zeros


def checked_root(root: Any, size: int, where: str) -> int:
    """Return `root` as a rank.

    Raises:
        OptionTypeError, OptionError: when it is none.
    """
    expected = f"a rank from 0 to {size - 1}"
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)):
        raise OptionTypeError.at(where, found=f"root={root!r}", expected=expected)
    if not 0 <= root < size:
        raise OptionError.at(where, found=f"root={root}", expected=expected)
    return int(root)
