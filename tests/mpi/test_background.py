"""The thread leaves the core to the program while it computes, and takes it while the program waits for a job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, context, outcomes

import mpistrategy as ms
from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.over_mpi.background import Background

pytestmark = pytest.mark.mpi(min_size=2)


class Interruption:
    """A trace that raises KeyboardInterrupt before a line of `Background.submit`."""

    def __init__(self, line: int) -> None:
        self.lines_left: int = line

    def __call__(self, frame: FrameType, what: str, _: object) -> Any:
        if frame.f_code is not Background.submit.__code__:
            return None
        self.lines_left -= what == "line"
        if self.lines_left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self


@contextlib.contextmanager
def interrupted(line: int) -> Iterator[None]:
    """Interrupt this rank before that line of `Background.submit`."""
    before = sys.gettrace()
    sys.settrace(Interruption(line))
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.slow
@pytest.mark.parametrize("line", range(1, 8))
def test_no_rank_takes_the_sum_of_another_step(line: int) -> None:
    """The last rank is interrupted in its start, and starts again: all sums are right, or raise."""
    strategy = OnNodes(list(RANKS), ms.MpiAllReduce(), contains_errors=True)

    def steps() -> None:
        for step in range(4):
            handle, here = None, line if RANK == SIZE - 1 and step == 1 else 99
            while handle is None:
                with contextlib.suppress(KeyboardInterrupt), interrupted(here):
                    handle = strategy.run(lambda: context().all_reduce_async("SUM", float(step)))  # noqa: B023
                here = 99
            assert handle.wait() == step * SIZE

    ends = outcomes(steps)
    assert not [end.text for end in ends if end.error is AssertionError]
    with contextlib.suppress(MpiStrategyError):
        strategy.close()
