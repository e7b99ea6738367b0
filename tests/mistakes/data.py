"""Mistakes with datasets."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms
from mistakes.matrix import BY_DESIGN, RIGHT, WARNS, Program, mistake

ROWS = np.arange(24.0).reshape(12, 2)


def _through(p: Program, dataset: Any, *, reduces: bool = True, stop: int | None = None) -> Any:
    distributed = p.strategy.experimental_distribute_dataset(dataset)
    total = 0.0
    for number, batch in enumerate(distributed):
        if number == stop:
            break
        total += float(p.sum(batch.sum()) if reduces else batch.sum())
    return total if reduces else None


@mistake()
def a_longer_dataset(p: Program, wrong: bool) -> Any:
    return _through(p, ms.Dataset.from_arrays(np.tile(ROWS, (1 + wrong, 1)), 4))


@mistake()
def a_longer_list_of_batches(p: Program, wrong: bool) -> Any:
    return _through(p, [ROWS[:4], ROWS[4:8], *([ROWS[8:]] if wrong else [])])


@mistake()
def a_longer_dataset_without_a_reduction(p: Program, wrong: bool) -> Any:
    return _through(p, ms.Dataset.from_arrays(np.tile(ROWS, (1 + wrong, 1)), 4), reduces=False)


@mistake()
def a_longer_generator(p: Program, wrong: bool) -> Any:
    return _through(p, (ROWS[4 * n : 4 * n + 4] for n in range(3 if wrong else 2)))


@mistake(BY_DESIGN, "a generator has no length, and its batches after the first are this rank's own")
def a_longer_generator_without_a_reduction(p: Program, wrong: bool) -> Any:
    return _through(p, (ROWS[4 * n : 4 * n + 4] for n in range(3 if wrong else 2)), reduces=False)


@mistake()
def a_shorter_dataset(p: Program, wrong: bool) -> Any:
    return _through(p, ms.Dataset.from_arrays(ROWS[: 4 if wrong else 12], 4))


@mistake(WARNS)
def other_rows(p: Program, wrong: bool) -> Any:
    _through(p, [ROWS[::-1][:4] if wrong else ROWS[:4]])


@mistake()
def other_rows_where_that_raises(p: Program, wrong: bool) -> Any:
    batches = [ROWS[::-1][:4] if wrong else ROWS[:4]]
    return [batch.sum() for batch in p.strategy.experimental_distribute_dataset(batches, check_batches="raise")]


@mistake()
def another_batch_size(p: Program, wrong: bool) -> Any:
    return _through(p, ms.Dataset.from_arrays(ROWS, 6 if wrong else 4))


@mistake()
def another_seed(p: Program, wrong: bool) -> Any:
    return _through(p, ms.Dataset.from_arrays(ROWS, 4, shuffle_seed=2 if wrong else 1))


@mistake(WARNS)
def other_data_of_the_same_shape(p: Program, wrong: bool) -> Any:
    _through(p, ms.Dataset.from_arrays(ROWS + wrong, 4))


@mistake()
def batches_of_another_shape(p: Program, wrong: bool) -> Any:
    return _through(p, [ROWS[:4, : 1 if wrong else 2]])


@mistake()
def more_epochs(p: Program, wrong: bool) -> Any:
    return _through(p, ms.Dataset.from_arrays(ROWS, 4, epochs=3 if wrong else 2))


@mistake()
def an_epoch_too_many(p: Program, wrong: bool) -> Any:
    dataset = p.once("dataset", lambda: p.strategy.experimental_distribute_dataset(ms.Dataset.from_arrays(ROWS, 4)))
    total = 0.0
    for _ in range(3 if wrong else 2):
        for batch in dataset:
            total += float(p.sum(batch.sum()))
    return total


@mistake()
def a_break(p: Program, wrong: bool) -> Any:
    return _through(p, ms.Dataset.from_arrays(ROWS, 4), stop=1 if wrong else None)


@mistake(RIGHT)
def a_break_without_a_reduction(p: Program, wrong: bool) -> Any:
    """Nothing is combined: each rank reads its own rows."""
    return _through(p, ms.Dataset.from_arrays(ROWS, 4), reduces=False, stop=1 if wrong else None)


@mistake()
def a_loader_that_raises(p: Program, wrong: bool) -> Any:
    def batches() -> Any:
        yield ROWS[:4]
        if wrong:
            raise InterruptedError("of the loader")
        yield ROWS[4:8]

    return _through(p, batches())


@mistake(RIGHT)
def an_input_function_that_yields_more(p: Program, wrong: bool) -> Any:
    """The other ranks take part with empty batches."""

    def rows(_: Any) -> Any:
        return [ROWS[:2]] * (3 if wrong else 2)

    total = 0.0
    for batch in p.strategy.distribute_datasets_from_function(rows):
        total += float(p.sum(batch.sum()))
    return None
