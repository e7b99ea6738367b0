"""What is measured: cases, each with several variants, and whether every variant is right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array


class Ranks(Protocol):
    """What the timing uses of `mpistrategy.cli.bench.raw.RawRanks`."""

    rank: int
    size: int

    def barrier(self) -> None: ...

    def greatest(self, values: Array) -> Array: ...

    def all_equal(self, digest: bytes) -> bool: ...


@dataclass
class Variant:
    """One implementation of a case.

    Attributes:
        name: its row in the tables.
        call: runs it; returns the result (a nest of arrays or numbers), or None when it is in `results`.
        operands: this rank's arrays that are rewritten before every call.
        results: where `call` writes to; None means the operands themselves.
        check: runs it once and returns whether the result is right here; None: the result is the sum of the operands.
        load: copies the rewritten operands to where `call` reads them, if it does not read the arrays themselves.
        close: frees what the variant holds.  Collective.
        within: entered for the variant's turn; not timed.  Collective.
    """

    name: str
    call: Callable[[], Any]
    operands: Sequence[Array]
    results: Sequence[Array] | None = None
    check: Callable[[], bool] | None = None
    load: Callable[[], object] | None = None
    close: Callable[[], object] | None = None
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def writer(self) -> Callable[[float], object]:
        """Return what rewrites every operand; with little Python, since it runs between short calls."""
        if len(self.operands) == 1 and self.load is None:
            return self.operands[0].fill

        def write(value: float) -> None:
            for operand in self.operands:
                operand.fill(value)
            if self.load is not None:
                self.load()

        return write

    def reader(self, result: Any) -> Callable[[Any], object]:
        """Return what reads every element of results like this one."""
        if result is None:
            written = list(self.operands if self.results is None else self.results)
            results = written[0] if len(written) == 1 else written
            read = self.reader(results)
            return lambda _: read(results)
        if isinstance(result, (list, tuple, dict)):
            readers = [self.reader(part) for part in (result.values() if isinstance(result, dict) else result)]

            def read_all(results: Any) -> None:
                parts = results.values() if isinstance(results, dict) else results
                for read, part in zip(readers, parts, strict=True):
                    read(part)

            return read_all
        if isinstance(result, np.ndarray) and result.ndim > 0:
            read_array: Any = np.ndarray.item if result.size == 1 else np.ndarray.max
            return cast(Callable[[Any], object], read_array)
        if getattr(result, "shape", ()) != ():
            return lambda array: np.asarray(array).max()  # another library's
        return float


@dataclass
class Case:
    """One operation and its variants; ratios are relative to the first.

    Attributes:
        suite: the group that it belongs to.
        name: e.g. ``"64 MiB"``.
        nbytes: what each rank contributes.
        variants: at least one.
        within: what is entered while its variants are called.
        batch: how many calls are timed together; None: by their length.
    """

    suite: str
    name: str
    nbytes: int
    variants: list[Variant]
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)
    batch: int | None = None


def is_right(variant: Variant, ranks: Ranks) -> bool:
    """Sum a pattern over the ranks; say whether every rank has the right result, and all the same bits.  Collective."""
    with variant.within:
        return _is_right(variant, ranks)


def _is_right(variant: Variant, ranks: Ranks) -> bool:
    if variant.check is not None:
        return not ranks.greatest(np.array([float(not variant.check())]))[0]
    for index, operand in enumerate(variant.operands):
        operand[...] = _pattern(operand, index, 1, ranks.rank)
    if variant.load is not None:
        variant.load()
    ranks.barrier()
    result = variant.call()
    if result is None:
        result = list(variant.operands if variant.results is None else variant.results)
    leaves = nest.flatten(result)[0]
    if len(leaves) != len(variant.operands):  # a structure of numbers that were loaded from one array
        leaves = [np.array(leaves)]
    total_of_ranks = ranks.size * (ranks.size - 1) // 2
    digest, right = hashlib.sha256(), True
    for index, (leaf, operand) in enumerate(zip(leaves, variant.operands, strict=True)):
        expected = _pattern(operand, index, ranks.size, total_of_ranks)
        right = right and bool((np.reshape(leaf, operand.shape) == expected).all())
        digest.update(np.ascontiguousarray(leaf).data)
    wrong_somewhere = ranks.greatest(np.array([float(not right)]))[0]
    return ranks.all_equal(digest.digest()) and not wrong_somewhere


def _pattern(like: Array, index: int, times: int, plus: int) -> Array:
    """Return small integers, whose sums are exact, and which differ by position and array."""
    return np.resize((np.arange(251) + index % 7) * times + plus, like.shape).astype(like.dtype)
