"""What is expected next in a sequence that repeats itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrategy.objects.successors import Successors

pytestmark = pytest.mark.one_rank


def expected_after(letters: str) -> str | None:
    """Return which letter is expected after some."""
    expected: Successors[str] = Successors()
    for letter in letters:
        expected.note(ord(letter), letter)
    assert (expected.known is None) == (expected.key is None)
    assert expected.known is None or ord(expected.known) == expected.key
    return expected.known


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("", None),
        ("a", None),
        ("aa", None),
        ("aaa", "a"),
        ("ababa", "b"),
        ("abababab", "a"),
        ("abcabcab", "c"),
        ("aab", None),
        ("aaab", None),  # nothing has followed b
        ("aaabaa", None),  # a has not followed a twice again
        ("aaabaaaaa", "a"),
        ("abacabacaba", None),
    ],
)
def test_what_is_expected(letters: str, expected: str | None) -> None:
    assert expected_after(letters) == expected


@pytest.mark.parametrize("disappointments", [1, 2, 3])
def test_one_that_others_interrupt_is_expected_less_often(disappointments: int) -> None:
    letters = "aaaaaaaaaab" * disappointments
    after = next(count for count in range(1, 2000) if expected_after(letters + count * "a") == "a")
    assert after == 2**disappointments * 2 + 1


def test_one_of_which_nothing_is_known_is_not_expected() -> None:
    expected: Successors[str] = Successors()
    for _ in range(9):
        expected.note(1, None)
    assert expected.key is None or expected.known is None
    for _ in range(3):
        expected.note(1, "known")
    assert expected.known == "known"


@given(st.lists(st.integers(0, 3), max_size=60))
def test_only_what_has_followed_is_expected(letters: list[int]) -> None:
    expected: Successors[int] = Successors()
    for number, letter in enumerate(letters):
        expected.note(letter, letter)
        if expected.known is not None:
            following = [after for before, after in pairwise(letters[: number + 1]) if before == letter]
            assert following[-2:] == [expected.known] * 2
