"""What several tests with torch use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import mpistrategy as ms

#: The files whose tensors are in GPU memory, where there is a GPU.
_ON_GPU = ("test_torch_checkpoint", "test_torch_cuda", "test_torch_group", "test_torch_optimizer", "test_torch_starts")


@pytest.fixture(scope="module")
def strategy(request: pytest.FixtureRequest) -> Iterator[ms.MirroredStrategy]:
    """One replica on every rank; where there is a GPU, the replicas of some files share it, with torch's tensors."""
    import gpu_here  # here: the other tests need neither CuPy nor torch

    if not gpu_here.IS_GPU or request.path.stem not in _ON_GPU:
        with closing(ms.MirroredStrategy()) as made:
            yield made
        return
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    with closing(gpu_here.strategy()) as made:
        torch.cuda.set_device(gpu_here.number(made))
        torch.set_default_device("cuda")
        yield made
        torch.set_default_device(None)


@pytest.fixture(scope="module")
def group(strategy: ms.MirroredStrategy) -> Iterator[Any]:
    """The default process group of torch over a strategy, for the tests of a module."""
    import torch.distributed as dist  # here: other tests need no torch

    import mpistrategy.torch as mst

    mst.init_process_group(strategy)
    yield dist.group.WORLD
    dist.destroy_process_group()
