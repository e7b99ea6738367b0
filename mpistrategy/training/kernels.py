"""Kernels: one step of an optimizer, in place, on flat pieces that fit the cache.

A kernel makes the operations of the optimizer's formula on every element, in the same order.  So it gives the bits of
the formula applied to whole arrays, in any pieces, without temporary arrays of the variable's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpistrategy.arrays.convert import is_on_device, may_share_memory, on_device_of
from mpistrategy.arrays.dtypes import Array

#: The most bytes of one array that a kernel is given at once.  The arrays of a step then stay in the cache between its
#: operations.  Smaller pieces are slower: they need more calls (measured, 64 KiB to 4 MiB).
CHUNK_BYTES = 2**19
#: How many scratch arrays a kernel may use.
SCRATCH_ARRAYS = 2
#: Chunks on a GPU are so large that the time to launch a kernel does not count.
DEVICE_CHUNK_BYTES = 64 * 2**20


class Kernel(Protocol):
    """One step on flat contiguous arrays of one dtype and length.

    Args:
        parameter: changed in place.
        gradient: only read: it may be the caller's array.
        slots: changed in place, by name.
        scratch: `SCRATCH_ARRAYS` temporary arrays.
    """

    def __call__(
        self, parameter: Array, gradient: Array, slots: Mapping[str, Array], scratch: Sequence[Array]
    ) -> None: ...


@dataclass(frozen=True)
class Sgd:
    """The kernel of ``p -= rate * g``."""

    rate: float

    def __call__(self, parameter: Array, gradient: Array, slots: Mapping[str, Array], scratch: Sequence[Array]) -> None:
        change = scratch[0]
        np.multiply(self.rate, gradient, out=change)
        np.subtract(parameter, change, out=parameter)


@dataclass(frozen=True)
class Momentum:
    """The kernel of ``v = decay * v - rate * g``, then ``p += v``, or ``p -= rate * g - decay * v``."""

    rate: float
    decay: float
    nesterov: bool

    def __call__(self, parameter: Array, gradient: Array, slots: Mapping[str, Array], scratch: Sequence[Array]) -> None:
        velocity, (step, ahead) = slots["momentum"], scratch
        np.multiply(self.rate, gradient, out=step)
        np.multiply(self.decay, velocity, out=velocity)
        np.subtract(velocity, step, out=velocity)
        if self.nesterov:
            np.multiply(self.decay, velocity, out=ahead)
            np.subtract(step, ahead, out=step)
            np.subtract(parameter, step, out=parameter)
        else:
            np.add(parameter, velocity, out=parameter)


@dataclass(frozen=True)
class Adam:
    """The kernel of Adam's step; `size` includes the correction of the bias."""

    size: float
    beta_1: float
    beta_2: float
    epsilon: float

    def __call__(self, parameter: Array, gradient: Array, slots: Mapping[str, Array], scratch: Sequence[Array]) -> None:
        m, v, (change, root) = slots["m"], slots["v"], scratch
        np.multiply(1 - self.beta_1, gradient, out=change)
        np.multiply(self.beta_1, m, out=m)
        np.add(m, change, out=m)
        np.multiply(1 - self.beta_2, gradient, out=change)
        np.multiply(change, gradient, out=change)
        np.multiply(self.beta_2, v, out=v)
        np.add(v, change, out=v)
        np.multiply(self.size, m, out=change)
        np.sqrt(v, out=root)
        np.add(root, self.epsilon, out=root)
        np.divide(change, root, out=change)
        np.subtract(parameter, change, out=parameter)


@dataclass(frozen=True)
class AfterDecay:
    """A kernel that does ``p -= decay * p`` before another's step."""

    decay: float
    kernel: Kernel

    def __call__(self, parameter: Array, gradient: Array, slots: Mapping[str, Array], scratch: Sequence[Array]) -> None:
        change = scratch[0]
        np.multiply(self.decay, parameter, out=change)
        np.subtract(parameter, change, out=parameter)
        self.kernel(parameter, gradient, slots, scratch)


def has_kernel(dtype: np.dtype[Any]) -> bool:
    """Return whether kernels take `dtype`: NumPy's own floats, not bfloat16.

    Complex dtypes are left out, because the last bits of their products depend on the alignment of the arrays: NumPy
    multiplies some elements with fused instructions and others without.
    """
    return dtype.kind == "f"


#: The methods that say what a step does.
STEP_METHODS = ("_kernel", "change", "update")


def has_current_kernel(optimizer: object, base: type) -> bool:
    """Return whether the `_kernel` of an optimizer does what its `change` and `update` do.

    It does not where `change` or `update` is overridden in a more derived class, or on the instance.  The class `base`
    has no kernel.
    """
    classes = type(optimizer).__mro__
    at = {name: next(number for number, one in enumerate(classes) if name in vars(one)) for name in STEP_METHODS}
    overridden = min(at["change"], at["update"]) < at["_kernel"] or not vars(optimizer).keys().isdisjoint(at)
    return not overridden and classes[at["_kernel"]] is not base


class Scratch:
    """Temporary arrays, made once for each dtype."""

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], tuple[Array, ...]] = {}

    def of(self, dtype: np.dtype[Any], size: int) -> tuple[Array, ...]:
        """Return ``SCRATCH_ARRAYS + 1`` arrays of `size` elements (at most `chunk_size`): always the same memory."""
        known = self._arrays.get(dtype)
        if known is None:
            known = self._arrays[dtype] = tuple(np.empty((SCRATCH_ARRAYS + 1, chunk_size(dtype)), dtype))
        return tuple(array[:size] for array in known)


def chunk_size(dtype: np.dtype[Any]) -> int:
    """Return how many elements of `dtype` a kernel is given at once, at most."""
    return CHUNK_BYTES // dtype.itemsize


def chunks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield the pieces of at most `size` elements from `start` to `stop`."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def flat_update(parameter: Array, slots: Mapping[str, Array], scratch: Scratch) -> FlatUpdate:
    """Return the update of one variable, on the host or on a GPU."""
    return (DeviceUpdate if is_on_device(parameter) else FlatUpdate)(parameter, slots, scratch)


class FlatUpdate:
    """One variable and its slots, cut into chunks once; `run` makes a step.

    Args:
        parameter: the variable's memory, C-contiguous.
        slots: its slots' memory by name, of the same shape and dtype.
        scratch: temporary arrays for the kernel.
    """

    def __init__(self, parameter: Array, slots: Mapping[str, Array], scratch: Scratch) -> None:
        self._memory = [parameter, *slots.values()]
        flat, beside = parameter.reshape(-1), {name: slot.reshape(-1) for name, slot in slots.items()}
        self._chunks = [
            (
                piece,
                flat[piece],
                {name: slot[piece] for name, slot in beside.items()},
                scratch.of(flat.dtype, piece.stop - piece.start)[:SCRATCH_ARRAYS],
            )
            for piece in chunks(0, flat.size, chunk_size(flat.dtype))
        ]

    def run(self, kernel: Kernel, gradient: Array) -> None:
        """Make one step with `gradient`, which has the variable's shape and dtype."""
        if any(np.may_share_memory(gradient, array) for array in self._memory):
            gradient = gradient.copy()  # the step would change it before it has read all of it
        flat = gradient.reshape(-1)
        for piece, parameter, slots, scratch in self._chunks:
            kernel(parameter, flat[piece], slots, scratch)


class DeviceUpdate(FlatUpdate):
    """The same in GPU memory: chunks are larger, and temporary arrays go back to CuPy's pool after each step."""

    def __init__(self, parameter: Array, slots: Mapping[str, Array], scratch: Scratch) -> None:
        self._memory = [parameter, *slots.values()]
        flat, beside = parameter.reshape(-1), {name: slot.reshape(-1) for name, slot in slots.items()}
        self._chunks = [
            (piece, flat[piece], {name: slot[piece] for name, slot in beside.items()}, ())
            for piece in chunks(0, flat.size, DEVICE_CHUNK_BYTES // flat.dtype.itemsize)
        ]

    def run(self, kernel: Kernel, gradient: Array) -> None:
        """Make one step with `gradient`, on the current stream."""
        with on_device_of(self._memory[0]):
            if any(may_share_memory(gradient, array) for array in self._memory):
                gradient = gradient.copy()
            flat = gradient.reshape(-1)
            for piece, parameter, slots, _ in self._chunks:
                kernel(parameter, flat[piece], slots, [np.empty_like(parameter) for _ in range(SCRATCH_ARRAYS)])


def make_room(parameters: Sequence[Array]) -> list[Array]:
    """Return temporary arrays as large as the updates of these will need, to run out of memory before the ranks agree.

    Drop them where the updates begin: CuPy's pool then has the memory ready.
    """
    on_device = [array for array in parameters if is_on_device(array)]
    if not on_device:
        return []
    largest = max(on_device, key=lambda array: array.nbytes)
    with on_device_of(largest):
        piece = largest.reshape(-1)[: DEVICE_CHUNK_BYTES // largest.dtype.itemsize]
        return [np.empty_like(piece) for _ in range(SCRATCH_ARRAYS)]
