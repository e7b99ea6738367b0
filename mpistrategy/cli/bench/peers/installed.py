"""Other libraries that users sum gradients with, where they are installed; none is ever required.

They run in the same processes as everything else, in turn with it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mpistrategy.arrays.dtypes import Array

if TYPE_CHECKING:
    from mpistrategy.cli.bench.cases.case import Variant
    from mpistrategy.cli.bench.measuring.raw import RawRanks


@dataclass(frozen=True)
class TrainingStep:
    """A step of a network by another library.

    Attributes:
        name: how tables call it.
        call: makes one.
        parameters: views of the weights and biases as it changes them.
        apart: whether it does without communication.
        within: as a `Variant`'s.
    """

    name: str
    call: Callable[[], None]
    parameters: list[Array]
    apart: bool = False
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)


class Peer(Protocol):
    """A library that is running on all ranks; what it cannot do it yields nothing for."""

    def one_array(self, array: Array) -> Iterator[Variant]:
        """Yield sums of one array."""

    def gradients(self, arrays: Sequence[Array]) -> Iterator[Variant]:
        """Yield sums of a list of arrays."""

    def training_steps(
        self, parameters: Sequence[Array], inputs: Array, classes: Array, rate: float
    ) -> Iterator[TrainingStep]:
        """Yield steps of `mpistrategy.cli.bench.cases.network`'s network with these parameters, on this rank's rows."""

    def close(self) -> None:
        """End it.  Collective."""


#: What `--peers` takes: the package that must be there, and the class here that runs it.
PEERS = {
    "torch": ("torch", "mpistrategy.cli.bench.peers.torch", "TorchGloo"),
    "horovod": ("horovod", "mpistrategy.cli.bench.peers.horovod", "Horovod"),
    "mpi4jax": ("mpi4jax", "mpistrategy.cli.bench.peers.mpi4jax", "Mpi4Jax"),
    "tensorflow": ("tensorflow", "mpistrategy.cli.bench.peers.tensorflow", "MultiWorker"),
}


def open_peers(names: Sequence[str], ranks: RawRanks, nodes: int) -> tuple[list[Peer], dict[str, str]]:
    """Start the named libraries; return those that run, and why each of the others does not.  Collective."""
    running: list[Peer] = []
    missing = {}
    for name in names:
        package, module, peer = PEERS[name]
        if importlib.util.find_spec(package) is None:
            missing[name] = f"{package} is not installed"
        else:
            running.append(getattr(importlib.import_module(module), peer)(ranks, nodes))
    return running, missing
