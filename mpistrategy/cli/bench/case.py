"""What is measured: cases, each with several variants, and whether every variant is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import is_cupy


class Ranks(Protocol):
    """What the timing uses of `mpistrategy.cli.bench.raw.RawRanks`."""

    rank: int
    size: int

    def barrier(self) -> None: ...

    def greatest(self, values: Array) -> Array: ...


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

    def write(self, value: float) -> None:
        """Rewrite every operand."""
        for operand in self.operands:
            operand.fill(value)
        if self.load is not None:
            self.load()

    def leaves(self, result: Any) -> list[Any]:
        """Return the arrays of a result."""
        written = self.operands if self.results is None else self.results
        leaves = nest.flatten(list(written) if result is None else result)[0]
        return [leaf if is_cupy(leaf) else np.asarray(leaf) for leaf in leaves]

    def read(self, result: Any) -> None:
        """Read every element of a result."""
        for leaf in self.leaves(result):
            leaf.max()


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
        finish: waits until a call is done, where calls return before that: on GPUs.
    """

    suite: str
    name: str
    nbytes: int
    variants: list[Variant]
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)
    batch: int | None = None
    finish: Callable[[], object] = lambda: None


def is_right(variant: Variant, ranks: Ranks) -> bool:
    """Return whether the sum of known numbers is right on every rank.  Collective."""
    with variant.within:
        if variant.check is not None:
            right = variant.check()
        else:
            variant.write(ranks.rank + 1)
            ranks.barrier()
            expected = ranks.size * (ranks.size + 1) // 2
            right = all(bool((leaf == expected).all()) for leaf in variant.leaves(variant.call()))
    return not ranks.greatest(np.array([float(not right)]))[0]
