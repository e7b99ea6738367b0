"""What one rank does about all others when a strategy is made grows with their number, not with its square."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from pretended import creation_seconds

from mpistrategy import context
from mpistrategy.errors import DeviceError
from mpistrategy.mpi.gpu.device_selection import Sight, bind
from mpistrategy.mpi.job.introductions import Introduction, introductions
from mpistrategy.mpi.tuning import thresholds as files

pytestmark = pytest.mark.one_rank
FEW, MANY, LOCAL = 2_000, 16_000, 8


def texts_of(size: int) -> list[str]:
    """Return what the ranks say of themselves, as JSON."""
    ranks = range(size)
    return [json.dumps(Introduction("0.2.0", "3.12", n // LOCAL * LOCAL, [n % LOCAL])._asdict()) for n in ranks]


def blind(size: int) -> list[Sight]:
    return [Sight(host=f"n{rank // LOCAL}", reason="CuPy is not installed", fix="Install it") for rank in range(size)]


def refused(sights: list[Sight]) -> None:
    with pytest.raises(DeviceError):
        bind(sights)


def nodes(size: int) -> tuple[int, ...]:
    return tuple(rank // LOCAL for rank in range(size))


STEPS: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "introductions": (texts_of, introductions),
    "GPUs where there are none": (blind, refused),
    "the machine of the thresholds": (
        nodes,
        lambda node_of: files.agreed("MPICH Version: 5.0.2", 0, node_of, lambda text: [text]),
    ),
}


@pytest.mark.parametrize("what", STEPS)
def test_eight_times_the_ranks_are_about_eight_times_the_work(what: str) -> None:
    prepare, work = STEPS[what]

    def seconds(size: int) -> float:
        given, took = prepare(size), []
        for _ in range(3):
            began = time.process_time()
            work(given)
            took.append(time.process_time() - began)
        return min(took)

    ratio = MANY / FEW
    assert seconds(MANY) < 3 * ratio * seconds(FEW) + 0.01, "its square would be 8 times as much"


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
