"""Placement: the variables of a strategy and the devices they are on."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy import context
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.errors import ContextError, OptionError, OptionTypeError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.variables.storage import VariableStorage
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy.arrays.gpu import DeviceArray
    from mpistrategy.variables.storage import VariableSlot


class Placement:
    """The part of StrategyExtended for devices and variables.

    Args:
        container_strategy: the strategy it belongs to.
    """

    communicator: Communicator

    def __init__(self, container_strategy: Any) -> None:
        self._container_strategy = container_strategy
        self._colocated_with: list[Variable] = []
        self._unnamed_variables = 0
        #: How many variables have been created; the same on every rank.
        self._variables_made: int = 0
        # By number; weak, so a variable can be collected.
        self._variables: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()

    def colocate_vars_with(self, colocate_with_variable: Variable) -> contextlib.AbstractContextManager[None]:
        """Colocate the variables created in the ``with`` block with another variable; only inside scope().

        Every replica has a copy of every variable, so this only records the relation.

        Args:
            colocate_with_variable: a variable of this strategy.

        Raises:
            ContextError: outside scope().
            OptionError: when the argument is not a variable of this strategy.
        """
        frame = context.current_frame()
        if frame is None or frame.strategy is not self._container_strategy:
            raise ContextError.at(
                "StrategyExtended.colocate_vars_with",
                found="a call outside scope()",
                expected="a call inside strategy.scope()",
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise OptionError.at(
                "StrategyExtended.colocate_vars_with",
                found=repr(colocate_with_variable),
                expected="a variable created in this strategy's scope",
            )
        return self._colocating(colocate_with_variable)

    @contextlib.contextmanager
    def _colocating(self, variable: Variable) -> Iterator[None]:
        self._colocated_with.append(variable)
        try:
            yield
        finally:
            self._colocated_with.pop()

    def _next_variable_name(self) -> str:
        """Return the name of a variable created without one; the same on every rank, since creation is collective."""
        return f"Variable_{self._unnamed_variables}"

    @property
    def _variable_storage(self) -> VariableStorage:
        """Where variables lie: shared by all copies of a strategy, which have the same ranks."""
        return self.communicator.once("variables", VariableStorage)

    def _storage_for(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, VariableSlot | None]:
        """Return memory for a variable, and its slot where the ranks share it.  Collective, in an agreed call."""
        return self._variable_storage.allocate(self.communicator, dtype, shape)

    def _device_memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray | None:
        """Return GPU memory for a variable; None for a variable on the host.

        Those are the variables on CPUs, and variables without axes (counters, totals, rates): Python reads them often,
        and each read would wait for the GPU.
        """
        if not shape or not self._drives_gpu:
            return None
        cupy = cupy_for("a variable on a GPU")
        with cupy.cuda.Device(self.communicator.devices[self.communicator.rank].index):
            return cupy.empty(shape, dtype)

    @property
    def _drives_gpu(self) -> bool:
        """Whether this rank's device is a GPU."""
        return gpu_of(self.communicator.devices, self.communicator.rank) is not None

    def _register_variable(self, variable: Variable) -> None:
        """Record a variable that was created for this strategy."""
        # Counted only after all ranks have created it: a refused creation must leave the numbers equal.
        self._variables[self._variables_made] = variable
        self._variables_made += 1
        self._unnamed_variables += variable.name == self._next_variable_name()
        variable._colocated_with = self._colocated_with[-1] if self._colocated_with else None

    def _variables_alive(self) -> list[tuple[int, Variable]]:
        """Return the variables that are still in use on this rank, with their numbers, in order of creation.

        A number means the same variable on all ranks.  The ranks' lists may differ: garbage is collected at any time.
        """
        return sorted(self._variables.items(), key=lambda item: item[0])

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether `v` is a variable of this strategy."""
        return isinstance(v, Variable) and v.strategy is self._container_strategy

    def value_container(self, value: Any) -> Any:
        """Return the container of a component: here the value itself."""
        return value

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return the devices of variables that are no slots of another variable: this rank's device.

        Args:
            var_list: is not looked at; TensorFlow has it.
        """
        return self.worker_devices

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """This rank's device, as a tuple of one full device string."""
        return (str(self.communicator.devices[self.communicator.rank]),)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device of this rank's copies of the variables: the same as `worker_devices`."""
        return self.worker_devices

    # ------------------------------------------------------------------ what other libraries ask of a strategy

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether every step must have arrays of the same shapes: no."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether several processes run this program: with more than one rank."""
        return self.communicator.size > 1

    @property
    def experimental_should_init(self) -> bool:
        """Whether this rank makes the initial values of variables: every rank does, and rank 0's are used."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoint files: rank 0 does."""
        return self.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes logs and summaries: rank 0 does."""
        return self.communicator.rank == 0

    def read_var(self, v: Variable, *, name: str | None = None) -> Array:
        """Return the value of a variable: of an ON_READ one, in cross-replica context, the aggregate (collective).

        Args:
            v: the variable.
            name: is compared between the ranks instead of the call site.

        Raises:
            OptionTypeError: when `v` is not a variable.
        """
        if not isinstance(v, Variable):
            raise OptionTypeError.at("StrategyExtended.read_var", found=f"v={v!r}", expected="a Variable")
        return v.read_value(name=name)
