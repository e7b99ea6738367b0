"""What one rank does about all others when a strategy is made grows with their number, not with its square."""

from __future__ import annotations

import pytest
from pretended import creation_seconds

from mpistrategy import context

pytestmark = pytest.mark.one_rank
FEW, MANY, LOCAL = 2_000, 16_000, 8


@pytest.mark.parametrize("devices", [None, "auto"])
@pytest.mark.slow
def test_a_strategy_of_many_ranks_is_made_in_a_time_that_grows_as_they_do(
    devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        context, "_in_process", type(context._in_process)()
    )  # and back: these ranks are not in this job
    few, many = (min(creation_seconds(size, LOCAL, devices) for _ in range(3)) for size in (FEW, MANY))
    assert many < 3 * MANY / FEW * few, "its square would be 8 times as much"
