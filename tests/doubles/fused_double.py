"""What the kernel of optimizers does on the double of CuPy: its program's lines are read as Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.training import gpu_update

At = Callable[[int, int], np.ndarray]


def update(at: At, program: str, grid: Any, block: Any, args: Sequence[Any]) -> tuple[Callable[[], None], list[Any]]:
    """Return what a launch does, and the memory that this touches; `at` finds memory by its address."""
    table, numbers, count = args
    assert type(count) is np.int32
    defined = dict(re.findall(r"#define (\w+) (\w+)\n", program))
    dtype = np.dtype(next(name for name, kind in gpu_update.TYPES.items() if kind == defined["Element"]))
    code = program.partition("Element t[SCRATCH];\n")[2].partition("\n}")[0]
    told = table.view(gpu_update.table_of(int(defined["POINTERS"])))[0]
    sizes = told["size"][: int(count)].tolist()
    blocks = [-(-size // gpu_update.BLOCK_ELEMENTS) for size in sizes]
    assert told["first"][: int(count)].tolist() == [sum(blocks[:number]) for number in range(int(count))]
    assert (grid, block) == ((sum(blocks),), (gpu_update.THREADS,))
    rows = [
        [at(int(address), size * dtype.itemsize).view(dtype) for address, size in zip(row, sizes, strict=False)]
        for row in told["addresses"]
    ]
    with np.errstate(over="ignore"):
        values = numbers.view(np.float64).astype(dtype)

    def do() -> None:
        with np.errstate(all="ignore"):
            for arrays in zip(*rows, strict=True):
                known: dict[str, Any] = {"x": [*arrays], "t": [None, None], "n": values, "root": np.sqrt}
                exec(code, known)
                for array, found in zip(arrays, known["x"], strict=True):
                    array[...] = found

    return do, [view for row in rows for view in row]
