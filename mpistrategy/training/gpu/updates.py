"""Updates of many variables in GPU memory by one kernel, in as few launches as its table allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, span
from mpistrategy.arrays.gpu import DeviceArray, by_value, cupy_for
from mpistrategy.training import kernels
from mpistrategy.training.gpu import launching
from mpistrategy.training.gpu import update_kernel as on_gpu
from mpistrategy.training.gpu.update_kernel import Formula
from mpistrategy.variables.variable import Variable

_INSTEAD = "variables in GPU memory are updated one by one"


def formula_of(kernel: kernels.Kernel) -> tuple[Formula, tuple[float, ...]] | None:
    """Return what a kernel does as a formula for GPUs, and its numbers; None for a kernel of the program's own."""
    match kernel:
        case kernels.Sgd():
            return on_gpu.SGD, (kernel.rate,)
        case kernels.Momentum():
            return on_gpu.NESTEROV if kernel.nesterov else on_gpu.MOMENTUM, (kernel.rate, kernel.decay)
        case kernels.Adam():
            first, second = kernel.beta_1, kernel.beta_2
            return on_gpu.ADAM, (kernel.size, first, 1 - first, second, 1 - second, kernel.epsilon)
        case kernels.AfterDecay():
            inner = formula_of(kernel.kernel)
            if inner is None:
                return None
            numbers = (*inner[1], *[0.0] * (on_gpu.NUMBERS - 1 - len(inner[1])), kernel.decay)
            return inner[0].decayed(), numbers
    return None


def can_be_fused(parameter: Array) -> bool:
    """Return whether there are kernels for a variable's memory."""
    return is_on_device(parameter) and parameter.dtype.name in on_gpu.TYPES


def room_for(kernel: kernels.Kernel | None, variables: Sequence[Variable]) -> list[Array]:
    """Return the temporary arrays that updates of variables will need: none where one kernel updates all of them."""
    is_fused = kernel is not None and formula_of(kernel) is not None
    views = [var.local_view for var in variables]
    return kernels.make_room([view for view in views if not (is_fused and can_be_fused(view))])


class FusedUpdate:
    """Variables of one dtype on one GPU, and their slots: `run` makes a step of all of them.

    Args:
        parameters: the variables' memory, C-contiguous.
        slots: each one's slots by name, of the same shape and dtype.
    """

    def __init__(self, parameters: Sequence[DeviceArray], slots: Sequence[Mapping[str, DeviceArray]]) -> None:
        self._parameters = parameters
        self._slots = slots
        self._dtype = parameters[0].dtype
        self._launches: list[launching.Launch] = []
        self._rows: Array = np.zeros((0, 0), np.uint64)
        self._formula: Formula | None = None
        spans = sorted(span(array) for array in (*parameters, *(s for each in slots for s in each.values())))
        self._begins, self._ends = (np.array(each, np.uint64) for each in zip(*spans, strict=True))

    def run(self, kernel: kernels.Kernel, gradients: Sequence[DeviceArray], scale: DeviceArray | None) -> bool:
        """Make one step on the current stream; return False, and do nothing, where no kernel does it.

        Args:
            kernel: the step.
            gradients: of the variables' shapes and dtype.
            scale: a number of float64 on the GPU, which the gradients are multiplied by first; None for 1.
        """
        found = formula_of(kernel)
        if found is None:
            return False
        formula, values = found
        cupy = cupy_for("variables in GPU memory")
        with self._parameters[0].device:
            function = launching.compiled(
                cupy, formula.source(self._dtype), formula.kernel_name(self._dtype), on_gpu.OPTIONS, _INSTEAD
            )
            if function is None:
                return False
            if formula != self._formula:
                self._prepare(formula)
            numbers = np.zeros(on_gpu.NUMBERS, np.float64)
            with np.errstate(over="ignore"):
                numbers[: len(values)] = np.array(values).astype(self._dtype)  # as NumPy rounds a Python number
            # Copies and the like are kept until all launches are on the stream.
            gradients = self._apart([each if each.flags.c_contiguous else each.copy() for each in gradients])
            self._rows[1] = launching.addresses(gradients)
            pointer = np.uint64(0 if scale is None else scale.data.ptr)
            for launch in self._launches:
                table, count = launch.filled(self._rows), np.int32(launch.count)
                function((launch.blocks,), (on_gpu.THREADS,), (table, by_value(numbers), pointer, count))
        return True

    def _prepare(self, formula: Formula) -> None:
        rows = [self._parameters, self._parameters, *([each[name] for each in self._slots] for name in formula.slots)]
        self._rows = np.stack([launching.addresses(row) for row in rows])
        sizes = [each.size for each in self._parameters]
        arguments = (self._dtype.itemsize, formula.table, formula.arrays, on_gpu.BLOCK_ELEMENTS)
        self._launches = launching.launches(sizes, *arguments)
        self._formula = formula

    def _apart(self, gradients: Sequence[DeviceArray]) -> Sequence[DeviceArray]:
        """Return gradients that share no memory with what the step changes."""
        begins = launching.addresses(gradients)
        ends = begins + np.fromiter((each.nbytes for each in gradients), np.uint64, len(gradients))
        after = np.searchsorted(self._ends, begins, "right")  # the first memory that ends behind the gradient's begin
        shared = after < len(self._begins)
        shared[shared] = self._begins[after[shared]] < ends[shared]
        if not shared.any():
            return gradients
        return [each.copy() if is_shared else each for each, is_shared in zip(gradients, shared, strict=True)]
