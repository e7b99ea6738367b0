"""Horovod on torch's tensors, over the MPI of the job: for a Horovod that was built with MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch_gloo
from libraries import Start, TrainingStep
from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Variant
from mpistrategy.cli.bench.raw import RawRanks

PACKAGE = "horovod"


class _Turn:
    """Horovod runs only while it is called: its thread talks to the other ranks every millisecond, idle or not."""

    def __init__(self, hvd: Any, first: Callable[[], object]) -> None:
        self._hvd, self._first = hvd, first

    def __enter__(self) -> None:
        self._hvd.init()
        self._first()  # its buffer, and what the ranks agree on under each name; a program has them from then on

    def __exit__(self, *exception: object) -> None:
        self._hvd.shutdown()


class Horovod:
    """Sums in place.  They have names, as an optimizer's have: what was agreed on under a name is remembered."""

    def __init__(self, ranks: RawRanks, nodes: int) -> None:
        import horovod
        import horovod.torch as hvd
        import torch

        torch.set_num_threads(1)
        self.torch, self.hvd = torch, hvd
        self.name = f"horovod {horovod.__version__}"

    def one_array(self, array: Array) -> Iterator[Variant]:
        """Yield a sum of `array`."""
        tensor = self.torch.from_numpy(array)
        all_reduce, total = self.hvd.allreduce_, self.hvd.Sum

        def call() -> None:
            all_reduce(tensor, name="array", op=total)

        yield Variant(self.name, call, [array], within=_Turn(self.hvd, call))

    def gradients(self, arrays: Sequence[Array]) -> Iterator[Variant]:
        """Yield a sum of the arrays as one group, which Horovod packs itself."""
        tensors = [self.torch.from_numpy(array) for array in arrays]
        all_reduce, total = self.hvd.grouped_allreduce_, self.hvd.Sum

        def call() -> None:
            all_reduce(tensors, name="arrays", op=total)

        yield Variant(f"{self.name}, grouped", call, arrays, within=_Turn(self.hvd, call))

    def training_steps(
        self, parameters: Sequence[Array], inputs: Array, classes: Array, rate: float
    ) -> Iterator[TrainingStep]:
        """Yield the step with DistributedOptimizer; the one without communication is `TorchGloo`'s."""
        network = torch_gloo.network(parameters)
        with _Turn(self.hvd, lambda: None):  # it asks how many ranks there are
            optimizer = self.hvd.DistributedOptimizer(
                self.torch.optim.SGD(network.parameters(), rate), network.named_parameters(), op=self.hvd.Average
            )
        step = torch_gloo.training_step("torch Horovod", network, optimizer, inputs, classes)

        def first() -> None:
            before = [parameter.copy() for parameter in step.parameters]
            step.call()
            for parameter, value in zip(step.parameters, before, strict=True):
                parameter[...] = value

        yield replace(step, within=_Turn(self.hvd, first))

    def close(self) -> None:
        """Nothing runs."""


PEER: Start = Horovod
