"""Variables: a copy on every replica; the table in `policies` says when and how the copies are combined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, SupportsIndex, overload

import numpy as np

from mpistrategy import context
from mpistrategy.arrays.convert import array_where_it_is, copy_of, host_array, is_on_device
from mpistrategy.arrays.dtypes import Array, dtype_name, is_bfloat16
from mpistrategy.arrays.values import ArrayLike, may_differ
from mpistrategy.context import Mode
from mpistrategy.errors import (
    ContextError,
    CopyError,
    DTypeError,
    OptionError,
    OptionTypeError,
    OutsideStepWarning,
    UnsupportedError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.objects.jax_traces import in_jax_trace, refusal
from mpistrategy.objects.nearest import refuses
from mpistrategy.objects.settings import Fixed, Settable, Setting, cannot_be_set, checked_switch
from mpistrategy.options import (
    Aggregation,
    Synchronization,
    VariableAggregation,
    VariableSynchronization,
    checked_member,
)
from mpistrategy.variables.policies import CREATION, NEEDS_FLOATING, Policy, own, policies_of
from mpistrategy.variables.protocols import Extended
from mpistrategy.variables.writes import Write, converted, differing, plain

if TYPE_CHECKING:
    from mpistrategy.variables.storage import VariableSlot


_USE_LOCKING = "Leave it out: one thread updates a variable."


def _fixed(variable: Variable, what: str) -> UnsupportedError:
    return UnsupportedError.at(
        f"Variable.{what}",
        found=f"an attempt to change it on {variable.name!r}",
        expected=f"the {what} that the variable was created with",
        fix="Create another variable.",
    )


class Variable(ArrayLike, Settable):
    """An array that a strategy keeps on every replica.  Creation is collective.

    Created in `strategy.scope()` (or in a step function), a variable belongs to the strategy; elsewhere it belongs to
    the default strategy and lives on this rank alone.  Once a strategy of several ranks was made, that is refused for
    a variable whose copies are to be combined (ON_READ, or an aggregation), and warns for others.

    It acts as an array: arithmetic, comparison, indexing and `np.asarray` read it.  Writes go into the same memory, so
    a view follows them.

    On a strategy of GPUs a variable is a CuPy array on its rank's GPU; a variable without axes stays on the host, and
    reads as a NumPy scalar.  Assigned values may be on the host or on the GPU.  A view of GPU memory is writable.

    Reading and writing depend on the synchronization, the aggregation and the context; the whole table is
    `mpistrategy.variables.policies.POLICIES`.

    Args:
        initial_value: an array, a number, or a function without arguments that returns one.  Replica 0's value is
            sent to all replicas; shape and dtype must be equal everywhere.
        trainable: whether optimizers should change it; None means True unless it is ON_READ.
        dtype: the dtype; None means that of the initial value.
        name: a name for messages and checkpoints, equal on all ranks; None means a numbered one.
        synchronization: a VariableSynchronization or its name.  AUTO and ON_WRITE keep the copies equal at every
            write; ON_READ lets every replica have its own and combines them when they are read in cross-replica
            context.
        aggregation: a VariableAggregation or its name: how the replicas' values are combined.

    Attributes:
        name, trainable, aggregation: as above.
        strategy: the strategy that keeps the copies together.
        synchronization: when the copies are combined; AUTO has become ON_WRITE where there are several copies.

    Raises:
        ContextError: for every read and write in a function that JAX traces.
        OptionError: for an unknown synchronization or aggregation; NONE synchronization with several replicas; MEAN of
            a dtype that is not floating.
        DTypeError, LeafError: for initial values that are no arrays.
        ContextError: outside scope(), as above.
        CollectiveMismatchError: when the ranks create different variables.
    """

    name: Fixed[str] = Fixed()
    trainable: Setting[bool] = Setting(checked_switch)
    strategy: Fixed[Any] = Fixed(cannot_be_set)
    synchronization: Fixed[VariableSynchronization] = Fixed(_fixed)
    aggregation: Fixed[VariableAggregation] = Fixed(_fixed)

    @collective("create")
    def __init__(
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        dtype: Any = None,
        name: str | None = None,
        synchronization: Synchronization = VariableSynchronization.AUTO,
        aggregation: Aggregation = VariableAggregation.NONE,
    ) -> None:
        self.strategy = strategy = context.current_strategy()
        extended: Extended = strategy.extended
        communicator = extended.communicator
        with Call(communicator.guard, "Variable") as call:
            self.aggregation = checked_member(VariableAggregation, aggregation, "Variable", "aggregation")
            given = checked_member(VariableSynchronization, synchronization, "Variable", "synchronization")
            creation = CREATION[given]
            _check_place(given, self.aggregation)
            self.synchronization = _kept_as(given, extended)
            self.trainable = creation.trainable if trainable is None else trainable
            if name is not None and not isinstance(name, str):
                raise OptionTypeError.at("Variable", found=f"name={name!r}", expected="a string")
            own_name = "Variable" if name is None else name
            call.name = f"{call.name}: {own_name}" if call.name else own_name
            try:
                with call.own_work():
                    value = initial_value() if callable(initial_value) else initial_value
            finally:
                call.expect_more()  # the function may have made collectives; the others wait at the next step
            if not extended._is_local and may_differ(value):
                raise differing(call.where, "all copies start with it")
            array = array_where_it_is(plain(value), call.where, name="initial_value")
            wanted = array.dtype if dtype is None else _parsed_dtype(dtype)
            _check_dtype(wanted, self.aggregation, extended)
            if array.dtype != wanted:
                array = converted(host_array(array), wanted, f"Variable {own_name!r} with dtype={dtype_name(wanted)}")
            on_device = extended._device_memory(wanted, array.shape)
            call.agree(
                "create",
                op=f"{self.synchronization.name}/{self.aggregation.name}",
                values=((dtype_name(wanted), array.shape),),
                destination="the host" if on_device is None else "a GPU",
            )
            # Allocated after the agreement: when some ranks refuse, the ranks' memory must stay equal.
            if on_device is None:
                storage, slot = extended._storage_for(wanted, array.shape)
                storage[...] = host_array(array)
                communicator.bcast(storage, 0)
            else:
                from mpistrategy.reduction.routes.on_device import write_that_of  # here, for the quick import

                storage, slot = on_device, None
                write_that_of(communicator, 0, array, on_device)
        # Numbered after the agreement: a creation that some ranks refused must not be counted.
        self.name = extended._next_variable_name() if name is None else name
        #: This replica's copy, which optimizers and checkpoints also change in place.
        self._storage: Array = storage
        #: The position in memory that the ranks of a node share; None for memory that is not shared.
        self._memory_slot: VariableSlot | None = slot
        self._view: Array = (view := storage.view())
        if not is_on_device(view):  # CuPy has no read-only arrays
            view.flags.writeable = False
        #: The part of the strategy that does the work.
        self._extended = extended
        self._policies = policies_of(self)
        #: Names this variable when ranks compare their calls; names need not be unique.
        self._key: str = f"{self.name} (variable {extended._variables_made})"
        #: The variable in whose `colocate_vars_with` block this one was created, if any.
        self._colocated_with: Variable | None = None
        extended._register_variable(self)

    __hash__ = object.__hash__  # by identity: a variable may be a key, although == compares elements
    # ------------------------------------------------------------------------------------------- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; reading it never communicates."""
        return self._storage.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype; reading it never communicates."""
        return self._storage.dtype

    @property
    def local_view(self) -> Array:
        """A view of this replica's copy, which follows every write; not to be written to.  Never communicates."""
        if in_jax_trace():
            raise refusal(f"reading {self.name!r}")
        return self._view

    def _contribution(self) -> Array:
        """Return this replica's copy: its value in a reduction."""
        return self.local_view

    def _may_differ(self) -> bool:
        own_copies = self.synchronization is VariableSynchronization.ON_READ and not self._extended._is_local
        return own_copies and self._policy("reading a variable").read is own

    def __copy__(self) -> NoReturn:
        raise _no_copy(self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _no_copy(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise _no_copy(self)

    def numpy(self, *, name: str | None = None) -> Array:
        """Return a copy of the value on the host, read as by `read_value`; ``v[...]`` is a view of the variable."""
        return np.array(host_array(self._read(name)), copy=True)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        policy = f"{self.synchronization.name}/{self.aggregation.name}"
        stored = np.array2string(host_array(self._storage), threshold=8, separator=", ")
        return f"<Variable {self.name!r} shape={self.shape} dtype={dtype_name(self.dtype)} {policy}, here {stored}>"

    # ---------------------------------------------------------------------------------------------- reading

    def read_value(self, *, name: str | None = None) -> Array:
        """Return a copy of the value, on the variable's device; a NumPy scalar of a variable without axes.

        Local, except for an ON_READ variable in cross-replica context: its copies are combined, which is collective.

        Args:
            name: is compared between the ranks instead of the call site.

        Raises:
            AggregationError: for an ON_READ variable with aggregation NONE in cross-replica context.
            ContextError: in the context of another strategy; in a function that JAX traces.
        """
        value = self._read(name)
        if is_on_device(value):
            return copy_of(value)  # type: ignore[no-any-return]
        copied = np.array(value, copy=True)
        return copied if self.shape else copied[()]  # CuPy computes with NumPy's scalars, but not with its 0-d arrays

    def value(self, *, name: str | None = None) -> Array:
        """Return what `read_value` returns."""
        return self.read_value(name=name)

    def local_copy(self) -> Array:
        """Return a copy of this replica's copy; never communicates."""
        return copy_of(self.local_view)  # type: ignore[no-any-return]

    def _read(self, name: str | None = None) -> Array:
        return self._policy("reading a variable").read(self, name)

    def _kept(self) -> Any:
        # What an ON_READ variable reads as may be a sum that nothing holds.
        return None if self.synchronization is VariableSynchronization.ON_READ else self._read()

    def _array(self, asked: str) -> Array:
        # A method that communicated would hang a program that calls it on one rank, as it may with an array.
        if self._policy(f"Variable.{asked}").read is not own:
            raise ContextError.at(
                f"Variable.{asked}",
                found=f"the ON_READ variable {self.name!r} outside steps, where each rank has its own value",
                expected="one value for all ranks, or this rank's own",
                fix=f"Write v.read_value().{asked}: read_value is collective, so call it on all ranks; "
                "or v.local_view for this rank's copy.",
            )
        return self.local_view

    # ---------------------------------------------------------------------------------------------- writing

    def _assigned(self, new: str, operator: str = "") -> str:
        return {"add": "v.assign_add(x)", "subtract": "v.assign_sub(x)"}.get(operator, f"v.assign({new})")

    @overload
    def assign(self, value: Any, *, read_value: Literal[True] = True, name: str | None = None) -> Self: ...
    @overload
    def assign(self, value: Any, *, read_value: bool, name: str | None = None) -> Self | None: ...
    @refuses(use_locking=_USE_LOCKING)
    def assign(self, value: Any, *, read_value: bool = True, name: str | None = None) -> Self | None:
        """Write `value` and return the variable.

        In a step function, a write to an ON_WRITE variable is collective: the replicas' values are combined as the
        aggregation says.  In cross-replica context, a write to an ON_WRITE variable is local: every rank writes its own
        value.  A write to an ON_READ variable is collective there; with SUM, each copy gets its share of the value.  In
        an update, writes are local.

        Args:
            value: an array of the variable's dtype and shape, or a number or list that fits without loss.
            read_value: False returns None.
            name: is compared between the ranks instead of the call site.

        Raises:
            AggregationError: in a step function, for an ON_WRITE variable with aggregation NONE.
            DTypeError, ShapeError, LeafError: when `value` does not fit; no replica that takes part has written then.
            ContextError: in the context of another strategy; in a function that JAX traces.
        """
        written = self._write("assign", value, name)
        return written if read_value else None

    @overload
    def assign_add(self, value: Any, *, read_value: Literal[True] = True, name: str | None = None) -> Self: ...
    @overload
    def assign_add(self, value: Any, *, read_value: bool, name: str | None = None) -> Self | None: ...
    @refuses(use_locking=_USE_LOCKING)
    def assign_add(self, value: Any, *, read_value: bool = True, name: str | None = None) -> Self | None:
        """Add `value`; otherwise as `assign`.  In a step function with SUM, the sum over the replicas is added once.

        Raises:
            AggregationError: also for an ON_READ variable with aggregation SUM in cross-replica context.
        """
        written = self._write("assign_add", value, name)
        return written if read_value else None

    @overload
    def assign_sub(self, value: Any, *, read_value: Literal[True] = True, name: str | None = None) -> Self: ...
    @overload
    def assign_sub(self, value: Any, *, read_value: bool, name: str | None = None) -> Self | None: ...
    @refuses(use_locking=_USE_LOCKING)
    def assign_sub(self, value: Any, *, read_value: bool = True, name: str | None = None) -> Self | None:
        """Subtract `value`; otherwise as `assign_add`."""
        written = self._write("assign_sub", value, name)
        return written if read_value else None

    @refuses(use_locking=_USE_LOCKING)
    def scatter_add(self, sparse_delta: Any, *, name: str | None = None) -> Self:
        """Add rows: ``sparse_delta.values[i]`` to row ``sparse_delta.indices[i]``; repeated indices add up.

        In a step function, all replicas' rows are added (MEAN divides them by the number of replicas).

        Args:
            sparse_delta: IndexedSlices.
            name: is compared between the ranks instead of the call site.

        Raises:
            UnsupportedError: for an ON_READ variable.
            AggregationError: in a step function, for an ON_WRITE variable with aggregation NONE.
            ShapeError, DTypeError, OptionTypeError: when `sparse_delta` does not fit; nothing has been written then.
        """
        return self._write("scatter_add", sparse_delta, name)

    @refuses(use_locking=_USE_LOCKING)
    def scatter_sub(self, sparse_delta: Any, *, name: str | None = None) -> Self:
        """Subtract rows; otherwise as `scatter_add`."""
        return self._write("scatter_sub", sparse_delta, name)

    @refuses(use_locking=_USE_LOCKING)
    def scatter_update(self, sparse_delta: Any, *, name: str | None = None) -> Self:
        """Replace rows; otherwise as `scatter_add`.  Not with the aggregations SUM and MEAN."""
        return self._write("scatter_update", sparse_delta, name)

    @refuses(use_locking=_USE_LOCKING)
    def scatter_max(self, sparse_delta: Any, *, name: str | None = None) -> Self:
        """Replace rows by the elementwise maximum with the given rows; otherwise as `scatter_update`."""
        return self._write("scatter_max", sparse_delta, name)

    def _write(self, method: str, value: Any, name: str | None) -> Self:
        where, column = _WRITES[method]
        getattr(self._policy(where), column)(Write(self, method, where, value, name))
        return self

    def _policy(self, where: str) -> Policy:
        frame = context.current_frame()
        if frame is None or (frame.strategy._is_default and self.strategy is not frame.strategy):
            return self._policies[Mode.CROSS_REPLICA]
        if not self._extended._is_local:
            context.require_same_strategy(frame, self.strategy, where)
        return self._policies[frame.mode]


#: The public name of each method that writes, and which column of the policy table it is in.
_WRITES = {
    "assign": ("Variable.assign", "assign"),
    "assign_add": ("Variable.assign_add", "add"),
    "assign_sub": ("Variable.assign_sub", "add"),
    "scatter_add": ("Variable.scatter_add", "scatter_add"),
    "scatter_sub": ("Variable.scatter_sub", "scatter_add"),
    "scatter_update": ("Variable.scatter_update", "scatter_set"),
    "scatter_max": ("Variable.scatter_max", "scatter_set"),
}


def _no_copy(variable: Variable) -> CopyError:
    return CopyError.at(
        f"copying or pickling {variable.name!r}",
        found="a copy of a variable",
        expected="a new variable, which all ranks create together",
        fix="Copy or send v.read_value() (an array), or save the variable with a Checkpoint.",
    )


# ------------------------------------------------------------------------------------- arguments of the constructor


def _check_place(synchronization: VariableSynchronization, aggregation: VariableAggregation) -> None:
    """Raise ContextError, or warn, outside every scope once a strategy of several ranks was made.

    A variable is then this rank's own.  It raises where the ranks' values are to be combined.
    """
    is_combined = synchronization is VariableSynchronization.ON_READ or aggregation is not VariableAggregation.NONE
    if is_combined:
        context.refuse_outside("Variable", f"a variable {synchronization.name}/{aggregation.name}")
    elif context.current_frame() is None and context.has_peers():
        warn(
            "Variable was made outside scope(): it is this rank's own, and its values may differ between ranks. Make "
            "it in `with strategy.scope():`. If this rank alone is meant, make it in the scope of a OneDeviceStrategy.",
            OutsideStepWarning,
        )


def _kept_as(given: VariableSynchronization, extended: Extended) -> VariableSynchronization:
    """Return the synchronization that a variable gets.

    Raises:
        OptionError: for one that variables of several replicas cannot have.
    """
    if extended._is_local:
        return given
    kept = CREATION[given].kept_as
    if kept is None:
        raise OptionError.at(
            "Variable",
            found=f"synchronization={given.name} in the scope of a strategy of several replicas",
            expected="AUTO, ON_WRITE or ON_READ",
            fix="Create variables of one rank in the scope of a OneDeviceStrategy.",
        )
    return kept


def _check_dtype(dtype: np.dtype[Any], aggregation: VariableAggregation, extended: Extended) -> None:
    """Raise DTypeError or OptionError for a dtype that variables with this aggregation cannot have."""
    if dtype.hasobject or dtype.kind in "SU":
        raise DTypeError.at("Variable", found=f"dtype {dtype}", expected="a numeric or bool dtype")
    floating = dtype.kind == "f" or is_bfloat16(dtype)
    if aggregation in NEEDS_FLOATING and not floating and not extended._is_local:
        raise OptionError.at(
            "Variable",
            found=f"aggregation={aggregation.name} of dtype {dtype_name(dtype)}",
            expected="a floating dtype",
            fix="Use SUM.",
        )


def _parsed_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype; raise DTypeError for what is none."""
    try:
        parsed: np.dtype[Any] = np.dtype(dtype)
        return parsed
    except TypeError as error:
        raise DTypeError.at("Variable", found=f"dtype={dtype!r}", expected="a NumPy dtype") from error
