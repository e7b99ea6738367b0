"""Variables: a copy on every replica; the table `POLICIES` says when and how the copies are combined.

`POLICIES` names one of this file's functions for each method and context.  A read returns an array.  A write raises
before anything has changed; a collective write raises on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self, SupportsIndex

import numpy as np

from mpistrategy import context
from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import (
    DeviceArray,
    are_apart,
    array_where_it_is,
    as_device_array,
    copy_of,
    cupy_for,
    host_array,
    is_foreign,
    is_on_device,
    on_device_of,
    placed_as,
    to_array,
)
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name, is_bfloat16, quietly, sum_dtype_of_mean, wire_dtype
from mpistrategy.arrays.values import (
    ArrayLike,
    IndexedSlices,
    PerReplica,
    Reducible,
    event_of_reads,
    local_component,
    parts_of,
)
from mpistrategy.context import Mode
from mpistrategy.errors import (
    AggregationError,
    ContextError,
    CopyError,
    DTypeError,
    DTypeMismatchError,
    MpiStrategyError,
    OptionError,
    OptionTypeError,
    OutsideStepWarning,
    ShapeError,
    UnsupportedError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory, aligned
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Fixed, Settable, Setting, checked_switch, checked_type
from mpistrategy.options import (
    Aggregation,
    ReduceOp,
    Synchronization,
    VariableAggregation,
    VariableSynchronization,
    checked_member,
)
from mpistrategy.reduction.collectives import broadcast
from mpistrategy.reduction.reducer import Reducer

#: The methods with whole values: functions of the storage and an array of its shape.
DENSE: dict[str, Callable[[Array, Array], Any]] = {
    "assign": lambda storage, value: storage.__setitem__(..., value),
    "assign_add": lambda storage, value: np.add(storage, value, out=storage),
    "assign_sub": lambda storage, value: np.subtract(storage, value, out=storage),
}

#: The methods with IndexedSlices: functions of storage, row numbers and rows.  Additions of repeated rows add up; of
#: several updates of one row the last one counts.
SPARSE: dict[str, Callable[[Array, Array, Array], Any]] = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_max": np.maximum.at,
    "scatter_update": lambda storage, indices, values: storage.__setitem__(indices, values),
}

_REDUCE_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}

#: The dtype kinds that a method does not support.
_NOT_FOR_KINDS = {
    "assign_add": "b",
    "assign_sub": "b",
    "scatter_add": "b",
    "scatter_sub": "b",
    "scatter_max": "bc",
}


@dataclass(slots=True)
class Write:
    """One call of `Variable.assign`, `assign_add` or another writing method.

    `checked` raises before anything has changed.  Where ranks write together, `apply` belongs into their call: a rank
    that fails in it has another copy than the others, which must hear of it.

    Attributes:
        variable: the variable.
        method: the name of the method.
        where: its public name, for messages.
        value: the argument of the call.
        called: its name=.
    """

    variable: Variable
    method: str
    where: str
    value: Any
    called: str | None = None

    @property
    def full_name(self) -> str:
        """The method and the variable, for messages."""
        return f"{self.where} of {self.variable.name!r}"

    def checked(self) -> Array | IndexedSlices:
        """Return the value as an array (or slices) of the variable's dtype and shape.

        Raises:
            DTypeError, ShapeError, LeafError, OptionTypeError: when it does not fit; nothing has changed then.
            ContextError: in a function that JAX traces.
        """
        refuse_in_jax_trace(self.where)
        storage, where = self.variable._storage, self.full_name
        if storage.dtype.kind in _NOT_FOR_KINDS.get(self.method, ""):
            raise DTypeError.at(
                where,
                found=f"a variable of dtype {dtype_name(storage.dtype)}",
                expected="a numeric dtype; for a maximum one that can be compared",
            )
        if self.method in SPARSE:
            return _checked_slices(storage, local_component(self.value), where)
        value = plain(self.value)
        if isinstance(value, IndexedSlices):
            raise UnsupportedError.at(where, found="IndexedSlices", expected="an array", fix="Pass slices.to_dense().")
        array = _of_dtype(storage, value, where)
        if array.shape != storage.shape:
            raise ShapeError.at(where, found=f"shape {array.shape}", expected=f"shape {storage.shape}")
        return placed_as(array, storage)

    def apply(self, change: Array | IndexedSlices) -> None:
        """Change the variable, with the result of `checked` or the combination of several replicas' results.

        Rows of a variable in GPU memory are written on the host, so that repeated ones have NumPy's bits.
        """
        storage = self.variable._storage
        if type(storage) is type(change) is np.ndarray:
            DENSE[self.method](storage, change)
            return
        with on_device_of(storage):
            if not isinstance(change, IndexedSlices):
                DENSE[self.method](storage, placed_as(change, storage))
            elif is_on_device(storage):
                distinct_indices, numbers = np.unique(host_array(change.indices), return_inverse=True)
                places = placed_as(distinct_indices, storage)
                rows = host_array(storage[places])
                SPARSE[self.method](rows, numbers, host_array(change.values))
                storage[places] = placed_as(rows, storage)
            else:
                SPARSE[self.method](storage, host_array(change.indices), host_array(change.values))
        guard = self.variable._reducer.communicator.guard
        guard.wait_for_gpu(event_of_reads([local_component(self.value)]))


class Policy(NamedTuple):
    """One row of the table: how a variable is read and written in one context.

    Attributes:
        read: `read_value`, and with it arithmetic, comparison, indexing and conversion; given variables of one policy,
            which are read together, and the call's name=.
        assign: `assign`.
        add: `assign_add` and `assign_sub`.
        scatter_add: `scatter_add` and `scatter_sub`.
        scatter_set: `scatter_update` and `scatter_max`.
    """

    read: Callable[[Sequence[Variable], str | None], list[Array]]
    assign: Callable[[Write], None]
    add: Callable[[Write], None]
    scatter_add: Callable[[Write], None]
    scatter_set: Callable[[Write], None]


class Variable(ArrayLike, Settable, Reducible[Array]):
    """An array that a strategy keeps on every replica.  Creation is collective.

    Created in `strategy.scope()` (or in a step function), a variable belongs to the strategy; elsewhere it belongs to
    the default strategy and lives on this rank alone.  Once a strategy of several ranks was made, that is refused for
    a variable whose copies are to be combined (ON_READ, or an aggregation), and warns for others.

    It acts as an array: arithmetic, comparison, indexing and `np.asarray` read it.  Writes go into the same memory, so
    a view follows them.

    On a strategy of GPUs a variable is a CuPy array on its rank's GPU; a variable without axes stays on the host, and
    reads as a NumPy scalar.  Assigned values may be on the host or on the GPU.  A view of GPU memory is writable.

    Reading and writing depend on the synchronization, the aggregation and the context; the whole table is
    `mpistrategy.variables.variable.POLICIES`.

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

    _written_by = "Write v.assign(x), v.assign_add(x) or v.assign_sub(x)."
    name: Fixed[str] = Fixed()
    trainable: Setting[bool] = Setting(checked_switch)
    strategy: Fixed[Any] = Fixed()
    synchronization: Fixed[VariableSynchronization] = Fixed()
    aggregation: Fixed[VariableAggregation] = Fixed()

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
        extended = strategy.extended
        #: Reduces the replicas' values.
        self._reducer: Reducer = extended._reducer
        communicator, is_alone = self._reducer.communicator, self._reducer.is_alone
        with Call(communicator.guard, "Variable") as call:
            self.aggregation = checked_member(VariableAggregation, aggregation, "Variable", "aggregation")
            sync_mode = checked_member(VariableSynchronization, synchronization, "Variable", "synchronization")
            _check_place(sync_mode, self.aggregation)
            if sync_mode is VariableSynchronization.NONE and not is_alone:
                raise OptionError.at(
                    "Variable",
                    found=f"synchronization={sync_mode.name} in the scope of a strategy of several replicas",
                    expected="AUTO, ON_WRITE or ON_READ",
                    fix="Create variables of one rank in the scope of a OneDeviceStrategy.",
                )
            is_chosen = sync_mode is VariableSynchronization.AUTO and not is_alone
            self.synchronization = VariableSynchronization.ON_WRITE if is_chosen else sync_mode
            self.trainable = sync_mode is not VariableSynchronization.ON_READ if trainable is None else trainable
            checked_type("Variable", "name", name, (str, type(None)), "a string")
            own_name = "Variable" if name is None else name
            call.name = f"{call.name}: {own_name}" if call.name else own_name
            try:
                with call.guard.own_work():
                    value = initial_value() if callable(initial_value) else initial_value
            finally:
                call.expect_more()  # the function may have made collectives; the others wait at the next step
            if not is_alone and may_differ(value):
                raise differing(call.where, "all copies start with it")
            array = array_where_it_is(plain(value), call.where, name="initial_value")
            may_be_mean = self.aggregation is VariableAggregation.MEAN and not is_alone
            variable_dtype = _checked_dtype(array.dtype if dtype is None else dtype, may_be_mean)
            if array.dtype != variable_dtype:
                array = converted(
                    host_array(array), variable_dtype, f"Variable {own_name!r} with dtype={dtype_name(variable_dtype)}"
                )
            on_device = _on_gpu(communicator, array)
            call.agree(
                "create",
                op=self._kind,
                values=((dtype_name(variable_dtype), array.shape),),
                destination="the host" if on_device is None else "a GPU",
            )
            # Allocated after the agreement: when some ranks refuse, the ranks' memory must stay equal.
            if on_device is None:
                storage, slot = communicator.once("variables", VariableStorage).allocate(
                    communicator, variable_dtype, array.shape
                )
                storage[...] = host_array(array)
                communicator.bcast(storage, 0)
            else:
                call.expect_more()
                (storage,), slot = broadcast(communicator, [on_device], 0, call), None
        # Numbered after the agreement: a creation that some ranks refused must not be counted.
        number = extended._variables_made
        self.name = f"Variable_{number}" if name is None else name
        #: This replica's copy, which optimizers and checkpoints also change in place.
        self._storage: Array = storage
        #: The position in memory that the ranks of a node share; None for memory that is not shared.
        self._memory_slot: VariableSlot | None = slot
        self._view: Array = (view := storage.view())
        if not is_on_device(view):  # CuPy has no read-only arrays
            view.flags.writeable = False
        self._policies: dict[Mode, Policy] = dict.fromkeys(Mode, LOCAL)
        if not is_alone:
            self._policies = {mode: POLICIES[self.synchronization, self.aggregation, mode] for mode in Mode}
        elif strategy._is_default and self.synchronization is VariableSynchronization.ON_READ:
            self._policies[Mode.CROSS_REPLICA] = LOCAL._replace(read=own_if_alone)
        #: Names this variable when ranks compare their calls; names need not be unique.
        self._key: str = f"{self.name} (variable {number})"
        extended._variables[number] = self
        extended._variables_made = number + 1

    __hash__ = object.__hash__  # by identity: a variable may be a key, although == compares elements

    # ------------------------------------------------------------------------------------------- what it is

    @property
    def local_view(self) -> Array:
        """A view of this replica's copy, which follows every write; not to be written to.  Never communicates."""
        refuse_in_jax_trace(f"reading {self.name!r}")
        return self._view

    def _contribution(self) -> Array:
        return self._view

    @property
    def _kind(self) -> str:
        """Its synchronization and aggregation, for messages."""
        return f"{self.synchronization.name}/{self.aggregation.name}"

    @property
    def _is_own_here(self) -> bool:
        """Whether a read here returns a copy that may differ from those of other replicas."""
        is_own = self._policy("reading a variable").read is own
        return is_own and self.synchronization is _ON_READ and not self._reducer.is_alone

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyError.at(
            f"copying or pickling {self.name!r}",
            found="a copy of a variable",
            expected="a new variable, which all ranks create together",
            fix="Copy or send v.read_value() (an array), or save the variable with a Checkpoint.",
        )

    def numpy(self, *, name: str | None = None) -> Array:
        """Return a copy of the value on the host, read as by `read_value`; ``v[...]`` is a view of the variable."""
        return np.array(host_array(self._read(name)), copy=True)

    def __repr__(self) -> str:
        stored = np.array2string(host_array(self._storage), threshold=8, separator=", ")
        return f"<Variable {self.name!r} shape={self.shape} dtype={dtype_name(self.dtype)} {self._kind}, here {stored}>"

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
        copied = copy_of(self._read(name))
        return copied if self.shape else copied[()]  # type: ignore[no-any-return]  # a scalar: CuPy takes no 0-d array

    #: TensorFlow's other name for it.
    value = read_value

    def local_copy(self) -> Array:
        """Return a copy of this replica's copy; never communicates."""
        return copy_of(self.local_view)  # type: ignore[no-any-return]

    def _read(self, name: str | None = None) -> Array:
        return self._policy("reading a variable").read([self], name)[0]

    def _array(self, name: str) -> Array:
        # A method that communicated would hang a program that calls it on one rank, as it may with an array.
        if self._policy(f"Variable.{name}").read is not own:
            raise ContextError.at(
                f"Variable.{name}",
                found=f"the ON_READ variable {self.name!r} outside steps, where each rank has its own value",
                expected="one value for all ranks, or this rank's own",
                fix=f"Write v.read_value().{name}: read_value is collective, so call it on all ranks; "
                "or v.local_view for this rank's copy.",
            )
        return self.local_view

    # ---------------------------------------------------------------------------------------------- writing

    def assign(self, value: Any, *, read_value: bool = True, name: str | None = None) -> Self:
        """Write `value` and return the variable.

        In a step function, a write to an ON_WRITE variable is collective: the replicas' values are combined as the
        aggregation says.  In cross-replica context, a write to an ON_WRITE variable is local: every rank writes its own
        value.  A write to an ON_READ variable is collective there; with SUM, each copy gets its share of the value.  In
        an update, writes are local.

        Args:
            value: an array of the variable's dtype and shape, or a number or list that fits without loss.
            read_value: False returns None; the type of the result leaves that out.
            name: is compared between the ranks instead of the call site.

        Raises:
            AggregationError: in a step function, for an ON_WRITE variable with aggregation NONE.
            DTypeError, ShapeError, LeafError: when `value` does not fit; no replica that takes part has written then.
            ContextError: in the context of another strategy; in a function that JAX traces.
        """
        return self._write("assign", value, name, read_value=read_value)

    def assign_add(self, value: Any, *, read_value: bool = True, name: str | None = None) -> Self:
        """Add `value`; otherwise as `assign`.  In a step function with SUM, the sum over the replicas is added once.

        Raises:
            AggregationError: also for an ON_READ variable with aggregation SUM in cross-replica context.
        """
        return self._write("assign_add", value, name, read_value=read_value)

    def assign_sub(self, value: Any, *, read_value: bool = True, name: str | None = None) -> Self:
        """Subtract `value`; otherwise as `assign_add`."""
        return self._write("assign_sub", value, name, read_value=read_value)

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

    def scatter_sub(self, sparse_delta: Any, *, name: str | None = None) -> Self:
        """Subtract rows; otherwise as `scatter_add`."""
        return self._write("scatter_sub", sparse_delta, name)

    def scatter_update(self, sparse_delta: Any, *, name: str | None = None) -> Self:
        """Replace rows; otherwise as `scatter_add`.  Not with the aggregations SUM and MEAN."""
        return self._write("scatter_update", sparse_delta, name)

    def scatter_max(self, sparse_delta: Any, *, name: str | None = None) -> Self:
        """Replace rows by the elementwise maximum with the given rows; otherwise as `scatter_update`."""
        return self._write("scatter_max", sparse_delta, name)

    def _write(self, method: str, value: Any, name: str | None, *, read_value: bool = True) -> Self:
        where = f"Variable.{method}"
        getattr(self._policy(where), _COLUMNS.get(method, method))(Write(self, method, where, value, name))
        return self if read_value else None  # type: ignore[return-value]

    def _refuse_drift(self, value: Any, where: str) -> None:
        """Raise OptionTypeError for a value that may differ by replica, if the copies are to stay equal."""
        kept_equal = self.synchronization is VariableSynchronization.ON_WRITE and not self._reducer.is_alone
        if kept_equal and may_differ(value):
            raise differing(where, f"the copies of the ON_WRITE variable {self.name!r} are equal")

    def _policy(self, where: str) -> Policy:
        frame = context.current_frame()
        if frame is None or (frame.strategy._is_default and self.strategy is not frame.strategy):
            return self._policies[Mode.CROSS_REPLICA]
        if not self._reducer.is_alone:
            context.require_same_strategy(frame, self.strategy, where)
        return self._policies[frame.mode]


#: The column of the policy table, for methods of another name.
_COLUMNS = {
    "assign_add": "add",
    "assign_sub": "add",
    "scatter_sub": "scatter_add",
    "scatter_update": "scatter_set",
    "scatter_max": "scatter_set",
}


# ----------------------------------------------------------------------------------------------- values of writes


def _checked_slices(storage: Array, slices: Any, where: str) -> IndexedSlices:
    shape = storage.shape
    if not isinstance(slices, IndexedSlices):
        raise OptionTypeError.at(where, found=type(slices).__name__, expected="IndexedSlices(values, indices)")
    indices = to_array(plain(slices.indices), f"{where}: indices")
    if indices.dtype.kind not in "iu":
        raise DTypeError.at(where, found=f"indices of dtype {dtype_name(indices.dtype)}", expected="integer indices")
    values = _of_dtype(storage, plain(slices.values), where)
    if not shape or indices.ndim != 1 or values.shape != (*indices.shape, *shape[1:]):
        raise ShapeError.at(
            where,
            found=f"values of shape {values.shape} for indices of shape {indices.shape}",
            expected=f"one row of the variable, whose shape is {shape}, for each index",
        )
    outside = indices[(indices < 0) | (indices >= shape[0])]
    if outside.size:
        raise ShapeError.at(where, found=f"index {outside[0]}", expected=f"indices from 0 to {shape[0] - 1}")
    return IndexedSlices(values if are_apart([values, storage]) else values.copy(), indices.astype(np.int64))


def _of_dtype(storage: Array, value: Any, where: str) -> Array:
    on_device = is_on_device(value) and is_on_device(storage)
    array = as_device_array(value, where) if on_device else to_array(value, where)
    if array.dtype == storage.dtype:
        return array
    if isinstance(value, np.ndarray) or is_on_device(value) or is_foreign(value):
        raise misfit(array, storage.dtype, where)
    return converted(array, storage.dtype, where)


def may_differ(value: Any) -> bool:
    """Return whether a nest has values that may differ by replica: a PerReplica, or a copy of a variable."""
    leaves = [part for leaf in nest.flatten(value)[0] for part in parts_of(leaf)]
    return any(isinstance(leaf, PerReplica) or (isinstance(leaf, Variable) and leaf._is_own_here) for leaf in leaves)


def differing(where: str, why: str) -> OptionTypeError:
    """Return the error for a PerReplica where all replicas must write the same value."""
    return OptionTypeError.at(
        where,
        found="a PerReplica or another value of which each replica has its own",
        expected=f"one value, the same on every rank: {why}",
        fix="Reduce it first: strategy.reduce('MEAN', value).  Or make a variable with synchronization='ON_READ', "
        "whose copies may differ, and write it in strategy.run.",
    )


def plain(value: Any) -> Any:
    """Return this rank's component of a container, or the value of a variable; anything else unchanged."""
    value = local_component(value)
    return value._read() if isinstance(value, ArrayLike) else value


def converted(array: Array, dtype: np.dtype[Any], where: str) -> Array:
    """Convert a number or a list to `dtype`; raise where `dtype` has another kind or too small a range."""
    integers = array.dtype.kind in "iu"
    if not np.can_cast(array.dtype, dtype, "same_kind") and not (integers and dtype.kind in "iufc"):
        raise misfit(array, dtype, where)
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
    are_whole = integers and dtype.kind in "iu"
    before, after = (x.astype(object) if are_whole else np.isfinite(x) for x in (array, result))
    if not np.array_equal(before, after):
        raise DTypeError.at(where, found=f"{array}", expected=f"numbers that {dtype_name(dtype)} can hold")
    return result


def misfit(array: Array, dtype: np.dtype[Any], where: str) -> DTypeMismatchError:
    """Return the error for an array of another dtype."""
    return DTypeMismatchError.at(
        where,
        found=f"dtype {dtype_name(array.dtype)}",
        expected=f"dtype {dtype_name(dtype)}",
        fix=f"Convert it first: x.astype({dtype_name(dtype)!r}).",
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


def _checked_dtype(dtype: Any, is_mean: bool) -> np.dtype[Any]:
    """Return a dtype.

    Raises:
        DTypeError: for a dtype that does not exist, or that variables cannot have.
        OptionError: for a mean of a dtype that has no means.
    """
    try:
        parsed: np.dtype[Any] = given if (given := np.dtype(dtype)).isnative else np.dtype(given.type)
    except TypeError as error:
        raise DTypeError.at("Variable", found=f"dtype={dtype!r}", expected="a NumPy dtype") from error
    if issubclass(parsed.type, (np.object_, np.flexible, np.datetime64, np.timedelta64)):
        raise DTypeError.at("Variable", found=f"dtype {parsed}", expected="a numeric or bool dtype")
    if is_mean and parsed.kind != "f" and not is_bfloat16(parsed):
        raise OptionError.at(
            "Variable",
            found=f"aggregation=MEAN of dtype {dtype_name(parsed)}",
            expected="a floating dtype",
            fix="Use SUM.",
        )
    return parsed


# ----------------------------------------------------------------------------------------------------- reads


def own(variables: Sequence[Variable], called: str | None) -> list[Array]:
    """Return this replica's copies; never communicates."""
    return [variable.local_view for variable in variables]


def own_if_alone(variables: Sequence[Variable], called: str | None) -> list[Array]:
    """Return the copies of variables of the default strategy; refuse it if other ranks have some."""
    if context.has_peers():
        raise ContextError.at(
            f"reading {variables[0].name!r}",
            found="an ON_READ variable of this rank alone, which was made before the strategy of several ranks",
            expected="one that belongs to a strategy, whose copies this call combines",
            fix="Make it in `with strategy.scope():`. If this rank alone is meant, make it in the scope of a "
            "OneDeviceStrategy.",
        )
    return own(variables, called)


def merged(variables: Sequence[Variable], called: str | None) -> list[Array]:
    """Return the sum or the mean of all copies of each, or replica 0's copies.  Collective."""
    reducer, aggregation = variables[0]._reducer, variables[0].aggregation
    names = ", ".join([variable._key for variable in variables])
    with Call(reducer.communicator.guard, "reading a variable", called, names) as call:
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return broadcast(reducer.communicator, own(variables, called), 0, call)
        return reducer.all_reduce_arrays(call, _REDUCE_OPS[aggregation], own(variables, called))


def no_read(variables: Sequence[Variable], called: str | None) -> list[Array]:
    """Refuse the read: the copies may differ, and no aggregation combines them."""
    raise AggregationError.at(
        f"reading {variables[0].name!r}",
        found="an ON_READ variable with aggregation NONE in cross-replica context",
        expected="an aggregation that combines the replicas' values",
        fix="Create it with an aggregation, or read this replica's copy in a step function.",
    )


# ---------------------------------------------------------------------------------------------------- writes


def alone(write: Write) -> None:
    """Each replica writes its own value; never communicates."""
    write.apply(write.checked())


def mirrored(write: Write) -> None:
    """Each replica writes its own value, equal on all replicas; never communicates."""
    if type(write.value) is not np.ndarray:
        write.variable._refuse_drift(write.value, write.full_name)
    write.apply(write.checked())


def _together(combine: Callable[[Write, Call, Any], Any]) -> Callable[[Write], None]:
    """Return a collective write: in one call, each replica applies `combine` of its own checked value."""

    def write_together(write: Write) -> None:
        variable = write.variable
        with Call(variable._reducer.communicator.guard, write.where, write.called, variable._key) as call:
            write.apply(combine(write, call, write.checked()))

    return write_together


@_together
def combined(write: Write, call: Call, own_value: Any) -> Any:
    """All replicas write the sum or the mean of their values.  Collective."""
    variable, op = write.variable, _REDUCE_OPS[write.variable.aggregation]
    if not isinstance(own_value, IndexedSlices):
        return variable._reducer.all_reduce_arrays(call, op, [own_value])[0]
    value = PerReplica((own_value,))
    with context.cross_replica(variable.strategy):
        return local_component(variable.strategy.extended.reduce_to(op, value, value))


@_together
def replica_0s(write: Write, call: Call, own_value: Any) -> Any:
    """All replicas write replica 0's value.  Collective."""
    strategy, communicator = write.variable.strategy, write.variable._reducer.communicator
    if not isinstance(own_value, IndexedSlices):
        return broadcast(communicator, [own_value], 0, call)[0]
    rows = [host_array(own_value.values), own_value.indices] if communicator.rank == 0 else None
    return IndexedSlices(*strategy.broadcast(rows))


def _agreed(write: Write, call: Call, own_value: Any) -> Any:
    """Return `own_value`, once all ranks write; raise OptionTypeError for a value that may differ by replica."""
    if isinstance(write.value, PerReplica):
        raise OptionTypeError.at(
            write.full_name,
            found="a PerReplica for an ON_READ variable in cross-replica context",
            expected="one value, the same on every rank",
            fix="To give each replica its own: strategy.run(lambda x: v.assign(x), args=(value,)).",
        )
    layout = ((dtype_name(write.variable.dtype), write.variable.shape),)
    call.agree("write", op=write.where, values=layout, sparingly=True)
    return own_value


#: All replicas write the same value, which every rank has.  Collective: errors raise everywhere.  Sends no data.
alike: Callable[[Write], None] = _together(_agreed)


@_together
def shared(write: Write, call: Call, own_value: Any) -> Any:
    """Each replica writes its share of one value: the sum of the copies is the value.  Otherwise as `alike`."""
    communicator = write.variable._reducer.communicator
    part = share_of(host_array(own_value), communicator.rank, communicator.size)
    return _agreed(write, call, placed_as(part, own_value))


@quietly
def share_of(value: Array, rank: int, size: int) -> Array:
    """Return this rank's share of `value`; the shares add up to it.  Rank 0 gets what a division leaves over."""
    dtype = value.dtype
    if dtype.kind == "b":
        return value if rank == 0 else np.zeros_like(value)
    total = value.astype(wire_dtype(sum_dtype_of_mean(dtype)))
    count = total.dtype.type(size)
    part = np.asarray(total // count if dtype.kind in "iu" else total / count).astype(dtype)
    rest = np.where(np.isfinite(part), total - part.astype(total.dtype) * total.dtype.type(size - 1), total)
    return part if rank != 0 else rest.astype(dtype)


# -------------------------------------------------------------------------------------------------- refusals


def _refused(kind: type[MpiStrategyError], found: str, expected: str, fix: str) -> Callable[[Write], None]:
    def refuse(write: Write) -> None:
        raise kind.at(write.full_name, found=f"{found} ({write.variable._kind})", expected=expected, fix=fix)

    return refuse


drifts: Callable[[Write], None] = _refused(
    AggregationError,
    "a write in replica context to an ON_WRITE variable with aggregation NONE",
    "an aggregation that combines the replicas' values",
    "Create it with aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA', or write in cross-replica context.",
)
n_times: Callable[[Write], None] = _refused(
    AggregationError,
    "an ON_READ variable with aggregation SUM in cross-replica context, where it would be added to every copy",
    "a call in a step function, where each replica adds to its own copy",
    "Call it inside strategy.run, or use assign to set the total.",
)
no_rows: Callable[[Write], None] = _refused(
    UnsupportedError,
    "an ON_READ variable",
    "an ON_WRITE variable",
    "Write whole values: v.assign(...), v.assign_add(slices.to_dense()).",
)
not_sum: Callable[[Write], None] = _refused(
    UnsupportedError,
    "an aggregation that adds",
    "aggregation NONE or ONLY_FIRST_REPLICA",
    "Use scatter_add or scatter_sub, whose updates can be summed.",
)


# ------------------------------------------------------------------------------------------------- the table

_ON_WRITE, _ON_READ = VariableSynchronization.ON_WRITE, VariableSynchronization.ON_READ
_NONE, _SUM, _MEAN, _FIRST = VariableAggregation
_STEP, _CROSS, _UPDATE = Mode.REPLICA, Mode.CROSS_REPLICA, Mode.UPDATE

#: One row for each synchronization, aggregation and context.  Outside every context, a variable is used as in
#: cross-replica context; in another strategy's context it is refused.
POLICIES: Mapping[tuple[VariableSynchronization, VariableAggregation, Mode], Policy] = {
    # The copies are equal.  A write in a step function combines the replicas' values; elsewhere the ranks have equal
    # values, and each writes its own.
    # sync., aggregation, context        read     assign      assign_add  scatter_add scatter_update
    #                                                         assign_sub  scatter_sub scatter_max
    (_ON_WRITE, _NONE,  _STEP):   Policy(own,     drifts,     drifts,     drifts,     drifts),
    (_ON_WRITE, _SUM,   _STEP):   Policy(own,     combined,   combined,   combined,   not_sum),
    (_ON_WRITE, _MEAN,  _STEP):   Policy(own,     combined,   combined,   combined,   not_sum),
    (_ON_WRITE, _FIRST, _STEP):   Policy(own,     replica_0s, replica_0s, replica_0s, replica_0s),

    (_ON_WRITE, _NONE,  _CROSS):  Policy(own,     mirrored,   mirrored,   mirrored,   mirrored),
    (_ON_WRITE, _SUM,   _CROSS):  Policy(own,     mirrored,   mirrored,   mirrored,   not_sum),
    (_ON_WRITE, _MEAN,  _CROSS):  Policy(own,     mirrored,   mirrored,   mirrored,   not_sum),
    (_ON_WRITE, _FIRST, _CROSS):  Policy(own,     mirrored,   mirrored,   mirrored,   mirrored),

    **dict.fromkeys(  # in an update, whatever the aggregation
        [(_ON_WRITE, aggregation, _UPDATE) for aggregation in VariableAggregation],
                                  Policy(own,     mirrored,   mirrored,   mirrored,   mirrored)),

    # Every replica has its own copy, which it uses in a step function and in an update, whatever the aggregation.  A
    # cross-replica read combines the copies; after a cross-replica assign, it returns the assigned value.
    **dict.fromkeys(
        [(_ON_READ, aggregation, mode) for aggregation in VariableAggregation for mode in (_STEP, _UPDATE)],
                                  Policy(own,     alone,      alone,      no_rows,    no_rows)),

    (_ON_READ,  _NONE,  _CROSS):  Policy(no_read, alike,      alike,      no_rows,    no_rows),
    (_ON_READ,  _SUM,   _CROSS):  Policy(merged,  shared,     n_times,    no_rows,    no_rows),
    (_ON_READ,  _MEAN,  _CROSS):  Policy(merged,  alike,      alike,      no_rows,    no_rows),
    (_ON_READ,  _FIRST, _CROSS):  Policy(merged,  alike,      alike,      no_rows,    no_rows),
}  # fmt: skip

#: A variable of one rank (of the default strategy or a OneDeviceStrategy), in every context.
LOCAL = Policy(own, alone, alone, alone, alone)


# ------------------------------------------------------------------------------------------------ their memory


def _on_gpu(communicator: Ranks, array: Any) -> DeviceArray | None:
    """Return a copy of an array on this rank's GPU, for a variable there; None for a variable on the host.

    Those are the variables on CPUs, and variables without axes (counters, totals, rates): Python reads them often,
    and each read would wait for the GPU.
    """
    index = gpu_of(communicator.devices, communicator.rank)
    if not array.shape or index is None:
        return None
    cupy = cupy_for("a variable on a GPU")
    with cupy.cuda.Device(index):
        return cupy.array(array, order="C")


#: The first slab is small: many strategies have few small variables.  Each later slab is twice as large, up to a limit,
#: since each slab costs an open file.
_FIRST_SLAB_BYTES = 2**20
_MOST_SLAB_BYTES = 64 * 2**20


class VariableSlot(NamedTuple):
    """The position of a variable, the same in the memory of every rank of its node.

    Attributes:
        slab: the memory of all ranks of the node.
        offset: the first byte in it; on a cache line.
    """

    slab: SharedMemory
    offset: int


class VariableStorage:
    """The memory of the variables of one strategy: slabs that the ranks of a node share, with equal offsets everywhere.

    Variables are allocated in order of creation, so the variables of one model are neighbours in the memory of every
    rank.  An optimizer can then update its share of all ranks' copies.  Creation is collective: every rank allocates
    every variable, and the ranks' records are equal without communication.  Copies of a strategy have one storage.

    A place is not used again.  A slab is given back, by each rank for itself, when all variables in it and all views of
    them have been garbage-collected.
    """

    def __init__(self) -> None:
        #: The slab that is being filled, and how many of its bytes are used.
        self._slab: SharedMemory | None = None
        self._used = 0
        #: The size of the next slab; 0, on all ranks together, when the node has no shared memory (any more).
        self._next_bytes = _FIRST_SLAB_BYTES

    def allocate(
        self, communicator: Ranks, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Array, VariableSlot | None]:
        """Return memory for a variable and its slot; None instead of a slot for memory that is not shared.

        All ranks call it inside an agreed call, with equal arguments.  A view of the array keeps the slab.
        If a rank has no memory, all ranks raise.
        """
        nbytes = max(ALIGNMENT, aligned(math.prod(shape) * dtype.itemsize))
        slot = self._slot(communicator, nbytes) if communicator.shares_memory else None
        if slot is None:
            return communicator.guard.on_all(partial(np.empty, shape, dtype)), None
        return np.ndarray(shape, dtype, slot.slab.own_segment[slot.offset : slot.offset + nbytes]), slot

    def _slot(self, communicator: Ranks, nbytes: int) -> VariableSlot | None:
        if self._slab is not None and self._used + nbytes <= self._slab.own_segment.nbytes:
            self._used += nbytes
            return VariableSlot(self._slab, self._used - nbytes)
        usual = self._next_bytes
        if not usual:
            return None
        slab = communicator.shared(max(nbytes, usual))
        if not slab.is_shared:
            self._next_bytes = 0
        elif nbytes < usual:  # a larger variable has a slab for itself
            self._slab, self._used, self._next_bytes = slab, nbytes, min(2 * usual, _MOST_SLAB_BYTES)
        return VariableSlot(slab, 0) if slab.is_shared else None
