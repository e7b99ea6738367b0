"""What happens to reduced gradients before a step: their norm is limited, and they are checked to be finite.

The check has the same result on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import cupy_for, host_array, is_on_device, on_device_of_any
from mpistrategy.arrays.dtypes import Array, quietly, wire_dtype
from mpistrategy.arrays.values import IndexedSlices, contribution
from mpistrategy.errors import NonFiniteError
from mpistrategy.gradients import global_norm, scale_for, scaled_by
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.options import NonFinite
from mpistrategy.reduction.transfer import layouts_of, packs_of
from mpistrategy.training.plans import StepPlan

#: One array for each dtype, however many bytes.
_ANY_BYTES = 2**62


def screened(
    reduced: Sequence[Array],
    plan: StepPlan,
    originals: Sequence[Any] | None,
    call: Call,
    *,
    clip: float | None,
    policy: NonFinite | None,
) -> tuple[Sequence[Array], str]:
    """Return gradients ready for the step, and which gradient is not finite, in words; "" where all are.

    Collective where there is a policy: the ranks exchange one number.  Their gradients may differ: by different
    Mirrored gradients on each rank, or by broken memory.

    Args:
        reduced: the gradients.
        plan: the step's.
        originals: this rank's gradients before the reduction; None if they have been overwritten.
        call: the call that all ranks make.
        clip: the most that their norm may be; None for no limit.
        policy: what is done if they are not finite; None: no check.

    Raises:
        NonFiniteError: on all ranks, where the policy is "raise".
    """
    if clip is None and policy is None:
        return reduced, ""
    on_gpu = any(map(is_on_device, reduced))
    parts, reduced = _gathered(reduced) if on_gpu else (reduced, reduced)
    norm = global_norm(parts) if on_gpu or clip is not None else 0.0
    first = len(reduced) if clip is not None and not np.isfinite(norm) else len(reduced) + 1
    if policy is not None and not (on_gpu and np.isfinite(norm)):
        first = next((number for number, array in enumerate(reduced) if not all_finite(array)), first)
    if clip is not None and on_gpu:
        for part in parts:
            part[...] = scaled_by([part], scale_for(norm, clip))[0]
    elif clip is not None:
        reduced = scaled_by(reduced, scale_for(norm, clip))
    if policy is None:
        return reduced, ""
    ranks = plan.strategy.extended.communicator
    call.expect_more()
    call.agree("screen gradients", op=policy)
    least = np.array([first], np.int64)
    ranks.allreduce(least, "MIN")
    first = int(least[0])
    if first > len(reduced):
        return reduced, ""
    problem = "a global norm of the gradients that is not finite"
    if first < len(reduced):
        problem = f"a reduced gradient of {plan.variables[first]._key} that is not finite"
        if policy != "skip" and originals is not None:
            problem += f" ({_of_ranks(ranks, contribution(originals[first]))})"
    if policy == "raise":
        raise NonFiniteError.at(call.where, found=problem, expected="finite numbers", fix="Nothing has changed.")
    return reduced, problem


def _gathered(arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Copy arrays in GPU memory into one array for each dtype, by few launches; return these arrays, and the copies."""
    from mpistrategy.reduction.gpu import fill  # here: on CPUs nothing reads it

    copies = [array if is_on_device(array) else array.copy() for array in arrays]
    together = [array for array in copies if not is_on_device(array)]
    numbers = [number for number, array in enumerate(arrays) if is_on_device(array)]
    on_gpu = [arrays[number] for number in numbers]
    with on_device_of_any(on_gpu):
        for pack in packs_of(layouts_of(on_gpu), _ANY_BYTES, wire=None):
            together.append(cupy_for("gradients in GPU memory").empty(pack.size, pack.dtype))
            fill(pack, on_gpu, together[-1])
            for index, view in pack.views(together[-1]):
                copies[numbers[index]] = view
    return together, copies


@quietly
def all_finite(array: Array) -> bool:
    """Return whether all numbers of a floating or complex array are finite; usually without a temporary array."""
    # A sum with an infinity or NaN is not finite.  A sum of large numbers may overflow: each is checked then.
    wide = wire_dtype(array.dtype)
    total = array.sum(dtype=wide) if is_on_device(array) else np.add.reduce(array, axis=None, dtype=wide)
    return bool(np.isfinite(total) or np.isfinite(array).all())


def _of_ranks(ranks: Ranks, gradient: Any) -> str:
    """Return in words which ranks' gradients are not finite.  Collective."""
    is_finite = all_finite(host_array(gradient.values if isinstance(gradient, IndexedSlices) else gradient))
    broken_ranks = [rank for rank, text in enumerate(ranks.allgather_text("" if is_finite else "not finite")) if text]
    return f"of {ranks_in_words(broken_ranks)}" if broken_ranks else "no rank had such numbers: their sum overflowed"
