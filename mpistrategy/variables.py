"""Variables: storage on every replica, and a policy that says when and how the copies meet.

`_POLICY` is the whole behaviour: for each synchronization and context, how a write and a read are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from mpistrategy import context
from mpistrategy.arrays import Array, dtype_name, is_bfloat16, to_array
from mpistrategy.context import Mode
from mpistrategy.errors import AggregationError, DTypeError, OptionError, ShapeError, UnsupportedError
from mpistrategy.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpistrategy.values import ArrayLike, IndexedSlices, local_component

if TYPE_CHECKING:
    import enum

    from mpistrategy.strategy import Strategy

    E = TypeVar("E", bound=enum.Enum)


class Variable(ArrayLike):
    """An array that a strategy keeps on every replica.  Creation is collective.

    Created in `strategy.scope()` (or in a step function), a variable belongs to the strategy; elsewhere it belongs to
    the default strategy and lives on this rank alone.  It acts as an array: arithmetic, comparison, indexing and
    `np.asarray` read it.  Writes go into the same memory, so that a view taken once stays true.

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

    Raises:
        OptionError: for an unknown synchronization or aggregation; NONE synchronization with several replicas; MEAN of
            a dtype that is not floating.
        DTypeError, LeafError: for initial values that are no arrays.
        CollectiveMismatchError: when the ranks create different variables.
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        dtype: Any = None,
        name: str | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        self._strategy = strategy = context.get_strategy()
        communicator = strategy.extended.communicator
        with communicator.guard.call("Variable") as call:
            self.aggregation = _member(VariableAggregation, aggregation, "aggregation")
            self.synchronization = _resolved(
                _member(VariableSynchronization, synchronization, "synchronization"), strategy
            )
            self.name = strategy.extended.next_variable_name() if name is None else name
            call.name = self.name
            given = initial_value() if callable(initial_value) else initial_value
            array = to_array(_plain(given), call.where)
            wanted = array.dtype if dtype is None else _parsed_dtype(dtype)
            _check_dtype(wanted, self.aggregation)
            if array.dtype != wanted:
                array = _converted(array, wanted, f"Variable {self.name!r} with dtype={dtype_name(wanted)}")
            self._storage = np.array(array, dtype=wanted, order="C", copy=True)
            self.trainable = (
                self.synchronization is not VariableSynchronization.ON_READ if trainable is None else bool(trainable)
            )
            call.agree(
                "create",
                op=f"{self.synchronization.name}/{self.aggregation.name}",
                values=((dtype_name(self._storage.dtype), self._storage.shape),),
            )
            communicator.bcast(self._storage, 0)
        self._view = self._storage.view()
        self._view.flags.writeable = False
        #: The variable in whose `colocate_vars_with` block this one was created, if any.
        self.colocated_with: Variable | None = None
        strategy.extended.register_variable(self)

    @property
    def strategy(self) -> Strategy:
        """The strategy that keeps the copies together."""
        return self._strategy

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; reading it never communicates."""
        return self._storage.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype; reading it never communicates."""
        return self._storage.dtype

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without axes")
        return self.shape[0]

    def assign(self, value: Any) -> Self:
        """Write `value`, as the policy of the context says; returns the variable.

        In a step function an ON_WRITE variable first combines the replicas' values (its aggregation); this is
        collective.  Everywhere else the write is local: in cross-replica context every rank writes what it has.

        Raises:
            AggregationError: in a step function, for an ON_WRITE variable with aggregation NONE.
            DTypeError, ShapeError: when `value` does not fit; nothing has been written then, on any replica.
        """
        return self._write("assign", value, _set)

    def assign_add(self, value: Any) -> Self:
        """Add `value`; otherwise as `assign`.  With SUM in a step function, the sum over the replicas is added once.

        Raises:
            AggregationError: also for an ON_READ variable with aggregation SUM in cross-replica context.
        """
        return self._write("assign_add", value, _add)

    def assign_sub(self, value: Any) -> Self:
        """Subtract `value`; otherwise as `assign_add`."""
        return self._write("assign_sub", value, _subtract)

    def read_value(self) -> Array:
        """Return a copy of the value, as reading the variable in this context gives it."""
        return np.array(self._read(), copy=True)

    def local_copy(self) -> Array:
        """Return a copy of what this replica stores; never communicates."""
        return self._storage.copy()

    def _read(self) -> Array:
        return _POLICY[self.synchronization, self._mode()][1](self)

    def _write(self, method: str, value: Any, apply: Callable[[Array, Array], None]) -> Self:
        _POLICY[self.synchronization, self._mode()][0](self, f"Variable.{method}", value, apply)
        return self

    def _mode(self) -> Mode:
        frame = context.current_frame()
        if frame is None or frame.strategy is not self._strategy:
            return Mode.CROSS_REPLICA
        return frame.mode

    def _incoming(self, value: Any, where: str) -> Array:
        """Return `value` as an array of this variable's dtype and shape, or raise without having changed anything."""
        value = _plain(value)
        if isinstance(value, IndexedSlices):
            raise UnsupportedError.at(where, found="IndexedSlices", expected="an array", fix="Pass slices.to_dense().")
        array = to_array(value, f"{where} of {self.name!r}")
        if array.dtype != self.dtype:
            if isinstance(value, np.ndarray):
                raise _misfit(array, self.dtype, f"{where} of {self.name!r}")
            array = _converted(array, self.dtype, f"{where} of {self.name!r}")
        if array.shape != self.shape:
            raise ShapeError.at(
                f"{where} of {self.name!r}", found=f"shape {array.shape}", expected=f"shape {self.shape}"
            )
        return array

    def __repr__(self) -> str:
        policy = f"{self.synchronization.name}/{self.aggregation.name}"
        stored = np.array2string(self._storage, threshold=8, separator=", ")
        return f"<Variable {self.name!r} shape={self.shape} dtype={dtype_name(self.dtype)} {policy}, here {stored}>"


def _set(storage: Array, value: Array) -> None:
    storage[...] = value


def _add(storage: Array, value: Array) -> None:
    np.add(storage, value, out=storage)


def _subtract(storage: Array, value: Array) -> None:
    np.subtract(storage, value, out=storage)


# ---------------------------------------------------------------------------------------------------------------
# Policies.  A write gets (variable, where, value, apply); a read gets the variable and returns an array.


def _write_local(variable: Variable, where: str, value: Any, apply: Callable[[Array, Array], None]) -> None:
    apply(variable._storage, variable._incoming(value, where))


def _write_combined(variable: Variable, where: str, value: Any, apply: Callable[[Array, Array], None]) -> None:
    aggregation = variable.aggregation
    if aggregation is VariableAggregation.NONE:
        raise AggregationError.at(
            f"{where} of {variable.name!r}",
            found="a write in replica context to an ON_WRITE variable with aggregation NONE",
            expected="an aggregation that says how the replicas' values become one",
            fix="Create it with aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA', or write in cross-replica context.",
        )
    extended = variable.strategy.extended
    with extended.communicator.guard.call(where, name=variable.name) as call:
        mine = variable._incoming(value, where)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            call.agree("broadcast", values=((dtype_name(mine.dtype), mine.shape),))
            combined = np.array(mine, order="C", copy=True)
            extended.communicator.bcast(combined, 0)
        else:
            combined = extended.sum_or_mean(ReduceOp.parse(aggregation, where), mine)
    apply(variable._storage, combined)


def _write_share(variable: Variable, where: str, value: Any, apply: Callable[[Array, Array], None]) -> None:
    """Cross-replica write to an ON_READ variable: reading it afterwards gives what was written."""
    if variable.aggregation is not VariableAggregation.SUM:
        _write_local(variable, where, value, apply)
        return
    if apply is not _set:
        raise AggregationError.at(
            f"{where} of {variable.name!r}",
            found="an ON_READ variable with aggregation SUM in cross-replica context",
            expected="a call in a step function, where each replica adds to its own copy",
            fix="Call it inside strategy.run, or use assign to set the total.",
        )
    communicator = variable.strategy.extended.communicator
    variable._storage[...] = share_of(variable._incoming(value, where), communicator.rank, communicator.size)


def share_of(total: Array, rank: int, size: int) -> Array:
    """Return this rank's part of `total`, so that the parts add up to it.

    Integers are kept exactly, whole units to the first ranks.  Other numbers are divided; rank 0 takes the residue.
    """
    if total.dtype.kind in "iu":
        whole, rest = np.divmod(total, total.dtype.type(size))
        return np.asarray(whole + (rest > rank).astype(total.dtype))
    part = np.asarray((total / size).astype(total.dtype))
    if rank != 0:
        return part
    finite = np.isfinite(part)
    rest = total - np.where(finite, part, 0) * total.dtype.type(size - 1)
    return np.asarray(np.where(finite, rest, total)).astype(total.dtype)


def _read_local(variable: Variable) -> Array:
    return variable._view


def _read_aggregate(variable: Variable) -> Array:
    """Cross-replica read of an ON_READ variable: collective."""
    extended = variable.strategy.extended
    aggregation = variable.aggregation
    if aggregation is VariableAggregation.NONE:
        raise AggregationError.at(
            f"reading {variable.name!r}",
            found="an ON_READ variable with aggregation NONE in cross-replica context",
            expected="an aggregation that says how the replicas' values become one",
            fix="Create it with an aggregation, or read it in a step function, where it is this replica's own.",
        )
    with extended.communicator.guard.call("reading a variable", name=variable.name) as call:
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            call.agree("broadcast", values=((dtype_name(variable.dtype), variable.shape),))
            first = variable.local_copy()
            extended.communicator.bcast(first, 0)
            return first
        return extended.sum_or_mean(ReduceOp.parse(aggregation, call.where), variable._storage)


_Write = Callable[[Variable, str, Any, Callable[[Array, Array], None]], None]
_Read = Callable[[Variable], Array]

#: (synchronization, context) -> (how a write is done, how a read is done)
_POLICY: dict[tuple[VariableSynchronization, Mode], tuple[_Write, _Read]] = {
    (VariableSynchronization.ON_WRITE, Mode.REPLICA): (_write_combined, _read_local),
    (VariableSynchronization.ON_WRITE, Mode.CROSS_REPLICA): (_write_local, _read_local),
    (VariableSynchronization.ON_WRITE, Mode.UPDATE): (_write_local, _read_local),
    (VariableSynchronization.ON_READ, Mode.REPLICA): (_write_local, _read_local),
    (VariableSynchronization.ON_READ, Mode.CROSS_REPLICA): (_write_share, _read_aggregate),
    (VariableSynchronization.ON_READ, Mode.UPDATE): (_write_local, _read_local),
    (VariableSynchronization.NONE, Mode.REPLICA): (_write_local, _read_local),
    (VariableSynchronization.NONE, Mode.CROSS_REPLICA): (_write_local, _read_local),
    (VariableSynchronization.NONE, Mode.UPDATE): (_write_local, _read_local),
}


def _plain(value: Any) -> Any:
    value = local_component(value)
    return value._read() if isinstance(value, ArrayLike) else value


def _member(kind: type[E], value: E | str, argument: str) -> E:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    raise OptionError.at(
        "Variable",
        found=f"{argument}={value!r}",
        expected=f"a {kind.__name__}: {', '.join(kind.__members__)}",
    )


def _resolved(synchronization: VariableSynchronization, strategy: Strategy) -> VariableSynchronization:
    if strategy.extended.is_local:
        # One replica that shares nothing: there is nobody to synchronize with.
        return VariableSynchronization.NONE
    if synchronization is VariableSynchronization.NONE:
        raise OptionError.at(
            "Variable",
            found="synchronization=NONE in the scope of a strategy of several replicas",
            expected="AUTO, ON_WRITE or ON_READ",
            fix="Create variables that belong to one rank alone outside the scope.",
        )
    if synchronization is VariableSynchronization.AUTO:
        return VariableSynchronization.ON_WRITE
    return synchronization


def _check_dtype(dtype: np.dtype[Any], aggregation: VariableAggregation) -> None:
    if dtype.hasobject or dtype.kind in "SU":
        raise DTypeError.at("Variable", found=f"dtype {dtype}", expected="a numeric or bool dtype")
    floating = dtype.kind in "fc" or is_bfloat16(dtype)
    if aggregation is VariableAggregation.MEAN and not floating:
        raise OptionError.at(
            "Variable",
            found=f"aggregation=MEAN of dtype {dtype_name(dtype)}",
            expected="a floating dtype",
            fix="Use SUM.",
        )


def _parsed_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        parsed: np.dtype[Any] = np.dtype(dtype)
        return parsed
    except TypeError as error:
        raise DTypeError.at("Variable", found=f"dtype={dtype!r}", expected="a NumPy dtype") from error


def _converted(array: Array, dtype: np.dtype[Any], where: str) -> Array:
    """Convert a number or a list to `dtype` where neither its kind nor its size is lost."""
    integers = array.dtype.kind in "iu"
    if not np.can_cast(array.dtype, dtype, "same_kind") and not (integers and dtype.kind in "iufc"):
        raise _misfit(array, dtype, where)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype)
    if integers and dtype.kind in "iu":
        fits = np.array_equal(converted.astype(object), array.astype(object))
    else:
        fits = np.array_equal(np.isfinite(array), np.isfinite(converted))
    if not fits:
        raise DTypeError.at(where, found=f"{array}", expected=f"numbers that {dtype_name(dtype)} can hold")
    return converted


def _misfit(array: Array, dtype: np.dtype[Any], where: str) -> DTypeError:
    return DTypeError.at(
        where,
        found=f"dtype {dtype_name(array.dtype)}",
        expected=f"dtype {dtype_name(dtype)}",
        fix=f"Convert it first: x.astype({dtype_name(dtype)!r}).",
    )
