"""How variables are read and written in every context: the table `POLICIES`.

`POLICIES` names one of the functions of this file for each method.  A read returns an array.  A write returns the
change that this replica then applies to its own copy.  It raises before anything is applied; a collective write raises
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy import context
from mpistrategy.arrays.convert import host_array, placed_as
from mpistrategy.arrays.dtypes import Array, dtype_name, quietly, wire_dtype
from mpistrategy.arrays.values import IndexedSlices, PerReplica, local_component
from mpistrategy.context import Mode
from mpistrategy.errors import AggregationError, ContextError, MpiStrategyError, OptionTypeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import ReduceOp
from mpistrategy.options import VariableAggregation as Aggregation
from mpistrategy.options import VariableSynchronization as Synchronization
from mpistrategy.reduction.collectives import broadcast
from mpistrategy.variables.variable import Policy, Table, Variable, Write, own

_REDUCE_OPS = {Aggregation.SUM: ReduceOp.SUM, Aggregation.MEAN: ReduceOp.MEAN}


# ----------------------------------------------------------------------------------------------------- reads


def own_if_alone(variable: Variable, called: str | None) -> Array:
    """Return the copy of a variable of the default strategy; refuse it if other ranks have one."""
    if context.has_peers():
        raise ContextError.at(
            f"reading {variable.name!r}",
            found="an ON_READ variable of this rank alone, which was made before the strategy of several ranks",
            expected="one that belongs to a strategy, whose copies this call combines",
            fix="Make it in `with strategy.scope():`. If this rank alone is meant, make it in the scope of a "
            "OneDeviceStrategy.",
        )
    return variable.local_view


def summed(variable: Variable, called: str | None) -> Array:
    """Return the sum or the mean of all copies.  Collective."""
    return _sums_of([variable], called)[0]


def read_together(variables: Sequence[Variable], called: str | None) -> list[Array]:
    """Return the values of variables of one policy: in one call, where their copies are added up."""
    if all(variable._policy("reading a variable").read is summed for variable in variables):
        return _sums_of(variables, called)
    return [variable._read(called) for variable in variables]


def _sums_of(variables: Sequence[Variable], called: str | None) -> list[Array]:
    reducer, op = variables[0]._registry.reducer, _REDUCE_OPS[variables[0].aggregation]
    names = ", ".join([variable._key for variable in variables])
    with Call(reducer.communicator.guard, "reading a variable", called, names) as call:
        return reducer.all_reduce_arrays(call, op, [variable.local_view for variable in variables])


def first(variable: Variable, called: str | None) -> Array:
    """Return replica 0's copy.  Collective."""
    with Call(variable._registry.communicator.guard, "reading a variable", name=variable._key, called=called) as call:
        return _of_replica_0(variable, variable.local_view, call)


def no_read(variable: Variable, called: str | None) -> Array:
    """Refuse the read: the copies may differ, and no aggregation combines them."""
    raise AggregationError.at(
        f"reading {variable.name!r}",
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
        with Call(variable._registry.communicator.guard, write.where, write.called, variable._key) as call:
            write.apply(combine(write, call, write.checked()))

    return write_together


@_together
def combined(write: Write, call: Call, own_value: Any) -> Any:
    """All replicas write the sum or the mean of their values.  Collective."""
    variable, op = write.variable, _REDUCE_OPS[write.variable.aggregation]
    if not isinstance(own_value, IndexedSlices):
        return variable._registry.reducer.all_reduce_arrays(call, op, [own_value])[0]
    value = PerReplica((own_value,))
    with context.cross_replica(variable.strategy):
        return local_component(variable.strategy.extended.reduce_to(op, value, value))


@_together
def replica_0s(write: Write, call: Call, own_value: Any) -> Any:
    """All replicas write replica 0's value.  Collective."""
    variable, communicator = write.variable, write.variable._registry.communicator
    if not isinstance(own_value, IndexedSlices):
        return _of_replica_0(variable, own_value, call)
    call.expect_more()
    count = int(broadcast(communicator, [np.array(own_value.indices.size)], 0, call)[0])
    call.expect_more()
    if communicator.rank != 0:
        own_value = IndexedSlices(np.empty((count, *variable.shape[1:]), variable.dtype), np.empty(count, np.int64))
    rows = placed_as(own_value.values, variable.local_view)
    return IndexedSlices(*broadcast(communicator, [rows, own_value.indices], 0, call))


def _of_replica_0(variable: Variable, own_array: Array, call: Call) -> Array:
    """Return a copy of replica 0's array, where the variable is."""
    copy: Array = broadcast(variable._registry.communicator, [own_array], 0, call)[0]
    return copy


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
    communicator = write.variable._registry.communicator
    part = share_of(host_array(own_value), communicator.rank, communicator.size)
    return _agreed(write, call, placed_as(part, own_value))


@quietly
def share_of(value: Array, rank: int, size: int) -> Array:
    """Return this rank's share of `value`; the shares add up to it.

    Integers are divided exactly: the first ranks get 1 more.  Other numbers are divided; rank 0 gets the residue.
    """
    dtype = value.dtype
    if dtype.kind == "b":
        return value if rank == 0 else np.zeros_like(value)
    if dtype.kind in "iu":
        wide = value if dtype.itemsize == 8 else value.astype(np.int64)
        quotient, remainder = np.divmod(wide, wide.dtype.type(size))
        return np.asarray(quotient + (remainder > rank)).astype(dtype)
    total = value.astype(wire_dtype(dtype))
    part = np.asarray((total / size).astype(dtype))
    remainder = np.where(np.isfinite(part), total - part.astype(total.dtype) * (size - 1), total)
    return part if rank != 0 else remainder.astype(dtype)


# -------------------------------------------------------------------------------------------------- refusals


def _refused(kind: type[MpiStrategyError], found: str, expected: str, fix: str) -> Callable[[Write], None]:
    def refuse(write: Write) -> None:
        variable = write.variable
        policy = f"{variable.synchronization.name}/{variable.aggregation.name}"
        raise kind.at(write.full_name, found=f"{found} ({policy})", expected=expected, fix=fix)

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

_ON_WRITE, _ON_READ = Synchronization.ON_WRITE, Synchronization.ON_READ
_NONE, _SUM, _MEAN, _FIRST = Aggregation.NONE, Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA
_STEP, _CROSS, _UPDATE = Mode.REPLICA, Mode.CROSS_REPLICA, Mode.UPDATE

#: One row for each synchronization, aggregation and context.  Outside every context, a variable is used as in
#: cross-replica context; in another strategy's context it is refused.
POLICIES: Table = {
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

    (_ON_WRITE, _NONE,  _UPDATE): Policy(own,     mirrored,   mirrored,   mirrored,   mirrored),
    (_ON_WRITE, _SUM,   _UPDATE): Policy(own,     mirrored,   mirrored,   mirrored,   mirrored),
    (_ON_WRITE, _MEAN,  _UPDATE): Policy(own,     mirrored,   mirrored,   mirrored,   mirrored),
    (_ON_WRITE, _FIRST, _UPDATE): Policy(own,     mirrored,   mirrored,   mirrored,   mirrored),

    # Every replica has its own copy.  A cross-replica read combines the copies; after a cross-replica assign, it
    # returns the assigned value.
    (_ON_READ,  _NONE,  _STEP):   Policy(own,     alone,      alone,      no_rows,    no_rows),
    (_ON_READ,  _SUM,   _STEP):   Policy(own,     alone,      alone,      no_rows,    no_rows),
    (_ON_READ,  _MEAN,  _STEP):   Policy(own,     alone,      alone,      no_rows,    no_rows),
    (_ON_READ,  _FIRST, _STEP):   Policy(own,     alone,      alone,      no_rows,    no_rows),

    (_ON_READ,  _NONE,  _CROSS):  Policy(no_read, alike,      alike,      no_rows,    no_rows),
    (_ON_READ,  _SUM,   _CROSS):  Policy(summed,  shared,     n_times,    no_rows,    no_rows),
    (_ON_READ,  _MEAN,  _CROSS):  Policy(summed,  alike,      alike,      no_rows,    no_rows),
    (_ON_READ,  _FIRST, _CROSS):  Policy(first,   alike,      alike,      no_rows,    no_rows),

    (_ON_READ,  _NONE,  _UPDATE): Policy(own,     alone,      alone,      no_rows,    no_rows),
    (_ON_READ,  _SUM,   _UPDATE): Policy(own,     alone,      alone,      no_rows,    no_rows),
    (_ON_READ,  _MEAN,  _UPDATE): Policy(own,     alone,      alone,      no_rows,    no_rows),
    (_ON_READ,  _FIRST, _UPDATE): Policy(own,     alone,      alone,      no_rows,    no_rows),
}  # fmt: skip

#: A variable of one rank (of the default strategy or a OneDeviceStrategy), in every context.
LOCAL = Policy(own, alone, alone, alone, alone)


def table_of(*, is_local: bool, is_default: bool) -> Table:
    """Return the table for the variables of a strategy.

    Args:
        is_local: whether they belong to one rank alone.
        is_default: whether it is the default strategy.
    """
    if not is_local:
        return POLICIES
    refusing = LOCAL._replace(read=own_if_alone) if is_default else LOCAL
    return {
        (synchronization, aggregation, mode): refusing if (synchronization, mode) == (_ON_READ, _CROSS) else LOCAL
        for synchronization in Synchronization
        for aggregation in Aggregation
        for mode in Mode
    }
