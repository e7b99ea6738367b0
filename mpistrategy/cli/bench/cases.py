"""What is measured: one array of every size, and lists of gradients, summed in several ways; on CPUs or GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import cupy_for
from mpistrategy.cli.ranks import Ranks
from mpistrategy.objects.shown import size_in_words
from mpistrategy.strategy.replica_context import ReplicaContext

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """Return the 161 trainable arrays of ResNet-50 (He et al., 2015; 1000 classes): 25.6 million parameters."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]  # a convolution, then scale and offset of its normalization
    width_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        outer = 4 * inner
        for block in range(blocks):
            for shape in ((inner, width_in, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:  # the shortcut changes the width
                shapes += [(outer, width_in, 1, 1), (outer,), (outer,)]
            width_in = outer
    return [*shapes, (1000, 2048), (1000,)]


def tiny1000() -> Shapes:
    """Return 1000 arrays of 1 to 1000 elements: nothing but overhead."""
    return [(int(size),) for size in np.random.default_rng(0).integers(1, 1001, 1000)]


LISTS: dict[str, Callable[[], Shapes]] = {"resnet50": resnet50, "tiny1000": tiny1000}


@dataclass(frozen=True)
class Variant:
    """One implementation of a case.

    Attributes:
        name: its row in the tables.
        call: runs it; returns the result (an array, or a list of them), or None when it is in `results`.
        operands: this rank's arrays that are rewritten before every call.
        results: where `call` writes to; empty for the operands themselves.
        close: frees the resources of the variant.  Collective.
    """

    name: str
    call: Callable[[], Any]
    operands: Sequence[Any]
    results: Sequence[Any] = ()
    close: Callable[[], object] = lambda: None

    def write(self, value: float) -> None:
        """Rewrite every operand."""
        for operand in self.operands:
            operand.fill(value)

    def leaves(self, result: Any) -> Sequence[Any]:
        """Return the arrays of the result of a call."""
        if result is None:
            return self.results or self.operands
        return result if isinstance(result, list) else [result]


@dataclass(frozen=True)
class Case:
    """One operation and its variants; ratios are relative to the first.

    Attributes:
        suite: the group that it belongs to.
        name: e.g. ``"64 MiB"``.
        nbytes: the bytes that each rank contributes.
        variants: at least one.
        finish: waits until a call is done, where calls return before that: on GPUs.
    """

    suite: str
    name: str
    nbytes: int
    variants: Sequence[Variant]
    finish: Callable[[], object] = lambda: None


def cases(
    ranks: Ranks, ctx: ReplicaContext, sizes: Sequence[int], lists: Sequence[str], on_gpu: bool
) -> Iterator[Case]:
    """Yield a case for every size in bytes, of one float32 array, and for every list in `LISTS`.

    Args:
        ranks: for the variants by mpi4py.
        ctx: for the variants by this library; the caller has entered it.
        sizes, lists: which.
        on_gpu: whether operands lie in GPU memory.
    """
    zeros: Any = np.zeros
    finish: Callable[[], object] = Case.finish
    if on_gpu:
        cupy = cupy_for("mpistrategy bench --devices")
        zeros, finish = cupy.zeros, cupy.cuda.get_current_stream().synchronize
    for nbytes in sizes:
        array = zeros(nbytes // 4, dtype=np.float32)
        variants = [_by_mpi(ranks, [array], on_gpu), *_by_strategy(ctx, array, [array])]
        yield Case("all_reduce", size_in_words(nbytes), nbytes, variants, finish)
    for name in lists:
        arrays = [zeros(shape, dtype=np.float32) for shape in LISTS[name]()]
        variants = [_by_mpi(ranks, arrays, on_gpu), *_by_strategy(ctx, arrays, arrays)]
        yield Case("lists", name, sum(array.nbytes for array in arrays), variants, finish)


def _by_strategy(ctx: ReplicaContext, value: Any, operands: Sequence[Any]) -> Iterator[Variant]:
    all_reduce = ctx.all_reduce
    yield Variant("mpistrategy", partial(all_reduce, "SUM", value), operands)
    yield Variant("mpistrategy out=", partial(all_reduce, "SUM", value, out=value), operands)
    for name, shared_result in (("mpistrategy arena", False), ("mpistrategy arena, shared result", True)):
        arena = ctx.strategy.arena(value, shared_result=shared_result)
        operand_list = arena.values if isinstance(arena.values, list) else [arena.values]
        yield Variant(name, partial(all_reduce, "SUM", arena), operand_list, close=arena.close)


def _by_mpi(ranks: Ranks, operands: Sequence[Any], on_gpu: bool) -> Variant:
    totals = [np.zeros(array.shape, np.float32) for array in operands]
    if not on_gpu and len(operands) == 1:
        return Variant("mpi4py", partial(ranks.comm.Allreduce, *operands, *totals), operands, totals)
    if not on_gpu:
        return Variant("mpi4py loop", partial(_sum_each, ranks, operands, totals), operands, totals)
    hosts = [np.zeros_like(total) for total in totals]

    def call() -> None:
        for array, host, total in zip(operands, hosts, totals, strict=True):
            array.get(out=host)
            ranks.comm.Allreduce(host, total)
            array.set(total)

    return Variant("mpi4py, through the host", call, operands)


def _sum_each(ranks: Ranks, sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """The usual loop over a list of gradients."""
    allreduce = ranks.comm.Allreduce
    for source, target in zip(sources, targets, strict=True):
        allreduce(source, target)
