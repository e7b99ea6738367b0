"""`Strategy.assert_mirrored`: compares the copies of variables by digests; the variables are not sent.

Each rank computes a 64-bit digest of every variable, and one of all these digests.  Only when the latter differ do the
ranks exchange the digests of the variables, 16 bytes each, and every rank raises the same table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.digests import digest
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.errors import EmptyBatchError, OptionError, OptionTypeError, ReplicasDivergedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.options import VariableSynchronization
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.variables.variable import Variable

#: The most variables and groups of ranks that a report names.
_MOST_ROWS, _MOST_GROUPS = 10, 4

_FIX = "Look for values that differ by rank (random numbers, an assign outside a step), and restore the variables."


def check_mirrored(extended: StrategyExtended, variables: Any, name: str | None) -> None:
    """Do `Strategy.assert_mirrored`."""
    communicator = extended.communicator
    with Call(communicator.guard, "Strategy.assert_mirrored", called=name) as call:
        if variables is None:
            numbered = [(n, var) for n, var in extended._variables_alive() if is_mirrored(var)]
            call.structure = f"all of {extended._variables_made} variables"
        else:
            named = _named(extended, variables, call.where)
            numbered = list(enumerate(named))
            call.structure = ", ".join(var._key for var in named)
        if communicator.size == 1:
            return
        # A rank that cannot read its copy, for lack of memory, still tells the others.
        call.expect_more()
        mine = np.array([(number, digest(host_array(var.local_view))) for number, var in numbered], np.uint64).reshape(
            -1, 2
        )
        call.agree("compare copies")
        if _equal_on_all(communicator, mine):
            return
        differing = list(_differing(_entries_of_all(communicator, mine), dict(numbered)))
        if differing:
            raise _diverged(call.where, differing, len(numbered))


def is_mirrored(var: Variable) -> bool:
    """Return whether the copies of a variable should be equal at all times."""
    return var.synchronization is not VariableSynchronization.ON_READ


def _named(extended: StrategyExtended, variables: Any, where: str) -> list[Variable]:
    """Return the mirrored variables of a nest, each once."""
    found: dict[int, Variable] = {}
    for leaf in nest.flatten(variables)[0]:
        if isinstance(leaf, Variable):
            if not is_mirrored(leaf):
                raise OptionError.at(
                    where, found=f"{leaf.name!r}, which is ON_READ", expected="variables whose copies should be equal"
                )
            members: Sequence[Any] = [leaf]
        else:
            members = getattr(leaf, "variables", None)  # type: ignore[assignment]
            if not isinstance(members, (list, tuple)):
                raise OptionTypeError.at(where, found=f"{leaf!r}", expected="variables and optimizers")
        for member in members:
            if not extended.variable_created_in_scope(member):
                raise OptionError.at(
                    where,
                    found=f"{member!r}",
                    expected="a variable created in the scope of this strategy",
                )
            if is_mirrored(member):
                found[id(member)] = member
    if not found:
        raise EmptyBatchError.at(where, found="no mirrored variables", expected="at least one, or None for all")
    return list(found.values())


def _equal_on_all(communicator: Ranks, entries: Array) -> bool:
    total = np.uint64(digest(entries))
    greatest = np.array([total, ~total])
    communicator.allreduce(greatest, "MAX")
    # max(d) == ~max(~d) only when all d are equal.
    return bool(greatest[0] == ~greatest[1])


def _entries_of_all(communicator: Ranks, entries: Array) -> list[dict[int, int]]:
    """Return the number and the digest of every variable of every rank."""
    counts = [int(text) for text in communicator.allgather_text(str(len(entries)))]
    together = np.empty((sum(counts), 2), np.uint64)
    communicator.allgatherv(entries, [2 * count for count in counts], together)
    blocks = np.split(together, np.cumsum(counts)[:-1])
    return [{int(number): int(one) for number, one in block} for block in blocks]


#: The ranks that have the same digest, by digest.
_Groups: TypeAlias = dict[int, list[int]]


def _differing(entries: Sequence[dict[int, int]], variables: dict[int, Variable]) -> Iterator[tuple[Variable, _Groups]]:
    """Yield each variable whose digests differ; variables that some rank has collected are left out."""
    for number, var in variables.items():
        if not all(number in theirs for theirs in entries):
            continue
        groups: _Groups = {}
        for rank, theirs in enumerate(entries):
            groups.setdefault(theirs[number], []).append(rank)
        if len(groups) > 1:
            yield var, groups


def _diverged(where: str, differing: Sequence[tuple[Variable, _Groups]], count: int) -> ReplicasDivergedError:
    shown = [_row(var, groups) for var, groups in differing[:_MOST_ROWS]]
    more = [f"  and {len(differing) - len(shown)} more"] if len(differing) > len(shown) else []
    error = ReplicasDivergedError.at(
        where,
        found=f"copies that differ in {len(differing)} of {count} variables",
        expected="the same bits on every rank",
        fix="\n".join(["These differ:", *shown, *more, _FIX]),
    )
    error.variables = tuple(var.name for var, _ in differing)
    error.ranks = tuple(sorted({rank for _, groups in differing for rank in _outliers(groups)}))
    return error


def _row(var: Variable, groups: _Groups) -> str:
    return f"  {var._key} {dtype_name(var.dtype)}{list(var.shape)}: {_in_words(groups)}"


def _majority(groups: _Groups) -> list[int]:
    """Return the ranks that more than half of all ranks agree with; none where there is no majority."""
    most = max(groups.values(), key=len)
    return most if 2 * len(most) > sum(map(len, groups.values())) else []


def _outliers(groups: _Groups) -> list[int]:
    """Return the ranks that differ from the majority, or from rank 0 where there is none."""
    right = _majority(groups) or next(ranks for ranks in groups.values() if 0 in ranks)
    return sorted(rank for ranks in groups.values() if ranks is not right for rank in ranks)


def _in_words(groups: _Groups) -> str:
    if majority := _majority(groups):
        others = _outliers(groups)
        differ = "differs" if len(others) == 1 else "differ"
        kinds = "" if len(groups) == 2 else f", in {len(groups) - 1} ways"
        return f"{ranks_in_words(others)} {differ} from the majority ({ranks_in_words(majority)}){kinds}"
    shown = [f"{ranks_in_words(ranks)}: {one:016x}" for one, ranks in list(groups.items())[:_MOST_GROUPS]]
    more = [f"and {len(groups) - len(shown)} more"] if len(groups) > len(shown) else []
    return f"no majority; digests of {', '.join([*shown, *more])}"
