"""Tensors as the buffers that ranks exchange: flat, contiguous, of a dtype that NumPy has; on the host or on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpistrategy.arrays.convert import cupy_for
from mpistrategy.errors import DeviceError, DTypeError, OptionError, ShapeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.collectives import Gather, Values
from mpistrategy.reduction.reducer import Reducer

#: By the numbers of torch's operations, which are their hashes; other ways to their names take ten times as long.
_NAMES = {int(kind): name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
#: Of torch's operations, but for sums.
_BY_LIBRARY = {"AVG": ReduceOp.MEAN, "PRODUCT": ReduceOp.PROD, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX}
#: Some dtypes in which sums are taken.
_EXACT = {torch.float32, torch.float64, torch.int32, torch.int64}
#: The dtypes in which sums of others are taken, before they are rounded once; of short floats in float32.
_WIDER = {torch.bool: torch.uint8, torch.complex32: torch.complex64}


def operation(opts: Any) -> tuple[str, Any]:
    """Return the name of the ReduceOp in options of c10d, and the factor of PREMUL_SUM."""
    name = _NAMES[hash(opts.reduceOp)]
    return name, opts.reduceOp.__getstate__()[1] if name == "PREMUL_SUM" else None


@cache
def reduction(op: str, dtype: Any, where: str) -> tuple[ReduceOp, Callable[..., Any] | None]:
    """Return how `wide` tensors of a dtype are reduced by an operation that `operation` has named.

    Two results: the library's operation, for AVG of whole numbers SUM, which is divided and rounded towards zero;
    torch's operation on bits, which is used instead, or None.
    """
    by = _BY_LIBRARY.get(op, ReduceOp.SUM)
    if dtype.is_complex:
        possible = "SUM AVG"
    elif dtype.is_floating_point:
        possible = "SUM AVG PREMUL_SUM PRODUCT MIN MAX"
    elif dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):  # torch cannot divide these
        possible = "SUM PRODUCT MIN MAX BAND BOR BXOR"
        by = by if dtype is not torch.bool else {"SUM": ReduceOp.MAX, "PRODUCT": ReduceOp.MIN}.get(op, by)  # of 0 and 1
    else:
        possible, by = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR", ReduceOp.SUM if op == "AVG" else by
    if op not in possible.split():
        raise DTypeError.at(where, found=f"ReduceOp.{op} of {dtype}", expected=f"one of {possible}")
    return by, _BITWISE.get(op)


def checked(
    tensors: Sequence[Any],
    where: str,
    *,
    count: int | None = None,
    dtype: Any = None,
    numel: int | None = None,
    is_written: bool = False,
) -> list[Any]:
    """Return tensors that can be sent, without their gradients.

    Args:
        tensors: dense tensors, or COO where sparse tensors are allowed.
        where: the public name.
        count: how many there must be, one for each rank; None: any number.
        dtype: of every tensor; None: that of the first.
        numel: the number of elements of every tensor; None: any.
        is_written: whether results are written into the tensors.
    """
    if count is not None and len(tensors) != count:
        raise ShapeError.at(where, found=f"a list of {len(tensors)} tensors", expected=f"{count}: one for each rank")
    # A result that torch waits for when it is used is waited for here.
    tensors = [getattr(tensor, "trigger_wait", tensor.detach)() for tensor in tensors]
    for tensor in tensors:
        # A wrapper of tensors, which dispatches otherwise, has no memory of its own.
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or not (
            tensor.is_cpu or tensor.is_cuda
        ):
            raise DeviceError.at(
                where,
                found=f"a {type(tensor).__name__} on {tensor.device}",
                expected="a plain tensor on a CPU or a CUDA GPU",
            )
        if is_written and not tensor.is_sparse and torch._debug_has_internal_overlap(tensor) == 1:
            raise ShapeError.at(
                where,
                found=f"a result tensor of shape {list(tensor.shape)} whose elements share memory",
                expected="a tensor with memory for each element",
                fix="Give tensor.contiguous(), or torch.empty(...).",
            )
        fitting = tensor.numel() if numel is None else numel, dtype or tensors[0].dtype
        if (tensor.numel(), tensor.dtype) != fitting:
            raise ShapeError.at(
                where,
                found=f"a tensor of {tensor.numel()} elements of {tensor.dtype}",
                expected=f"{fitting[0]} elements of {fitting[1]}",
            )
    return tensors


def gpu_of(tensors: Sequence[Any]) -> Any:
    """Return the GPU in whose memory all tensors are; None for other tensors, for no tensors, and without CuPy."""
    places = {tensor.device if tensor.is_cuda and find_spec("cupy") else None for tensor in tensors}
    return places.pop() if len(places) == 1 else None


def on_stream(device: Any) -> AbstractContextManager[Any]:
    """Let the library work on a GPU in the order of torch's current stream; None: on the host."""
    return nullcontext() if device is None else _on_stream(cupy_for("mpistrategy.torch"), device)


@contextmanager
def _on_stream(cupy: Any, device: Any) -> Iterator[None]:
    with cupy.cuda.Device(device.index), _stream(cupy, device.index, torch.cuda.current_stream(device).cuda_stream):
        yield


@cache  # for ever: some versions of CuPy end the stream with their own object of it
def _stream(cupy: Any, index: int, pointer: int) -> Any:
    """Return a stream of torch as CuPy's; with the GPU of this index current."""
    is_old = int(cupy.__version__.partition(".")[0]) < 14
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, pointer))
    return cupy.cuda.ExternalStream(pointer) if is_old else cupy.cuda.Stream.from_external(stream)


def flat(tensor: Any, device: Any = None) -> Any:
    """Return the elements of a tensor, contiguous, on a GPU or the host; in the tensor's own memory if possible."""
    # a view of a single element may have another stride than 1
    return tensor.resolve_conj().resolve_neg().to(device or "cpu").contiguous().as_strided((tensor.numel(),), (1,))


def in_numpy(tensor: Any) -> Any:
    """Return the elements of a contiguous tensor on the host, as a flat array of the same memory.

    Not by numpy(), after which torch refuses to resize the tensor's memory, as FSDP does.
    """
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.numel():  # which has no memory
        return np.empty(0, dtype)
    buffer = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    buffer.tensor = tensor  # whose memory it is
    return np.frombuffer(buffer, dtype)


def in_bytes(tensor: Any, device: Any = None) -> Any:
    """Return the elements of a tensor as bytes, an array on the host or a tensor on a GPU; if possible, not copied."""
    elements = flat(tensor, device).view(torch.uint8)
    return in_numpy(elements) if device is None else elements


def from_bytes(data: Any, like: Any) -> Any:
    """Return bytes, an array or a tensor, as a flat tensor of the dtype of another."""
    if not len(data):  # of which torch makes no view
        return like.new_empty(0)
    return (torch.from_numpy(data) if isinstance(data, np.ndarray) else data).view(like.dtype)


def write(results: Iterable[Any], targets: Iterable[Any]) -> None:
    """Write the elements of results into targets, unless they share memory."""
    for result, target in zip(results, targets, strict=True):
        if result is not target and (result.data_ptr() != target.data_ptr() or not target.is_contiguous()):
            target.copy_(result.view(target.shape))


def values_of(tensors: Sequence[Any]) -> Values:
    """Return dtypes and numbers of elements, as ranks compare them."""
    return tuple([(str(tensor.dtype).removeprefix("torch."), (tensor.numel(),)) for tensor in tensors])


def parts(whole: Any, count: int) -> list[Any]:
    """Return a list of tensors as it is; a tensor in equal parts of its elements, in one if that is impossible."""
    if not isinstance(whole, torch.Tensor):
        return list(whole)
    rows = whole.detach()
    if not rows.dim() or rows.shape[0] % count:
        rows = rows.view(-1)
    return [rows] if rows.shape[0] % count else list(rows.tensor_split(count))


def together(tensors: Any) -> Any:
    """Return the elements of tensors of one dtype, on the host or on one GPU, one after the other; or of one tensor."""
    if isinstance(tensors, torch.Tensor):
        return tensors.detach().reshape(-1)
    flat_parts = [flat(tensor.detach(), tensor.device).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat_parts).view(tensors[0].dtype)


def lengths(tensor: Any, splits: Sequence[int], ranks: int, where: str) -> list[int]:
    """Return how many rows of a tensor belong to each rank; without splits equally many."""
    rows = tensor.shape[0] if tensor.dim() else 0
    counts = [int(split) for split in splits] or [rows // ranks] * ranks
    if not tensor.dim() or len(counts) != ranks or sum(counts) != rows or min(counts) < 0:
        raise OptionError.at(
            where,
            found=f"splits {counts} of a tensor of shape {list(tensor.shape)}",
            expected=f"{ranks} lengths along the first axis, whose sum is {rows}",
        )
    return counts


def wide(tensor: Any) -> Any:
    """Return a tensor whose memory has its values, in a dtype in which sums are exact enough; usually the tensor."""
    if tensor.dtype in _EXACT and not tensor.is_neg():  # the three steps below take as long as a small sum
        return tensor
    is_short = tensor.is_floating_point() and tensor.itemsize < 4
    dtype = torch.float32 if is_short else _WIDER.get(tensor.dtype, tensor.dtype)
    return tensor.resolve_conj().resolve_neg().to(dtype)


def sum_of_rows(call: Call, reducer: Reducer, tensor: Any, shape: Any, *, divides: bool) -> Any:
    """Return the sum, or the mean, of the ranks' sparse COO tensors of this shape: the rows of all ranks together.

    Collective, without gradients.
    """
    call.expect_more()
    own_rows = tensor.coalesce()
    parts = [own_rows.indices().t().contiguous(), wide(own_rows.values())]
    places, values = reducer.run(call.where, Gather, 0, parts)
    total = torch.sparse_coo_tensor(  # without checks of the indices, and saying so: else torch warns of them
        places.t(), values, shape, device=values.device, check_invariants=False
    ).coalesce()
    return (total / reducer.communicator.size if divides else total).to(tensor.dtype)
