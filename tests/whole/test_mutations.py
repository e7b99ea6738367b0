"""Every mistake that MPI answers with wrong numbers or a hang, made with every collective: all are reported.

Plain MPI mixes two swapped sums, reads integers as floats, or waits for ever.  The matrix makes one mistake at a time
in a program of a few calls (see `mutations`), with every collective where it can be made.  The time limit would end a
hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from mutations import CLOSING, FILE, KINDS, PLACES, Call, Stage, call, changed, judged
from replicas import ALL, RANK, RANKS, SIZE, OnNodes, gather_texts, several, still_works

import mpistrategy as ms

STAGES: dict[str, Callable[[], ms.Strategy]] = {
    "one node": lambda: ms.MirroredStrategy(check="always"),
    "two nodes": lambda: OnNodes([2 * rank // SIZE for rank in RANKS], ms.MpiAllReduce()),
}


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[str, Stage]]:
    made = {name: Stage(make()) for name, make in STAGES.items()}
    yield made
    for stage in made.values():
        stage.close()


# ------------------------------------------------------------------------------------------ one of each, everywhere

Programs = Iterator[tuple[list[Call], list[Call]]]
BARRIER, FIRST = call("barrier"), call("all_reduce", dtype="float32")


def another_collective(one: Call) -> Programs:
    for other in KINDS:
        if other != one.kind:
            yield [FIRST, one], [FIRST, call(other)]


def another(what: str) -> Callable[[Call], Programs]:
    def programs(one: Call) -> Programs:
        for other in changed(one, what):
            yield [FIRST, one], [FIRST, other]

    return programs


def two_large_counts(one: Call) -> Programs:
    if one.kind in ("assign", "assign_add", "scatter_add", "apply_gradients", "all_gather", "gather", "barrier"):
        return  # these have one shape only, or take any number of rows
    large = [call(one.kind, shape=(count,)) for count in (100_000, 50_000)]
    yield [large[0]], [large[1]]


def swapped(one: Call) -> Programs:
    other = call(one.kind, place=1)
    yield [one, other], [other, one]
    yield [one, other, one, other, one, other], [one, other, one, other, other, one]  # the ways are known


def swapped_with_another(one: Call) -> Programs:
    yield [one, FIRST], [FIRST, one]


def skipped(one: Call) -> Programs:
    yield [FIRST, one], [FIRST]
    yield [one, BARRIER], [BARRIER]
    yield [one, one, one], [one, one]


def extra(one: Call) -> Programs:
    yield [FIRST], [FIRST, one]
    yield [one, BARRIER], [one, one, BARRIER]


MISTAKES: dict[str, Callable[[Call], Programs]] = {
    "another collective": another_collective,
    "another count": another("shape"),
    "two large counts": two_large_counts,
    "another dtype": another("dtype"),
    "another op": another("op"),
    "another root": another("to"),
    "the same ones in another order": swapped,
    "two collectives in another order": swapped_with_another,
    "one left out": skipped,
    "one too many": extra,
}
CASES = [
    pytest.param(mistake, kind, id=f"{mistake}: {kind}")
    for mistake, programs in MISTAKES.items()
    for kind in KINDS
    if any(True for _ in programs(call(kind)))
][:: 1 if ALL or SIZE <= 2 else 3]  # on one of 2 ranks each is made


@several
@pytest.mark.parametrize("place", STAGES)
@pytest.mark.parametrize(("mistake", "kind"), CASES)
def test_a_mistake_is_reported(stages: dict[str, Stage], mistake: str, kind: str, place: str) -> None:
    for number, (program, odd_program) in enumerate(MISTAKES[mistake](call(kind))):
        for odd in {0, SIZE - 1} if ALL else {(0, SIZE - 1)[number % 2]}:
            faults = judged(stages[place], program, odd_program, odd)
            assert not faults, f"{program}\n{odd_program} on rank {odd}\n" + "\n".join(faults)
    assert still_works(stages[place].strategy)


@several
@pytest.mark.parametrize("kind", ["assign", "assign_add", "scatter_add", "apply_gradients"])
def test_a_rank_that_is_refused_by_itself_is_named_to_all(stages: dict[str, Stage], kind: str) -> None:
    for stage in stages.values():
        one, odd = call(kind), replace(call(kind), shape=(7, 3))
        ending = stage.run([odd if RANK == SIZE - 1 else one])
        *others, refused = gather_texts(f"{ending.error}: {ending.text}")
        assert refused.startswith("ShapeError: ")
        assert {*others} == {f"ShapeError: rank {SIZE - 1} could not make this call ({FILE}:{one.line}): {refused}"}
        assert ending.wrong == []
    assert still_works(stage.strategy)


@several
def test_the_same_program_everywhere_is_no_mistake(stages: dict[str, Stage]) -> None:
    """What is reported above comes from the mistakes."""
    for stage in stages.values():
        program = [call(kind, place=place) for kind in KINDS for place in range(PLACES)]
        ending = stage.run([*program, Call(CLOSING)])
        assert (ending.step, ending.error, ending.wrong) == (len(program) + 1, "", [])
