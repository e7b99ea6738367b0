"""Text from outside the program: any bytes make the way there and back."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpistrategy.objects.text import decoded, encoded

pytestmark = pytest.mark.one_rank


@given(st.binary(max_size=40))
def test_bytes_come_back(data: bytes) -> None:
    assert encoded(decoded(data)) == data
    assert decoded(data) == os.fsdecode(data)


@given(st.text(st.characters(), max_size=40), st.integers(0, 60))
@example("\ud800", 2)
def test_no_text_is_refused_and_none_is_cut_inside_of_a_character(text: str, most: int) -> None:
    data = encoded(text, most)
    assert len(data) <= most
    assert encoded(text)[: len(data)] == data
    if text.isprintable():
        assert text.startswith(decoded(data))
