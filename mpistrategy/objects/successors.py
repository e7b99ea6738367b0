"""What comes next in a sequence that repeats itself, from what has come so far.

All who have seen the same items in the same order expect the same one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

#: What is known of an item.
T = TypeVar("T")

_REMEMBERED = 4096
#: An item that has followed another one so often is expected to follow it.
_TIMES = 2
_MOST_TIMES = 2**10


class _Seen(Generic[T]):
    """An item that has come, and what has followed it."""

    __slots__ = ("following", "key", "known", "times", "wanted")

    def __init__(self, key: int) -> None:
        self.key = key
        self.known: T | None = None
        self.following: _Seen[T] | None = None
        #: How often `following` has come, without another one in between; and how often it must, to be expected.
        self.times = 0
        self.wanted = _TIMES


class Successors(Generic[T]):
    """The items of a sequence, and the one that is expected next.

    Attributes:
        key: of that one; None for none.
        known: what is known of it; None where nothing is, or none is expected.
    """

    def __init__(self) -> None:
        self.key: int | None = None
        self.known: T | None = None
        self._seen: dict[int, _Seen[T]] = {}
        self._last: _Seen[T] = _Seen(0)

    def note(self, key: int, known: T | None) -> None:
        """Note the next item, and what is known of it."""
        last = self._last
        item = last.following
        if item is None or item.key != key:
            item = self._another(last, key)
        last.times += 1
        item.known, self._last = known, item
        self._expect(item.following if item.times >= item.wanted else None)

    def _another(self, last: _Seen[T], key: int) -> _Seen[T]:
        """Return the item of a key, which did not follow the last one when that came before."""
        item = self._seen.get(key)
        if item is None:
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            item = self._seen[key] = _Seen(key)
        if last.times >= last.wanted:  # another one was expected
            last.wanted = min(2 * last.wanted, _MOST_TIMES)
        last.following, last.times = item, 0
        return item

    def expect_nothing(self) -> None:
        """Expect no item until the next one has been noted."""
        self._expect(None)

    def _expect(self, item: _Seen[T] | None) -> None:
        self.key, self.known = (None, None) if item is None else (item.key, item.known)
