"""The check whether reduced gradients are finite.  It has the same result on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array, is_on_device
from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.arrays.values import IndexedSlices, contribution
from mpistrategy.errors import NonFiniteError, NonFiniteWarning, OptionError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import call_site
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.nearest import did_you_mean
from mpistrategy.options import NonFinite
from mpistrategy.variables.variable import Variable

#: What can be done about gradients that are not finite.
POLICIES = ("raise", "skip", "warn", None)
_PIECE = 2**16


def checked_policy(where: str, policy: Any) -> NonFinite | None:
    """Return `policy` in small letters; raise OptionError unless it is one of `POLICIES`."""
    if not (policy is None or (isinstance(policy, str) and policy.lower() in POLICIES)):
        raise OptionError.at(
            where,
            found=f"nonfinite={policy!r}",
            expected='"raise", "skip", "warn" or None',
            fix=did_you_mean(policy, ("raise", "skip", "warn")),
        )
    return policy and policy.lower()  # type: ignore[return-value]


def all_finite(array: Array) -> bool:
    """Return whether all numbers of a floating or complex array are finite, without a temporary array of its size."""
    with np.errstate(all="ignore"):
        # A sum with an infinity or NaN is not finite.  A sum of large numbers may overflow: each is checked then.
        wide = wire_dtype(array.dtype)
        total = array.sum(dtype=wide) if is_on_device(array) else np.add.reduce(array, axis=None, dtype=wide)
        if np.isfinite(total):
            return True
    return all(np.isfinite(piece).all() for piece in _pieces(array))


def first_not_finite(arrays: Sequence[Array]) -> int | None:
    """Return the number of the first array that is not finite; None if all are."""
    return next((number for number, array in enumerate(arrays) if not all_finite(array)), None)


def what_is_not(array: Array) -> str:
    """Return how many numbers of an array are not finite, in words: ``2 NaN, 1 infinite``; "" for none."""
    nan = infinite = 0
    for piece in _pieces(array):
        nans = int(np.isnan(piece).sum())
        nan += nans
        infinite += piece.size - int(np.isfinite(piece).sum()) - nans
    return ", ".join(text for count, text in ((nan, f"{nan} NaN"), (infinite, f"{infinite} infinite")) if count)


def _pieces(array: Array) -> Iterator[Array]:
    flat = array.ravel("K")  # a view, if the array is contiguous in any order of its axes
    for start in range(0, flat.size, _PIECE):
        yield flat[start : start + _PIECE]


def screen(
    communicator: Ranks,
    call: Call,
    broken: int | None,
    norm: float,
    variables: Sequence[Variable],
    brought: Sequence[Any] | None,
    policy: str,
) -> str:
    """Return which reduced gradient is not finite, in words, the same on all ranks; "" if all are.

    Collective: the ranks exchange one number.  What they see may differ, with different Mirrored gradients on each rank
    or with broken memory.

    Args:
        communicator: the ranks.
        call: the call that all ranks make.
        broken: the first reduced gradient that is not finite here; see `first_not_finite`.
        norm: the norm of all of them, if they are clipped; else 0.
        variables: their variables.
        brought: this rank's gradients before the reduction; None if they have been overwritten.
        policy: what will be done; with "skip" the result does not say which rank had such numbers.

    Raises:
        NonFiniteError: on all ranks, where the policy is "raise".
    """
    call.expect_more()
    first = len(variables) if broken is None else broken
    if broken is None and np.isfinite(norm):
        first += 1
    if communicator.size > 1:
        call.agree("screen gradients", op=policy)
        least = np.array([first], np.int64)
        communicator.allreduce(least, "MIN")
        first = int(least[0])
    if first > len(variables):
        return ""
    what = "a global norm of the gradients that is not finite"
    if first < len(variables):
        what = f"a reduced gradient of {variables[first]._key} that is not finite"
        if policy != "skip" and brought is not None:
            what += f" ({_of_ranks(communicator, contribution(brought[first]))})"
    if policy == "raise":
        raise NonFiniteError.at(call.where, found=what, expected="finite numbers", fix="Nothing has changed.")
    return what


def _of_ranks(communicator: Ranks, gradient: Any) -> str:
    """Return in words which ranks' gradients are not finite.  Collective."""
    mine = what_is_not(host_array(gradient.values if isinstance(gradient, IndexedSlices) else gradient))
    told = [f"rank {rank} brought {text}" for rank, text in enumerate(communicator.allgather_text(mine)) if text]
    return _shortened(told) or "no rank had such numbers: their sum overflowed"


def _shortened(texts: Sequence[str], most: int = 8) -> str:
    return "; ".join([*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])])


def warn_of(trouble: str, where: str, step: int, rank: int) -> None:
    """Warn on replica 0, at the line of the program that makes the call."""
    if rank == 0:
        file, _, line = call_site().text.rpartition(":")
        text = f"{where}: {trouble}; the step was made, as nonfinite='warn' says (step {step})"
        warnings.warn_explicit(text, NonFiniteWarning, file or "?", int(line) if line.isdigit() else 1)
