"""What variables use of a strategy, and what policies and writes use of a variable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from mpistrategy.arrays.dtypes import Array
    from mpistrategy.mpi.interface.ranks import Ranks
    from mpistrategy.options import VariableAggregation, VariableSynchronization
    from mpistrategy.reduction.reducer import Reducer
    from mpistrategy.variables.storage import VariableSlot


class Extended(Protocol):
    """What variables use of `StrategyExtended`."""

    communicator: Ranks
    _is_local: bool
    _reducer: Reducer
    _variables_made: int

    @property
    def _drives_gpu(self) -> bool:
        """Whether this rank's device is a GPU."""

    def _next_variable_name(self) -> str:
        """Return the name of a variable that is created without one."""

    def _storage_for(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, VariableSlot | None]:
        """Return memory on the host for a variable, and its slot where the ranks share it."""

    def _device_memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return GPU memory for a variable; None for one on the host."""

    def _register_variable(self, variable: Any) -> None:
        """Record a variable that all ranks have created."""

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any) -> Any:
        """Reduce one value over the replicas."""


class Replica(Protocol):
    """One replica's copy of a variable: a `Variable`, as policies and writes use it."""

    name: str
    _key: str
    _extended: Extended
    _storage: Array

    @property
    def strategy(self) -> Any:
        """The strategy that keeps the copies together."""

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are combined."""

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values are combined."""

    @property
    def local_view(self) -> Array:
        """This replica's copy; not to be written to."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
