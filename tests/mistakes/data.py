"""Mistakes with datasets."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms
from mistakes.matrix import BY_DESIGN, RIGHT, WARNS, Mistake, Program, add, mistake

ROWS = np.arange(24.0).reshape(12, 2)


def _through(p: Program, dataset: Any, *, reduces: bool = True, stop: int | None = None, **options: Any) -> Any:
    distributed = p.strategy.experimental_distribute_dataset(dataset, **options)
    total = 0.0
    for number, batch in enumerate(distributed):
        if number == stop:
            break
        total += float(p.sum(batch.sum()) if reduces else batch.sum())
    return total if reduces else None


def _rows(rows: Any = ROWS, batch_size: int = 4, **options: Any) -> ms.Dataset:
    return ms.Dataset.from_arrays(rows, batch_size, **options)


def _generator(batches: int) -> Any:
    return (ROWS[4 * n : 4 * n + 4] for n in range(batches))


REPORTED: dict[str, Mistake] = {
    "a longer dataset": lambda p, wrong: _through(p, _rows(np.tile(ROWS, (1 + wrong, 1)))),
    "a longer list of batches": lambda p, wrong: _through(p, [ROWS[:4], ROWS[4:8], ROWS[8:]][: 3 if wrong else 2]),
    "a longer dataset without a reduction": lambda p, wrong: _through(
        p, _rows(np.tile(ROWS, (1 + wrong, 1))), reduces=False
    ),
    "a longer generator": lambda p, wrong: _through(p, _generator(3 if wrong else 2)),
    "a shorter dataset": lambda p, wrong: _through(p, _rows(ROWS[: 4 if wrong else 12])),
    "other rows where that raises": lambda p, wrong: _through(
        p, [ROWS[::-1][:4] if wrong else ROWS[:4]], reduces=False, check_batches="raise"
    ),
    "another batch size": lambda p, wrong: _through(p, _rows(batch_size=6 if wrong else 4)),
    "another seed": lambda p, wrong: _through(p, _rows(shuffle_seed=2 if wrong else 1)),
    "batches of another shape": lambda p, wrong: _through(p, [ROWS[:4, : 1 if wrong else 2]]),
    "more epochs": lambda p, wrong: _through(p, _rows(epochs=3 if wrong else 2)),
    "a break": lambda p, wrong: _through(p, _rows(), stop=1 if wrong else None),
}
WARNED: dict[str, Mistake] = {
    "other rows": lambda p, wrong: _through(p, [ROWS[::-1][:4] if wrong else ROWS[:4]]) and None,
    "other data of the same shape": lambda p, wrong: _through(p, _rows(ROWS + wrong)) and None,
}
for _table, _comes_to in ((REPORTED, "raises"), (WARNED, WARNS)):
    for _name, _made in _table.items():
        add(_name, _made, _comes_to)
add(
    "a longer generator without a reduction",
    lambda p, wrong: _through(p, _generator(3 if wrong else 2), reduces=False),
    BY_DESIGN,
    "a generator has no length, and its batches after the first are this rank's own",
)
add(  # nothing is combined: each rank reads its own rows
    "a break without a reduction",
    lambda p, wrong: _through(p, _rows(), reduces=False, stop=1 if wrong else None),
    RIGHT,
)


@mistake()
def an_epoch_too_many(p: Program, wrong: bool) -> Any:
    dataset = p.once("dataset", lambda: p.strategy.experimental_distribute_dataset(_rows()))
    return [float(p.sum(batch.sum())) for _ in range(3 if wrong else 2) for batch in dataset]
