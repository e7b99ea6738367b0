"""Tensors as the host buffers that ranks exchange: flat, contiguous, of a dtype that NumPy has."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import DeviceError, DTypeError, OptionError, ReduceOpError, ShapeError

#: Sums of these are taken in the dtype beside it, and rounded once.
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.uint8,
    **dict.fromkeys((getattr(torch, name) for name in dir(torch) if name.startswith("float8_")), torch.float32),
}
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
#: What torch's operations on truth values are on bytes of 0 and 1.
_OF_TRUTH = {"SUM": "MAX", "MAX": "MAX", "BOR": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "BAND": "MIN", "BXOR": "BXOR"}
_BY_LIBRARY = {"SUM": "SUM", "AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}


def operation(opts: Any, where: str) -> tuple[str, Any]:
    """Return the name of the ReduceOp in options of c10d, without any SUM, and the factor of PREMUL_SUM, else None."""
    reduce_op = torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *_BITWISE, "PREMUL_SUM")
    for name in names:
        kind = getattr(torch.distributed.ReduceOp, name, None)
        if kind is not None and reduce_op == kind:
            return name, reduce_op.__getstate__()[1] if name == "PREMUL_SUM" else None
    raise ReduceOpError.at(where, found=repr(reduce_op), expected=f"torch.distributed.ReduceOp.{' or '.join(names)}")


def checked(tensor: Any, where: str, *, is_written: bool = False) -> Any:
    """Return a tensor that can be sent, without its gradient.

    Args:
        tensor: a dense tensor, or COO where sparse ones are taken.
        where: the public name.
        is_written: whether a result is written into it.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError.at(where, found=f"a tensor on {tensor.device}", expected="one on a CPU or a CUDA GPU")
    if is_written and not tensor.is_sparse and torch._debug_has_internal_overlap(tensor) == 1:
        raise ShapeError.at(
            where,
            found=f"a result tensor of shape {list(tensor.shape)} whose elements share memory",
            expected="a tensor with memory for each element",
            fix="Give tensor.contiguous(), or torch.empty(...).",
        )
    return tensor.detach()


def flat(tensor: Any, dtype: Any = None) -> Any:
    """Return the elements of a tensor on the host, contiguous: the tensor's own memory where that is such already."""
    return tensor.resolve_conj().resolve_neg().to("cpu", dtype or tensor.dtype).contiguous().view(-1)


def in_bytes(elements: Any) -> Array:
    """Return the memory of a flat tensor as an array of bytes."""
    # not by numpy(), after which torch refuses to resize the tensor's memory, as FSDP does
    layout = {"data": (elements.data_ptr(), False), "shape": (elements.nbytes,), "typestr": "|u1", "version": 3}
    shown = SimpleNamespace(__array_interface__=layout, elements=elements)
    return np.asarray(shown) if elements.numel() else np.empty(0, np.uint8)  # older NumPy takes no memory at 0


def copy_back(elements: Any, target: Any) -> None:
    """Write the elements of a flat tensor into a tensor, unless the memory is the tensor's own."""
    if elements.data_ptr() != target.data_ptr() or elements.dtype != target.dtype or not target.is_contiguous():
        target.copy_(elements.view(target.shape))


class Summand:
    """A tensor that is reduced over the ranks: this rank's elements, and afterwards the result.

    Args:
        tensor: of any dtype and layout; it does not change before `finish`.
        op: an operation's name, as `operation` returns it.
        factor: of PREMUL_SUM.
        where: the public name.
        copied: whether the elements are copied, since the tensor must keep its own.
    """

    def __init__(self, tensor: Any, op: str, factor: Any, where: str, *, copied: bool = False) -> None:
        self._dtype = dtype = tensor.dtype
        is_float = dtype.is_floating_point or dtype.is_complex
        if (op in _BITWISE and is_float) or (dtype.is_complex and op in ("MIN", "MAX", "PRODUCT")):
            raise DTypeError.at(where, found=f"ReduceOp.{op} of {dtype}", expected="an operation that this dtype has")
        if dtype is torch.bool:
            if op not in _OF_TRUTH:
                raise DTypeError.at(where, found=f"ReduceOp.{op} of {dtype}", expected=f"{', '.join(_OF_TRUTH)}")
            op = _OF_TRUTH[op]
        if not dtype.is_floating_point and op == "PREMUL_SUM":
            raise DTypeError.at(where, found=f"ReduceOp.{op} of {dtype}", expected="a floating dtype")
        self._op, self._factor = op, factor
        elements = flat(tensor, _WIDER.get(dtype))
        if copied and elements.data_ptr() == tensor.data_ptr():
            elements = elements.clone()
        self.elements = elements
        self.is_bitwise: bool = op in _BITWISE
        #: The library's name of the operation.
        self.by: str = _BY_LIBRARY.get(op, "")

    def start(self) -> Array:
        """Return the buffer that is reduced where it is; the ranks have agreed."""
        if self._op == "PREMUL_SUM":
            self.elements.mul_(self._factor)
        return in_bytes(self.elements).view(str(self.elements.dtype).removeprefix("torch."))

    def combine(self, rows: Any) -> None:
        """Take the elements of all ranks, in rank order, for a bitwise operation."""
        self.elements.copy_(rows[0])
        for row in rows[1:]:
            _BITWISE[self._op](self.elements, row, out=self.elements)

    def finish(self, ranks: int) -> Any:
        """Return the result's elements, in the dtype in which they were summed."""
        if self._op == "AVG":
            is_whole = not (self._dtype.is_floating_point or self._dtype.is_complex)
            self.elements.div_(ranks, rounding_mode="trunc" if is_whole else None)
        return self.elements


def values_of(tensors: Sequence[Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtypes and numbers of elements, as ranks compare them."""
    return tuple((str(each.dtype).removeprefix("torch."), (each.numel(),)) for each in tensors)


def check_elements(tensor: Any, expected: int, dtype: Any, what: str, where: str) -> None:
    """Raise unless a tensor has so many elements of this dtype."""
    if tensor.numel() != expected or tensor.dtype != dtype:
        raise ShapeError.at(
            where,
            found=f"{what} of {tensor.numel()} elements of {tensor.dtype}",
            expected=f"{expected} elements of {dtype}",
        )


def check_length(values: Sequence[Any], expected: int, what: str, where: str) -> None:
    """Raise unless there is a tensor for each rank."""
    if len(values) != expected:
        raise ShapeError.at(where, found=f"{what} of {len(values)} tensors", expected=f"{expected}: one for each rank")


def checked_rank(rank: int, size: int, what: str, where: str) -> int:
    """Return a rank of the group."""
    if not 0 <= rank < size:
        raise OptionError.at(where, found=f"{what} {rank}", expected=f"a rank of the group, from 0 to {size - 1}")
    return rank


def parts(whole: Any, count: int) -> list[Any]:
    """Return a tensor in equal parts, along its first axis or of its elements; in one where this cannot be."""
    whole = whole.detach()
    if not whole.dim() or whole.shape[0] % count:
        whole = whole.view(-1)
    return [whole] if whole.shape[0] % count else list(whole.tensor_split(count))


def joined(tensors: Sequence[Any]) -> Any:
    """Return tensors as one flat tensor where they lie one after the other on the host, else None."""
    first, end = tensors[0], tensors[0].data_ptr()
    for each in tensors:
        if (each.device.type, each.dtype, each.data_ptr()) != ("cpu", first.dtype, end) or not each.is_contiguous():
            return None
        end += each.numel() * each.element_size()
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    return first.detach().as_strided((sum(each.numel() for each in tensors),), (1,))


def lengths(tensor: Any, splits: Sequence[int], ranks: int, where: str) -> list[int]:
    """Return how many rows of a tensor belong to each rank; without splits equally many."""
    rows = tensor.shape[0] if tensor.dim() else 0
    chosen = [int(each) for each in splits] or [rows // ranks] * ranks
    if not tensor.dim() or len(chosen) != ranks or sum(chosen) != rows or min(chosen) < 0:
        raise OptionError.at(
            where,
            found=f"splits {chosen} of a tensor of shape {list(tensor.shape)}",
            expected=f"{ranks} lengths along the first axis, whose sum is {rows}",
        )
    return chosen
