"""What the kernels of optimizers do on the double of CuPy: `KERNELS`, as those of cupy_double."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mpistrategy.training import kernels
from mpistrategy.training.gpu import norm_kernel, update_kernel
from mpistrategy.training.gpu.update_kernel import ADAM, MOMENTUM, NESTEROV, SGD, Formula

At = Callable[[int, int], np.ndarray]
Done = tuple[Callable[[], None], list[np.ndarray]]
#: The steps on the host, of a formula's numbers.
STEPS: dict[str, Callable[..., kernels.Kernel]] = {
    SGD.name: lambda rate, *_: kernels.Sgd(rate),
    MOMENTUM.name: lambda rate, decay, *_: kernels.Momentum(rate, decay, False),
    NESTEROV.name: lambda rate, decay, *_: kernels.Momentum(rate, decay, True),
}
FORMULAS = [each for formula in (SGD, MOMENTUM, NESTEROV, ADAM) for each in (formula, formula.decayed())]


class _Adam:
    """Adam's step of the numbers that the kernel is given, which are rounded: 1 - beta cannot be made of them."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def __call__(self, p: np.ndarray, g: np.ndarray, slots: Any, scratch: Any) -> None:
        size, decay, part, square_decay, square_part, epsilon, *_ = self.numbers
        m, v = slots["m"], slots["v"]
        m[...] = decay * m + part * g
        v[...] = square_decay * v + square_part * g * g
        p[...] = p - size * m / (np.sqrt(v) + epsilon)


def rows_of(at: At, table: Any, count: int, dtype: Any, block: int) -> tuple[list[list[np.ndarray]], int]:
    """Return the arrays of each row of a table, and how many blocks work on them."""
    sizes = table["size"][:count].tolist()
    blocks = [-(-size // block) for size in sizes]
    assert table["first"][:count].tolist() == [sum(blocks[:number]) for number in range(count)]
    rows = [
        [at(int(address), size * dtype.itemsize).view(dtype) for address, size in zip(row, sizes, strict=False)]
        for row in table["addresses"]
    ]
    return rows, sum(blocks)


def _updates(at: At, formula: Formula, dtype: np.dtype[Any], grid: Any, block: Any, args: Sequence[Any]) -> Done:
    table, numbers, scale, count = args
    assert type(count) is np.int32
    rows, blocks = rows_of(at, table.view(formula.table)[0], int(count), dtype, update_kernel.BLOCK_ELEMENTS)
    assert (grid, block) == ((blocks,), (update_kernel.THREADS,))
    values = numbers.view(np.float64).tolist()
    step = STEPS.get(formula.name.removesuffix("_decayed"), _Adam)(*values)
    if formula.name.endswith("_decayed"):
        step = kernels.AfterDecay(values[-1], step)
    factor = at(int(scale), 8).view(np.float64) if scale else None

    def do() -> None:
        with np.errstate(all="ignore"):
            for parameter, gradient, *slots in zip(*rows, strict=True):
                taken = gradient if factor is None else (gradient * float(factor[0])).astype(dtype)
                scratch = [np.empty_like(parameter) for _ in range(kernels.SCRATCH_ARRAYS)]
                step(parameter, taken, dict(zip(formula.slots, slots, strict=True)), scratch)

    return do, [view for row in rows for view in row] + ([] if factor is None else [factor])


def _squares(at: At, dtype: np.dtype[Any], grid: Any, block: Any, args: Sequence[Any]) -> Done:
    table, count, sums, broken = args[0].view(norm_kernel.TABLE)[0], *args[1:]
    rows, blocks = rows_of(at, table, int(count), dtype, norm_kernel.BLOCK_ELEMENTS)
    assert (grid, block) == ((blocks,), (norm_kernel.THREADS,))
    told, flags = at(int(sums), 16 * blocks).view(np.float64), at(int(broken), int(count))

    def do() -> None:
        told[...] = 0.0
        for number, (first, array) in enumerate(zip(table["first"].tolist(), rows[0], strict=False)):
            with np.errstate(all="ignore"):
                told[2 * first] = np.square(array.astype(np.float64)).sum()
            flags[number] = not np.isfinite(array).all()

    return do, [*rows[0], told, flags]


def _norm(at: At, grid: Any, block: Any, args: Sequence[Any]) -> Done:
    sums, count, most, result = args
    parts = at(sums.data.ptr, 16 * int(count)).view(np.float64)
    told = at(result.data.ptr, 16).view(np.float64)

    def do() -> None:
        total = float(sum(map(Fraction, parts.tolist()))) if np.isfinite(parts).all() else float(parts.sum())
        told[0] = math.sqrt(total) if total == total else math.nan
        told[1] = math.nan if not math.isfinite(told[0]) else min(1.0, float(most) / told[0]) if told[0] else 1.0

    return do, [parts, told]


def kernels_on(at: At) -> dict[str, Callable[[Any, Any, Sequence[Any]], Done]]:
    """Return what each kernel does, by its name; `at` finds memory by its address."""
    made: dict[str, Callable[[Any, Any, Sequence[Any]], Done]] = {norm_kernel.SUM_NAME: lambda *told: _norm(at, *told)}
    for name in update_kernel.TYPES:
        dtype = np.dtype(name)
        made[norm_kernel.squares_name(dtype)] = lambda *told, dtype=dtype: _squares(at, dtype, *told)
        for formula in FORMULAS:
            made[formula.kernel_name(dtype)] = lambda *told, f=formula, dtype=dtype: _updates(at, f, dtype, *told)
    return made
