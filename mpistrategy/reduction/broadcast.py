"""Broadcast: one rank's arrays on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import array_where_it_is, is_on_device, like_given
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name, is_python_number
from mpistrategy.arrays.gpu import check_device, layout_of
from mpistrategy.arrays.values import IndexedSlices, contribution, event_of_reads, local_component
from mpistrategy.errors import LeafError, OptionError, OptionTypeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.mismatch_report import ASKS
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.reduction.inputs import NUMBERS, arrays_of, as_given, is_plain_array
from mpistrategy.reduction.layout.packing import Layout, layouts_of
from mpistrategy.reduction.plan import Transfer
from mpistrategy.reduction.plans import NestPlan
from mpistrategy.reduction.reducer import General
from mpistrategy.reduction.routes import on_device
from mpistrategy.reduction.routes.base import CallPlan, Targets
from mpistrategy.reduction.routes.mailboxes import MailboxArrays


def broadcast(
    communicator: Ranks,
    values: Sequence[Any],
    root: int,
    call: Call,
    destination: str = "",
    describe: Callable[[], str] | None = None,
    *,
    in_place: bool = False,
) -> list[Any]:
    """Return rank `root`'s value of each of `values`, of the kind that was given.  Arrays in GPU memory stay there.

    Args:
        communicator: the ranks.
        values: this rank's arrays, numbers or containers, of any dtype of fixed size; dtypes and shapes are equal on
            all ranks.
        root: whose values they get.
        call: the guard's call that all ranks make.
        destination: of the results, as the ranks compare it.
        describe: returns the structure of the values, for ranks that ask for it.
        in_place: whether a result may be the value itself, on the host, where that is contiguous.

    Raises:
        LeafError, DTypeError: for what is not an array of a fixed size.
        UnsupportedError: for IndexedSlices.
    """
    given = [contribution(value) for value in values]
    if any(isinstance(value, IndexedSlices) for value in given):
        raise UnsupportedError.at(
            call.where, found="IndexedSlices", expected="an array", fix="Broadcast its values and indices."
        )
    arrays = [array_where_it_is(value, call.where) for value in given]
    placed = [array for array in arrays if is_on_device(array)]
    layouts = tuple(layout_of(each) if is_on_device(each) else (dtype_name(each.dtype), each.shape) for each in arrays)
    # Before the agreement: short memory must show while all ranks can still raise.
    on_host = [array for array in arrays if not is_on_device(array)]
    way = FromRoot(communicator, layouts_of(on_host), root)
    if placed:
        check_device(placed, gpu_of(communicator.devices, communicator.rank), call.where)
        on_device.prepare(communicator, placed, call.where)
        memory, copies = on_device.packed(placed)
    signature = signature_of(call, root, layouts, destination)
    found = way.sent(call, on_host, signature, describe, own=on_host if in_place else None)
    if placed:
        read = event_of_reads(given)
        on_device.bcast(communicator, memory, root)
        communicator.guard.wait_for_gpu(read)
    results = [copies.pop(0) if is_on_device(array) else found.pop(0) for array in arrays]
    return [like_given(result, value) for result, value in zip(results, given, strict=True)]


class FromRoot(Transfer):
    """How one rank's arrays, on the host, come to all ranks.

    On a node small arrays lie in its mailbox, beside the check of the call; else MPI sends them after it.

    Args:
        communicator: the ranks.
        layouts: dtype and shape of each array.
        root: whose they are.
    """

    def __init__(self, communicator: Ranks, layouts: tuple[Layout, ...], root: int) -> None:
        self._communicator, self._root = communicator, root
        self.layouts: tuple[Layout, ...] = layouts
        boxes = communicator.mailboxes
        self._in_mailboxes: MailboxArrays | None = None
        if boxes is not None and MailboxArrays.has_room(boxes, layouts, 2):
            self._in_mailboxes = MailboxArrays(boxes, layouts)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Copy the root's arrays, before the ranks agree on the call; return memory for the results.

        If the arrays are their `targets`, contiguous ones are sent themselves.
        """
        if self._in_mailboxes is None:
            is_own = targets is not None
            return [each if is_own and each.flags.c_contiguous else np.array(each, order="C") for each in arrays]
        if self._communicator.rank == self._root:
            self._in_mailboxes.put(arrays)
        return [np.empty(shape, dtype) for dtype, shape in self.layouts]

    def run(self, arrays: Sequence[Array], memory: list[Array]) -> list[Array]:
        """Return the root's arrays, after that."""
        if self._in_mailboxes is None:
            for result in memory:
                self._communicator.bcast(result, self._root)
        else:
            for result, array in zip(memory, self._in_mailboxes.seen()[self._root], strict=True):
                result[...] = array
        return memory

    def sent(
        self,
        call: Call,
        arrays: Sequence[Array],
        signature: Signature,
        describe: Callable[[], str] | None,
        digest: int | None = None,
        own: Targets = None,
    ) -> list[Array]:
        """Return the root's arrays, once all ranks make the same call.

        Args:
            call: the public call.
            arrays: this rank's.
            signature: what the ranks compare.
            describe: that of `broadcast`.
            digest: of the signature, where it is known.
            own: the arrays, where these may be the results; see `bring`.
        """
        memory = self.bring(arrays, own)
        if call.agree_on(signature, digest):
            _structure_of(self._communicator, describe, self._root)
            call.expect_more()
            memory = self.bring(arrays, own)
            call.agree_on(signature, digest)
        return self.run(arrays, memory)


def signature_of(
    call: Call, root: int, layouts: tuple[tuple[str, tuple[int, ...]], ...], destination: str = ""
) -> Signature:
    """Return what the ranks compare before a broadcast."""
    return Signature(
        "broadcast", f"from rank {root}", call.structure, layouts, destination, "", call.name, call.where, call.place
    )


class Broadcast(General):
    """`Strategy.broadcast` of any nest; the argument is the root."""

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the root's values; see `CallPlan.run`."""
        communicator = self.reducer.communicator
        root = checked_root(self.argument, communicator.size, call.where)
        if value is None:
            if communicator.rank == root:
                expected = "a value there; the other ranks may give None"
                raise LeafError.at(call.where, found=f"the value None on the root, rank {root}", expected=expected)
            value = asked_of(root, communicator, call)
        leaves, structure = nest.flatten_without_none(value)
        call.structure = structure.text
        results = broadcast(communicator, leaves, root, call, describe=partial(description, value, call.where))
        return structure.pack([as_given(r, local_component(v)) for r, v in zip(results, leaves, strict=True)])

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of a nest of NumPy's arrays and numbers; None for others."""
        where = nest.leaves_of(value)
        leaves = [] if where is None else where.take(value)
        if where is None or not nest.only_text_keys(value):
            return None
        arrays = arrays_of(leaves) if all(type(leaf) in NUMBERS or is_plain_array(leaf) for leaf in leaves) else None
        if arrays is None:
            return None
        ranks, layouts, kinds = self.reducer.communicator, layouts_of(arrays), {*map(type, leaves)}
        root = checked_root(self.argument, ranks.size, call.where)
        values = tuple((dtype_name(dtype), shape) for dtype, shape in layouts)
        call.structure = where.text
        signature, transfer = signature_of(call, root, values), FromRoot(ranks, layouts, root)
        made = _BroadcastPlan(self, where, transfer, signature, kinds=kinds, timeout=None)
        made.description = description(value, call.where)
        return made


class _BroadcastPlan(NestPlan):
    """The plan of broadcasts, which may have to tell ranks that give None what the others have."""

    _transfer: FromRoot
    #: What these ranks are told.
    description: str = ""

    def _sent(self, call: Call, arrays: Sequence[Array], targets: Targets, weight: Any = None) -> list[Array]:
        call.structure = self._signature.structure
        return self._transfer.sent(call, arrays, self._signature, lambda: self.description, self._digest)


def asked_of(root: int, communicator: Ranks, call: Call) -> Any:
    """Return a nest like that of rank `root`, of zeros, on a rank that has no value; the others `broadcast` theirs.

    Raises:
        UnsupportedError: on every rank, for a nest that cannot be described.
    """
    call.structure = ASKS
    call.agree("broadcast", op=f"from rank {root}")
    text = _structure_of(communicator, None, root)
    call.expect_more()
    return _described(json.loads(text))


def _structure_of(communicator: Ranks, describe: Callable[[], str] | None, root: int) -> str:
    is_here = describe is not None and communicator.rank == root
    text = communicator.guard.on_all(lambda: describe() if is_here and describe is not None else "")
    return communicator.allgather_text(text)[root]


def description(value: Any, where: str) -> str:
    """Return the structure, the dtypes and the shapes of a nest as a text, from which other ranks make one like it.

    Raises:
        UnsupportedError: for containers other than dict, list and tuple, for keys that are neither text nor numbers,
            and for arrays of other libraries, on GPUs, and with fields.
    """
    return json.dumps(_description(value, "", where))


def _description(value: Any, path: str, where: str) -> Any:
    kind = type(value)
    if value is None:
        return None
    if kind is dict:
        if {*map(type, value)} <= {str, int, float, bool}:
            return ["dict", [[key, _description(each, f"{path}[{key!r}]", where)] for key, each in value.items()]]
    elif kind is list or kind is tuple:
        return [kind.__name__, [_description(each, f"{path}[{at}]", where) for at, each in enumerate(value)]]
    elif not nest.is_container(value):
        part = contribution(value)
        if isinstance(part, (np.ndarray, np.generic, bool, str, bytes)) or is_python_number(part):
            array = np.asarray(part)
            name = array.dtype.name if array.dtype.type.__module__ == "ml_dtypes" else array.dtype.newbyteorder("=").str
            if array.dtype.names is None:
                is_number = isinstance(part, np.generic) or is_python_number(part)
                return ["leaf", name, array.shape, is_number]
    raise UnsupportedError.at(
        where,
        found=f"a {kind.__name__}{f' at {path}' if path else ''}, and None on other ranks",
        expected="numbers and NumPy arrays in dict, list and tuple, whose structure is sent to ranks that give None",
        fix="Give every rank a value of this structure; only the root's numbers matter.",
    )


def _described(description: Any) -> Any:
    """Return a nest of zeros like the one that was described."""
    if description is None:
        return None
    kind, *parts = description
    if kind == "dict":
        return {key: _described(each) for key, each in parts[0]}
    if kind == "leaf":
        name, shape, is_number = parts
        zeros = np.zeros(shape, name if name[0] in "<>|=" else _extension_dtype(name))
        return zeros[()] if is_number else zeros
    made = [_described(each) for each in parts[0]]
    return made if kind == "list" else tuple(made)


def _extension_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # here, for the quick import; the root has it

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


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
