"""What several tests with torch use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mpistrategy as ms


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """The default process group of torch over a strategy, for the tests of a module."""
    import torch.distributed as dist  # here: other tests need no torch

    import mpistrategy.torch as mst

    with ms.MirroredStrategy() as strategy:
        mst.init_process_group(strategy)
        yield dist.group.WORLD
        dist.destroy_process_group()
