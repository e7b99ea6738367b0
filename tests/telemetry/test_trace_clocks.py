"""The difference of two clocks, from collectives alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mpistrategy.telemetry.tracing.timeline import Clock, Recording, common_clock

AHEAD = 3e9


def two_ranks(count: int, jumps: float = 0.0) -> list[Recording]:
    """Return recordings of two ranks whose clocks are `AHEAD` apart: collectives that both enter and leave.

    Args:
        count: how many collectives there are.
        jumps: by how much the second clock is set forward in the middle.
    """
    dice = random.Random(count)
    found = []
    for rank in (0, 1):
        header = {"rank": rank, "clock": f"c{rank}", "monotonic_us": rank * AHEAD, "wall_us": 0.0}
        found.append(Recording("", header, []))
    for number in range(count):
        together = 1e12 + 1000.0 * number
        for rank, recording in enumerate(found):
            entered, left = (dice.expovariate(1 / 20) + 2 for _ in range(2))
            ahead = rank * (AHEAD + jumps * (number > count / 2))
            args: dict[str, Any] = {"group": "g", "number": number, "call": "barrier"}
            recording.events.append(
                {"ts": together - entered + ahead, "dur": entered + left, "pid": rank, "args": args}
            )
    return found


@pytest.mark.parametrize("count", [1, 2, 40, 1000])
def test_a_clock_is_found_within_its_uncertainty(count: int) -> None:
    clock = common_clock(two_ranks(count))["c1"]
    assert clock.meetings == count
    assert abs(clock.offset + AHEAD) <= clock.uncertainty
    assert clock.uncertainty < (5 if count == 1000 else 200)


def test_a_clock_that_was_set_meanwhile_is_told() -> None:
    assert common_clock(two_ranks(200, jumps=50e3))["c1"].uncertainty < -10e3


def test_without_a_collective_in_common_wall_clocks_decide() -> None:
    assert common_clock(two_ranks(0))["c1"] == Clock(-AHEAD)
