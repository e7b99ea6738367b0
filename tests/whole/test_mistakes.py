"""The mutation matrix: what one rank does wrong raises on all ranks at that call; a sample of it, in jobs of their own.

`scripts/soak matrix` makes all of them, on the first and the last of some ranks, at first and after good rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mistakes.judging import judge
from mistakes.matrix import load
from replicas import ALL

pytestmark = pytest.mark.one_rank
TABLE = load()
#: The short lane makes each twentieth mistake.
NAMES = list(TABLE)[:: 1 if ALL else 20]
#: Numbers of ranks, and of the nodes that MPICH pretends; Open MPI does not.
PLACES = ((2, 1), (3, 1), (3, 2), (4, 2), (3, 3), (4, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_of_one_rank(launch: object, tmp_path: Path, name: str) -> None:
    number = NAMES.index(name)
    ranks, nodes = PLACES[number % len(PLACES)]
    verdict = judge(name, ranks, (0, ranks - 1)[number // 2 % 2], (0, 2)[number // 4 % 2], tmp_path, nodes)
    assert verdict.is_as(TABLE[name][1]), f"{verdict.kind}: {verdict.story}"


def test_no_more_mistakes_are_unseen_than_the_guide_says() -> None:
    """The page on disagreement names them under "What cannot be seen"."""
    unseen = {name: why for name, (_, kind, why) in TABLE.items() if kind == "by design"}
    assert all(unseen.values())
    assert len(unseen) == 9
    assert len(TABLE) > 100
