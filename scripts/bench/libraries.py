"""Other libraries, measured in the same run: what `--peers FILE` loads.

A file of Python, such as those in scripts/peers, adds a library.  It defines

    PACKAGE: str = "torch"          # what must be installed, or else the report says that it is missing
    PEER: Start = TorchGloo         # starts the library on all ranks

The libraries run in the same processes as everything else, in turn with it.  None of them is ever required.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Variant

if TYPE_CHECKING:
    from mpistrategy.cli.bench.raw import RawRanks


@dataclass(frozen=True)
class TrainingStep:
    """A training step by another library.

    Attributes:
        name: its row in the tables.
        call: makes the step.
        parameters: views of the weights and biases, which the step changes.
        apart: whether it does not communicate.
        within: as in `Variant`.
    """

    name: str
    call: Callable[[], None]
    parameters: list[Array]
    apart: bool = False
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)


class Peer(Protocol):
    """A library that runs on all ranks.  For what it cannot do it yields nothing."""

    def one_array(self, array: Array) -> Iterator[Variant]:
        """Yield sums of one array."""

    def gradients(self, arrays: Sequence[Array]) -> Iterator[Variant]:
        """Yield sums of a list of arrays."""

    def training_steps(
        self, parameters: Sequence[Array], inputs: Array, classes: Array, rate: float
    ) -> Iterator[TrainingStep]:
        """Yield steps of the network in `network`, from these parameters, on this rank's rows."""

    def close(self) -> None:
        """End the library.  Collective."""


#: Starts a library on all ranks, given the ranks and the number of nodes.  Collective.
Start = Callable[["RawRanks", int], Peer]


def open_peers(files: Sequence[Path], ranks: RawRanks, nodes: int) -> tuple[list[Peer], dict[str, str]]:
    """Start the libraries of these files; return those that run, and why each of the others does not.  Collective."""
    running: list[Peer] = []
    missing = {}
    for file in files:
        module = _load(file)
        if importlib.util.find_spec(module.PACKAGE) is None:
            missing[file.stem] = f"{module.PACKAGE} is not installed"
        else:
            running.append(module.PEER(ranks, nodes))
    return running, missing


def _load(file: Path) -> Any:
    # At the end of the path: the files may import one another, and hide no installed package.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
