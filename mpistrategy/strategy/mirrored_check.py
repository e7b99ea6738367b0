"""`Strategy.assert_mirrored`: compares the copies of variables by digests; the variables are not sent.

Each rank computes a 64-bit digest of every variable, and one of all these digests.  Only when the latter differ do the
ranks exchange the digests of the variables, and every rank raises the same table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.digests import digest, outliers
from mpistrategy.arrays.dtypes import dtype_name
from mpistrategy.errors import EmptyBatchError, OptionError, OptionTypeError, ReplicasDivergedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import VariableSynchronization
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.variables.variable import Variable

#: The most variables that a report names.
_MOST_ROWS = 10
_FIX = "Look for values that differ by rank (random numbers, an assign outside a step), and restore the variables."


def check_mirrored(extended: StrategyExtended, variables: Any, name: str | None) -> None:
    """Do `Strategy.assert_mirrored`."""
    communicator = extended.communicator
    with Call(communicator.guard, "Strategy.assert_mirrored", called=name) as call:
        if variables is None:
            numbered = {number: var for number, var in extended._registry.alive() if is_mirrored(var)}
            call.structure = f"all of {extended._registry.made} variables"
        else:
            numbered = dict(enumerate(_named(extended, variables, call.where)))
            call.structure = ", ".join(var._key for var in numbered.values())
        if communicator.size == 1:
            return
        # A rank that cannot read its copy, for lack of memory, still tells the others.
        call.expect_more()
        mine = {number: digest(host_array(var.local_view)) for number, var in numbered.items()}
        call.agree("compare copies")
        if len({*communicator.allgather_text(f"{digest(np.array([*mine.items()], np.uint64)):x}")}) == 1:
            return
        told = communicator.allgather_text(" ".join(f"{number}={one:x}" for number, one in mine.items()))
        of_ranks = [dict(each.split("=") for each in text.split()) for text in told]
        # Variables that some rank has collected are left out.
        common = [number for number in numbered if all(str(number) in theirs for theirs in of_ranks)]
        found = [(numbered[number], [theirs[str(number)] for theirs in of_ranks]) for number in common]
        if differing := [(var, *outliers(digests)) for var, digests in found if len({*digests}) > 1]:
            raise _diverged(call.where, differing, len(numbered))


def is_mirrored(var: Variable) -> bool:
    """Return whether the copies of a variable should be equal at all times."""
    return var.synchronization is not VariableSynchronization.ON_READ


def _named(extended: StrategyExtended, variables: Any, where: str) -> list[Variable]:
    """Return the mirrored variables of a nest of variables, and of objects with an attribute `variables`, each once."""
    found: dict[int, Variable] = {}
    for leaf in nest.flatten(variables)[0]:
        if isinstance(leaf, Variable) and not is_mirrored(leaf):
            expected = "variables whose copies should be equal"
            raise OptionError.at(where, found=f"{leaf.name!r}, which is ON_READ", expected=expected)
        members = [leaf] if isinstance(leaf, Variable) else getattr(leaf, "variables", None)
        if not isinstance(members, (list, tuple)):
            raise OptionTypeError.at(where, found=f"{leaf!r}", expected="variables and optimizers")
        for var in members:
            if not extended.variable_created_in_scope(var):
                expected = "a variable created in the scope of this strategy"
                raise OptionError.at(where, found=f"{var!r}", expected=expected)
        found |= {id(var): var for var in members if is_mirrored(var)}
    if not found:
        raise EmptyBatchError.at(where, found="no mirrored variables", expected="at least one, or None for all")
    return list(found.values())


def _diverged(where: str, differing: Sequence[tuple[Variable, list[int], str]], count: int) -> ReplicasDivergedError:
    rows = [
        f"  {var._key} {dtype_name(var.dtype)}{list(var.shape)}: {words}" for var, _, words in differing[:_MOST_ROWS]
    ]
    more = [f"  and {len(differing) - _MOST_ROWS} more"] if len(differing) > _MOST_ROWS else []
    error = ReplicasDivergedError.at(
        where,
        found=f"copies that differ in {len(differing)} of {count} variables",
        expected="the same bits on every rank",
        fix="\n".join(["These differ:", *rows, *more, _FIX]),
    )
    error.variables = tuple(var.name for var, _, _ in differing)
    error.ranks = tuple(sorted({rank for _, ranks, _ in differing for rank in ranks}))
    return error
