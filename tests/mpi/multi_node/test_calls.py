"""How often a rank calls MPI in an all-reduce between nodes does not grow with their number."""

from __future__ import annotations

import pytest
from pretended import calls_of, strategy_of_many

from mpistrategy import context

pytestmark = pytest.mark.one_rank
CHECK = {"Start": 1, "Wait": 1}
FLAT = {**CHECK, "Allreduce": 1}
EXPECTED: dict[int, dict[int, dict[str, int]]] = {
    1: {8: CHECK, 4096: FLAT, 2**18: FLAT, 2**22: FLAT},
    4: {
        8: CHECK,
        4096: FLAT,
        2**20: FLAT,
        2**24: {**CHECK, "Iallreduce": 4, "Test": 4},
    },
}


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        context, "_in_process", type(context._in_process)()
    )  # and back: these ranks are not in this job


@pytest.mark.parametrize("nodes", [2, 16, 64])
@pytest.mark.parametrize("local", EXPECTED)
def test_few_calls_at_any_number_of_nodes(nodes: int, local: int) -> None:
    with strategy_of_many(nodes, local) as (strategy, calls):
        for nbytes, expected in EXPECTED[local].items():
            assert calls_of(strategy, calls, nbytes) == expected, nbytes
