"""What the reductions below `CrossDeviceOps` ask of an algorithm, which is its base class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.plan import Plan
from mpistrategy.reduction.routes.base import Description


class OnDevice(NamedTuple):
    """An all-reduce of arrays in GPU memory that has been packed, and on which the ranks have yet to agree.

    Attributes:
        route: how they are combined: a `mpistrategy.reduction.routes.gpu.GpuRoute`.
        arrays: the arrays.
        memory: what has been packed.
        words: what the ranks compare.
    """

    route: Any
    arrays: list[Any]
    memory: Any
    words: dict[str, Any]


class Algorithm(ABC):
    """A `CrossDeviceOps`, as this folder uses it; the defaults are those of a program's own, of which nothing is known.

    Attributes:
        _in_rank_order: whether a sum in rank order is what it would return: arenas may then be reduced in place.  A
            subclass says so itself, or it is not.
        _num_packs: see `mpistrategy.reduction.layout.packing.plan`.
        _device_path: the path of arrays in GPU memory; "" leaves it to the options.
    """

    _in_rank_order: bool = False
    _num_packs: float = 0
    _device_path: str = ""

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls._in_rank_order = bool(cls.__dict__.get("_in_rank_order"))

    def explain_implementation(self, reduce_op: ReduceOp, count: int) -> str:
        """Return what `Strategy.explain` says of so many arrays and this operation, in a line; to be overridden.

        Args:
            reduce_op: how they are combined.
            count: how many there are.
        """
        return f"{type(self).__name__} reduces them: its routes are not known"

    def _explained(
        self, ranks: Ranks, op: ReduceOp, given: Sequence[Any], options: CommunicationOptions
    ) -> tuple[list[Description], list[str]]:
        """Return what `Strategy.explain` says of buffers, and lines about what is in none."""
        return [], [self.explain_implementation(op, len(given))]

    @property
    def _configuration(self) -> str:
        """What must be equal on all ranks for their messages to fit together."""
        return type(self).__name__

    def _settings(self, options: CommunicationOptions) -> str:
        """Return the configuration and the options of one call, as far as they shape the messages."""
        shown = f"{self._configuration}, bytes_per_pack={options.bytes_per_pack}, wire={options.wire}"
        chosen: Any = options.implementation
        return shown if chosen is CommunicationImplementation.AUTO else f"{shown}, implementation={chosen.name}"

    def _plan_for(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Plan | None:
        """Return how arrays on the host are reduced; None where each call must be looked at.

        Raises:
            MpiStrategyError: for what it cannot reduce.
        """
        return None

    def _gpu_word(self, ranks: Ranks, options: CommunicationOptions) -> str | None:
        """Return the path that is asked for, for arrays in GPU memory; None where plans do not serve them."""
        return None

    def _begin_on_device(
        self,
        ranks: Ranks,
        op: ReduceOp,
        given: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None,
        where: str,
    ) -> OnDevice | None:
        """Return an all-reduce of arrays in GPU memory, packed; None where these are not all, or go by the host."""
        return None

    @abstractmethod
    def _all_reduce_values(
        self,
        call: Call,
        communicator: Ranks,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
        *,
        is_batch: bool = True,
    ) -> list[Any]:
        """Return the reductions of `values` on every rank: this rank's components, or Mirrored; inside `call`.

        The results may be written to `outs`, which are arrays of their dtypes and shapes.  Without `is_batch` one value
        is reduced by `reduce`.
        """
