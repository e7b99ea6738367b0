"""Every mistake that MPI answers with wrong numbers or a hang, made with every collective: all are reported.

Plain MPI mixes two swapped sums, reads integers as floats, or waits for ever.  The matrix makes one mistake at a time
in a program of a few calls (see `mutations`), with every collective where it can be made; then come random ones in
random programs.  The time limit would end a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import CLOSING, FILE, KINDS, PLACES, Call, Stage, call, changed, judged
from replicas import ALL, RANK, RANKS, SIZE, OnNodes, gather_texts, still_works

import mpistrategy as ms

several = pytest.mark.mpi(min_size=2)
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


# ------------------------------------------------------------------------------------------ random ones


@st.composite
def calls(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Call:
    kind = KINDS[name := draw(st.sampled_from(kinds))]
    chosen: dict[str, Any] = {"place": draw(st.integers(0, PLACES - 1))}
    if kind.ops:
        chosen["op"] = draw(st.sampled_from(kind.ops))
    if kind.layouts:
        chosen["dtype"], chosen["shape"] = draw(st.sampled_from(kind.layouts))
    if kind.goes_to:
        chosen["to"] = draw(st.sampled_from([None, *RANKS]))
    return Call(name, **chosen)


def kinds_that_can(what: str) -> tuple[str, ...]:
    """Return the kinds of which some call differs from another in `what` alone."""
    return tuple(name for name in KINDS if changed(call(name), what))


@st.composite
def mutations(draw: st.DrawFn) -> tuple[str, list[Call], list[Call], int]:
    """Draw what is wrong, the program, the one that is wrong, and the rank that runs it.

    The two always part somewhere: a swap of equal calls, which nobody can see, is not drawn.
    """
    what = draw(st.sampled_from(["kind", "op", "dtype", "shape", "to", "order", "skipped", "extra"]))
    before, after = (draw(st.lists(calls(), max_size=2)) for _ in range(2))
    if what in ("kind", "order"):
        one, other = draw(calls()), draw(calls())
        if one.key() == other.key() or (what == "kind" and one.kind == other.kind):
            other = draw(calls(tuple(name for name in KINDS if name != one.kind)))
        between = draw(st.lists(calls(), max_size=1))
        right, wrong = ([one, *between, other], [other, *between, one]) if what == "order" else ([one], [other])
    elif what in ("skipped", "extra"):
        one = draw(calls())
        right = [one] * draw(st.integers(1, 3))  # a loop, perhaps
        wrong = right[1:] if what == "skipped" else [one, *right]
    else:
        one = draw(calls(kinds_that_can(what)).filter(lambda drawn: bool(changed(drawn, what))))
        right, wrong = [one], [draw(st.sampled_from(changed(one, what)))]
    return what, [*before, *right, *after], [*before, *wrong, *after], draw(st.sampled_from(RANKS))


@several
@pytest.mark.timeout(1800 if ALL else 120)
@settings(max_examples=500 if ALL else 40)
@given(mutation=mutations(), place=st.sampled_from(sorted(STAGES)))
def test_random_mistakes_in_random_programs_are_reported(
    stages: dict[str, Stage], mutation: tuple[str, list[Call], list[Call], int], place: str
) -> None:
    what, program, odd_program, odd = mutation
    faults = judged(stages[place], program, odd_program, odd)
    assert not faults, "\n".join([what, *faults])
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
