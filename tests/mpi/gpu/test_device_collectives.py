"""Every collective of every path, against NumPy; and how many bytes of it go to the host.

On 3 and 4 ranks the ranks are also on two pretended nodes, of equal and of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cuda_counts
import gpu_here
import numpy as np
import pytest
from replicas import ALL, RANK, SIZE, OnNodes, rows

import mpistrategy as ms
from mpistrategy.arrays.dtypes import COMBINE
from mpistrategy.mpi.gpu.transports.choice import device_path
from mpistrategy.mpi.interface.gpu_transport import DevicePath, communication_memory

#: The node of each rank, in digits, by the number of ranks: nodes of 2 and 1, 2 and 2.
NODES = {3: "010", 4: "0110"}
_ONE_NODE = [(name, "0" * SIZE) for name in gpu_here.PATHS if SIZE <= 3 or ALL]
#: Ranks on pretended nodes share one GPU, which NCCL refuses.
_ON_NODES = [(name, NODES[SIZE]) for name in gpu_here.PATHS if SIZE in NODES and name != "nccl"]
pytestmark = pytest.mark.skipif(not _ONE_NODE + _ON_NODES, reason="fewer ranks show it")
#: Of float64: one piece, several pieces of the staged path, and a size that no number of ranks divides.
SIZES = (1, 1003, 600_001)
OPS = ("SUM", "MIN", "MAX")
DTYPES = ("float32", "float64", "int32", "int64")
SPECIAL = (np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1.5, -2.5)


@pytest.fixture(scope="module", params=_ONE_NODE + _ON_NODES, ids=" on ".join)
def path(request: pytest.FixtureRequest, cupy: ModuleType) -> Iterator[Path]:
    name, nodes = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPISTRATEGY_CUDA_AWARE", "1")
        if len(set(nodes)) == 1:
            made: ms.Strategy = gpu_here.strategy(name)
        else:
            made = OnNodes([int(node) for node in nodes], ms.MpiAllReduce(), "GPU")
        with made as strategy:
            yield Path(cupy, strategy, name)


class Path:
    """A path, and what goes through it."""

    def __init__(self, cupy: Any, strategy: Any, name: str) -> None:
        self.cupy, self.name = cupy, name
        self.ranks: Any = strategy.extended.communicator
        self.made: DevicePath = device_path(self.ranks, name)
        assert self.made.name == ("alone" if SIZE == 1 else name)

    def memory(self, host: np.ndarray) -> Any:
        """Return a copy for the communication; behind what may be under way on the stream."""
        made = communication_memory(self.cupy, host.size, host.dtype)
        made[...] = self.cupy.asarray(host)
        return made

    def counted(self, do: Callable[[], None], payload: int) -> None:
        """Do something; see that it copies nothing to the host or, on the staged path, at most `payload`."""
        if not cuda_counts.IS_COUNTED:
            do()
            return
        with cuda_counts.counted() as counts:
            do()
        assert counts["bytes_to_host"] <= (payload if "staged" in self.name else 0)


def value(rank: int, dtype: str, size: int) -> np.ndarray:
    """Return a rank's numbers, whose sums are exact; of floats some are special ones."""
    numbers = np.random.default_rng([rank, size]).integers(-1000, 1000, size)
    return numbers.astype(dtype)


def combined(arrays: list[np.ndarray], op: str) -> np.ndarray:
    total = arrays[0].copy()
    for each in arrays[1:]:
        COMBINE[op](total, each, out=total)
    return total


def parts(counts: list[int]) -> list[slice]:
    return [slice(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(SIZE)]


@pytest.mark.parametrize(("op", "dtype", "size"), rows(2, OPS, DTYPES, SIZES))
def test_reductions(path: Path, op: str, dtype: str, size: int) -> None:
    everyone = [value(rank, dtype, size) for rank in range(SIZE)]
    right, nbytes = combined(everyone, op), everyone[0].nbytes
    root = SIZE - 1
    here = path.memory(everyone[RANK])
    path.counted(lambda: path.made.reduce(path.ranks, here, op), nbytes)
    assert here.get().tobytes() == right.tobytes()
    here = path.memory(everyone[RANK])
    path.counted(lambda: path.made.reduce(path.ranks, here, op, root), nbytes)
    assert root != RANK or here.get().tobytes() == right.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_every_pair_of_special_floats(path: Path, op: str, dtype: str) -> None:
    """The bits are NumPy's, of zeros and NaN too."""
    special = np.array(SPECIAL, dtype)
    everyone = [np.tile(special, special.size), *[np.repeat(special, special.size)] * (SIZE - 1)]
    here = path.memory(everyone[RANK])
    path.made.reduce(path.ranks, here, op)
    assert SIZE == 1 or here.get().tobytes() == combined(everyone, op).tobytes()


@pytest.mark.parametrize("dtype", ["bool", "uint16", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_broadcasts_and_gathers(path: Path, dtype: str, size: int) -> None:
    everyone = [value(rank, dtype, size) for rank in range(SIZE)]
    for root in {0, SIZE - 1}:
        here = path.memory(everyone[RANK])
        path.counted(lambda root=root, here=here: path.made.bcast(path.ranks, here, root), here.nbytes)
        assert here.get().tobytes() == everyone[root].tobytes()
    for counts in ([size] * SIZE, [size // (rank + 1) * (rank != 1) for rank in range(SIZE)]):
        gathers(path, [each[:count] for each, count in zip(everyone, counts, strict=True)], counts)


def gathers(path: Path, blocks: list[np.ndarray], counts: list[int]) -> None:
    right = np.concatenate(blocks)
    together, block = path.memory(np.zeros_like(right)), path.memory(blocks[RANK])
    path.counted(lambda: path.made.allgather(path.ranks, block, counts, together), right.nbytes)
    assert together.get().tobytes() == right.tobytes()
    together = path.memory(np.zeros_like(right))
    place = together[parts(counts)[RANK]]
    place[...] = block
    path.made.allgather(path.ranks, place, counts, together)
    assert together.get().tobytes() == right.tobytes()


@pytest.mark.skipif(SIZE == 1, reason="one rank reduces nothing")
@pytest.mark.parametrize("op", OPS)
def test_what_waits_on_the_stream_is_read(path: Path, op: str) -> None:
    """Work of the stream that is not done when the call is made."""
    stream = path.cupy.cuda.Stream(non_blocking=True)
    with stream:
        here = path.memory(np.zeros(100_000))
        for number in range(20):
            here[...] = float(RANK + number)
            path.made.reduce(path.ranks, here, op)
            total = here + 1.0
            here[...] = -1.0
            ranks = [float(rank + number) for rank in range(SIZE)]
            right = {"SUM": sum(ranks), "MIN": min(ranks), "MAX": max(ranks)}[op] + 1
            assert set(total.get(stream=stream).tolist()) == {right}
