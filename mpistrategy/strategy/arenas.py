"""Making arenas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from mpistrategy.arrays.dtypes import Array
from mpistrategy.reduction.arena.arena import Arena, Extended
from mpistrategy.strategy.overloads import T
from mpistrategy.variables.variable import Variable


class Arenas:
    """The part of a Strategy that makes arenas."""

    if TYPE_CHECKING:

        @property
        def extended(self) -> Extended: ...

    @overload
    def arena(
        self, like: Sequence[Variable], *, shared_result: bool = False, name: str | None = None
    ) -> Arena[Sequence[Array]]: ...
    @overload
    def arena(self, like: T, *, shared_result: bool = False, name: str | None = None) -> Arena[T]: ...
    def arena(self, like: Any, *, shared_result: bool = False, name: str | None = None) -> Arena[Any]:
        """Lay out a nest of arrays so that reducing it copies nothing.  Collective.

        Args:
            like: arrays, numbers or variables in any nest; only structure, shapes and dtypes count.
            shared_result: give all ranks of a node one read-only result, and leave `values` as they are.
            name: is compared between the ranks instead of the call site.

        Returns:
            An `Arena`: fill its `values` in place, then ``context.all_reduce(op, arena)``.

        Raises:
            EmptyBatchError, DTypeError, LeafError, CollectiveMismatchError: on every rank.

        >>> import numpy as np, mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> arena = strategy.arena({"w": np.ones((2, 2)), "b": np.ones(2)})
        >>> arena.values["b"][...] = 1
        >>> strategy.reduce("SUM", arena)["b"]
        array([1., 1.])
        """
        return Arena(self, like, shared_result=shared_result, name=name)
