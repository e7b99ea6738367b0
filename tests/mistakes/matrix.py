"""The table of mistakes, and how one of them is made in a job of its own."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mpistrategy as ms

RAISES, RIGHT, BY_DESIGN, WARNS = "raises", "right", "by design", "warns"
#: Right on one node; where the ranks go on computing, between nodes, it raises.
RIGHT_AT_ONCE = "right at once"
#: Ranks that use strategies in another order wait for each other, until the roll call says where.
ROLL_CALL = "roll call"


@dataclass
class Program:
    """What the programs share: a strategy, and what they make once, on all ranks alike."""

    strategy: ms.Strategy = field(default_factory=ms.MirroredStrategy)
    folder: Path = Path()
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.strategy.replica_id_in_sync_group

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what was made under a name; the first time on all ranks alike."""
        if name not in self.made:
            with self.strategy.scope():
                self.made[name] = make()
        return self.made[name]

    def variable(self, name: str = "v", shape: tuple[int, ...] = (3,), **more: Any) -> Any:
        return self.once(f"variable {name}", lambda: ms.Variable(np.zeros(shape), name=name, aggregation="SUM", **more))

    def step(self, function: Callable[[Any], Any]) -> Any:
        """Return what `function` makes of the replica context, in a step."""
        return self.strategy.run(lambda: function(ms.get_replica_context()))

    def sum(self, value: Any, **more: Any) -> Any:
        return self.step(lambda ctx: ctx.all_reduce("SUM", value, **more))


Mistake = Callable[[Program, bool], Any]
#: Each mistake with what must come of it, and why where that is nothing.
MISTAKES: dict[str, tuple[Mistake, str, str]] = {}


def mistake(comes_to: str = RAISES, why: str = "") -> Callable[[Mistake], Mistake]:
    """Add a program to the table, under its name; ``program(p, True)`` makes the mistake."""

    def added(function: Mistake) -> Mistake:
        add(function.__name__.replace("_", " "), function, comes_to, why)
        return function

    return added


def add(name: str, made: Mistake, comes_to: str = RAISES, why: str = "") -> None:
    """Add a program to the table."""
    assert name not in MISTAKES, name
    MISTAKES[name] = made, comes_to, why


def load() -> dict[str, tuple[Mistake, str, str]]:
    """Return the whole table."""
    from mistakes import calls, data, objects  # noqa: F401  (they fill it)

    return MISTAKES


def main(name: str, odd: int, rounds: int, folder: str) -> None:
    """Make one mistake on one rank, after so many rounds without; write down what came of it there."""
    program = Program(folder=Path(folder))
    function = load()[name][0]
    told: dict[str, Any] = {"error": "", "text": "", "warned": [], "result": "", "right": ""}
    for _ in range(rounds):
        function(program, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function(program, program.rank == odd)
            program.strategy.barrier("the end of the mistake")
            told["result"], told["right"] = repr(result), repr(function(program, False))
        except (ms.errors.MpiStrategyError, MemoryError) as error:
            told["error"], told["text"] = type(error).__name__, str(error)
        except InterruptedError:
            told["error"] = "caught by itself"
    told["warned"] = [warning.category.__name__ for warning in caught]
    (Path(folder) / f"rank-{program.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    from mistakes import matrix

    matrix.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
