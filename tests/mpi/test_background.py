"""The thread leaves the core to the program while it computes, and takes it while the program waits for a job."""

from __future__ import annotations

import contextlib

import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, context, outcomes, raising

import mpistrategy as ms
from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.watchdog import watchdog

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("line", [1, 5, 6, 7])  # before the job is there, as it is put, counted, kept
def test_no_rank_takes_the_sum_of_another_step(line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank is interrupted in its start, and starts again: all sums are right, or raise."""
    for name in ("_MESSAGES_SECONDS", "_ENDS_SECONDS"):  # how soon the others hear that a rank takes no more calls
        monkeypatch.setattr(watchdog, name, 0.5)
    strategy = OnNodes(list(RANKS), ms.MpiAllReduce(), contains_errors=True)

    def steps() -> None:
        for step in range(4):
            handle, here = None, line if RANK == SIZE - 1 and step == 1 else 99
            while handle is None:
                with raising(KeyboardInterrupt(), "line", "submit", here):
                    handle = strategy.run(lambda: context().all_reduce_async("SUM", float(step)))  # noqa: B023
                here = 99
            assert handle.wait() == step * SIZE

    ends = outcomes(steps)
    assert not [end.text for end in ends if end.error is AssertionError]
    with contextlib.suppress(MpiStrategyError):
        strategy.close()
    # The others do not listen any more; at its end this rank would wait for them.
    strategy.extended.communicator.guard.is_untold = False
