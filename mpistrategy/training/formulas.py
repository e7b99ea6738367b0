"""The formulas of the optimizers: each is written once, as NumPy's operations in place on arrays of one dtype.

A formula is a function of a parameter, which it changes; its gradient, which it only reads; its slots by name, which it
changes; and `SCRATCH_ARRAYS` temporary arrays.  All have one dtype and shape.  NumPy runs it on pieces that fit the
cache (`mpistrategy.training.kernels`), CuPy on whole arrays; `mpistrategy.training.gpu_update` writes its operations
down as a kernel for GPUs.  Each operation is rounded to the dtype, so all of them give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.convert import any_array
from mpistrategy.arrays.dtypes import Array, is_bfloat16
from mpistrategy.variables.variable import Variable

#: How many temporary arrays a formula may use.
SCRATCH_ARRAYS = 2

#: A formula with its numbers: one step.
Kernel: TypeAlias = Callable[[Any, Any, Mapping[str, Any], Sequence[Any]], None]


def sgd(
    parameter: Array, gradient: Array, slots: Mapping[str, Array], scratch: Sequence[Array], *, rate: float
) -> None:
    """Do ``p -= rate * g``."""
    change = scratch[0]
    np.multiply(rate, gradient, out=change)
    np.subtract(parameter, change, out=parameter)


def momentum(
    parameter: Array,
    gradient: Array,
    slots: Mapping[str, Array],
    scratch: Sequence[Array],
    *,
    rate: float,
    decay: float,
    nesterov: bool,
) -> None:
    """Do ``v = decay * v - rate * g``, then ``p += v``, or ``p -= rate * g - decay * v``."""
    velocity, (step, ahead) = slots["momentum"], scratch
    np.multiply(rate, gradient, out=step)
    np.multiply(decay, velocity, out=velocity)
    np.subtract(velocity, step, out=velocity)
    if nesterov:
        np.multiply(decay, velocity, out=ahead)
        np.subtract(step, ahead, out=step)
        np.subtract(parameter, step, out=parameter)
    else:
        np.add(parameter, velocity, out=parameter)


def adam(
    parameter: Array,
    gradient: Array,
    slots: Mapping[str, Array],
    scratch: Sequence[Array],
    *,
    size: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> None:
    """Do Adam's step; `size` includes the correction of the bias."""
    m, v, (change, root) = slots["m"], slots["v"], scratch
    np.multiply(1 - beta_1, gradient, out=change)
    np.multiply(beta_1, m, out=m)
    np.add(m, change, out=m)
    np.multiply(1 - beta_2, gradient, out=change)
    conjugate = np.conjugate(gradient, out=root) if gradient.dtype.kind == "c" else gradient
    np.multiply(change, conjugate, out=change)
    np.multiply(beta_2, v, out=v)
    np.add(v, change, out=v)
    np.multiply(size, m, out=change)
    np.sqrt(v, out=root)
    np.add(root, epsilon, out=root)
    np.divide(change, root, out=change)
    np.subtract(parameter, change, out=parameter)


def decayed(
    parameter: Array,
    gradient: Array,
    slots: Mapping[str, Array],
    scratch: Sequence[Array],
    *,
    decay: float,
    then: Kernel,
) -> None:
    """Do ``p -= decay * p``, and then another step."""
    change = scratch[0]
    np.multiply(decay, parameter, out=change)
    np.subtract(parameter, change, out=parameter)
    then(parameter, gradient, slots, scratch)


def change_of(kernel: Kernel, gradient: Array, slots: Mapping[str, Variable]) -> Array:
    """Change slots by a kernel, on whole arrays, on the host or a GPU; return the change to subtract.

    bfloat16, which has no arithmetic of its own, is computed in float32; slots are rounded at the end.
    """
    gradient = any_array(gradient)
    dtype = np.dtype(np.float32) if is_bfloat16(gradient.dtype) else gradient.dtype
    storages = {name: slot._storage for name, slot in slots.items()}
    working = {name: array.astype(dtype, copy=False) for name, array in storages.items()}
    lost = gradient.astype(dtype)
    scratch = [np.empty_like(lost) for _ in range(SCRATCH_ARRAYS)]
    lost[...] = -0.0  # of which a step leaves its negative, with the signs of zeros
    kernel(lost, gradient.astype(dtype, copy=False), working, scratch)
    for name, array in working.items():
        if array is not storages[name]:
            storages[name][...] = array
    return np.negative(lost, out=lost)
