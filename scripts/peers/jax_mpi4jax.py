"""mpi4jax: MPI inside compiled functions of JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from libraries import Start, TrainingStep
from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Variant
from mpistrategy.cli.bench.raw import RawRanks

PACKAGE = "mpi4jax"


class Mpi4Jax:
    """Sums of JAX's own arrays: bringing NumPy's there is not counted."""

    def __init__(self, ranks: RawRanks, nodes: int) -> None:
        import jax
        import mpi4jax

        jax.config.update("jax_platforms", "cpu")
        self.jax = jax
        self.name = f"mpi4jax {mpi4jax.__version__}"

        def sum_all(arrays: Any) -> Any:
            return [mpi4jax.allreduce(array, op=ranks.sum, comm=ranks.comm) for array in arrays]

        self._sum = jax.jit(sum_all)

    def one_array(self, array: Array) -> Iterator[Variant]:
        """Yield a sum in a compiled function."""
        yield self._variant([array])

    def gradients(self, arrays: Sequence[Array]) -> Iterator[Variant]:
        """Yield a compiled function that sums all arrays."""
        yield self._variant(arrays)

    def training_steps(
        self, parameters: Sequence[Array], inputs: Array, classes: Array, rate: float
    ) -> Iterator[TrainingStep]:
        """Yield nothing."""
        yield from ()

    def _variant(self, arrays: Sequence[Array]) -> Variant:
        held: list[Any] = []

        def load() -> None:
            held[:] = [self.jax.numpy.array(array) for array in arrays]  # copies

        def call() -> Any:
            return self.jax.block_until_ready(self._sum(held))

        return Variant(self.name, call, arrays, load=load)

    def close(self) -> None:
        """Nothing holds anything."""


PEER: Start = Mpi4Jax
