"""What happens to reduced gradients before a step: their norm is limited, and they are checked to be finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray
from mpistrategy.gradients import clip_by_global_norm, scaled_by
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import NonFinite
from mpistrategy.training.gpu.norm import norm_of
from mpistrategy.training.nonfinite import first_not_finite, screen
from mpistrategy.training.plans import StepPlan

#: The gradients; what they are still to be multiplied by, in GPU memory, or None; what of them is not finite.
Screened: TypeAlias = tuple[Sequence[Array], DeviceArray | None, str]


def screened(
    reduced: Sequence[Array],
    plan: StepPlan,
    brought: Sequence[Any] | None,
    call: Call,
    *,
    clip: float | None,
    policy: NonFinite | None,
    scales: bool,
) -> Screened:
    """Return gradients ready for the step.  Nothing waits for a GPU unless there is a policy.

    Args:
        reduced: the gradients.
        plan: the step's.
        brought: this rank's gradients before the reduction; None if they have been overwritten.
        call: the call that all ranks make.
        clip: the most that their norm may be; None for no limit.
        policy: what is done if they are not finite; None: nobody looks.  One of the two is given.
        scales: whether gradients in GPU memory are multiplied here; else the update does it.

    Raises:
        NonFiniteError: on all ranks, where the policy is "raise".
    """
    norm, broken, scale = 0.0, None, None
    on_gpu = norm_of(reduced, np.inf if clip is None else clip)
    if on_gpu is not None:
        if policy is not None:
            norm, broken = on_gpu.read()
        if clip is not None:
            scale = on_gpu.scale
            if scales:
                reduced, scale = scaled_by(reduced, float(scale.get()[0])), None
    else:
        if policy is not None:
            broken = first_not_finite(reduced)
        if clip is not None:
            reduced, norm = clip_by_global_norm(reduced, clip)
    if policy is None:
        return reduced, scale, ""
    communicator = plan.strategy.extended.communicator
    trouble = screen(communicator, call, broken, 0.0 if clip is None else norm, plan.variables, brought, policy)
    return reduced, scale, trouble
