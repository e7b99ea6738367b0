"""How often calls are compared where a comparison costs a message: always, at first and now and then, or never.

Within a node the comparison rides with the data and is always made.  Between nodes, under "first", a call is compared
when its signature is new, and at every `EVERY`-th call; in between each rank rolls the digests of its calls into one
number, which is part of the next comparison.  So calls that were swapped are found then, late, and the report says
which was the first that differed.
"""

from __future__ import annotations

import os
from typing import Any

from mpistrategy.errors import OptionError

#: The environment variable that chooses the level.
VARIABLE = "MPISTRATEGY_CHECK"
ALWAYS, FIRST, OFF = LEVELS = ("always", "first", "off")
#: Under "first" so many calls are at most made between two comparisons.
EVERY = 32

_SEEN = 4096
_MASK = 2**62 - 1


def parse(value: Any, where: str) -> str:
    """Return the level that `value` names.

    Raises:
        OptionError: for anything else.
    """
    if isinstance(value, str) and value.lower() in LEVELS:
        return value.lower()
    raise OptionError.at(where, found=f"{value!r}", expected=" or ".join(f'"{level}"' for level in LEVELS))


def chosen(given: Any, default: str, where: str = "MirroredStrategy") -> str:
    """Return the level of a strategy: the argument `check`, else the variable, else `default`."""
    if given is not None:
        return parse(given, f"{where}, check")
    text = os.environ.get(VARIABLE, "")
    return parse(text, VARIABLE) if text else default


class Sparingly:
    """Decides which calls are compared, and keeps account of the others.

    All ranks that make the same calls come to the same decisions.

    Args:
        level: "first" or "off".

    Attributes:
        pending: the calls since the last comparison, under "first": number, digest, signature.
        unseen: how many calls were made since the last comparison.
    """

    def __init__(self, level: str) -> None:
        self._is_off = level == OFF
        self._count = 0
        self._rolled = 0
        self._seen: set[int] = set()
        self.pending: list[tuple[int, int, Any]] = []
        self.unseen = 0

    def number_to_compare(self, digest: int, signature: Any, *, due: bool) -> int | None:
        """Return what the ranks compare now; None when the call is made unseen.

        Args:
            digest: of the call.
            signature: of the call.
            due: compare it whatever the level.
        """
        if self._is_off:
            self.unseen += not due
            return digest if due else None
        self._count = count = self._count + 1
        self._rolled = rolled = hash((self._rolled, digest))  # of numbers it is the same in every process
        if not due and count % EVERY and digest in self._seen:
            self.unseen += 1
            self.pending.append((count, digest, signature))
            return None
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen.add(digest)
        return rolled & _MASK

    def number_compared(self, digest: int) -> int:
        """Return what `number_to_compare` has returned for this digest just now."""
        return digest if self._is_off else self._rolled & _MASK

    def number_to_leave_with(self, digest: int) -> int:
        """Return what the ranks compare at their end: unequal, too, when they made different calls before."""
        return digest if self._is_off else digest ^ (self._rolled & _MASK)

    def agreed(self) -> None:
        """Forget the calls up to now: all ranks have made the same."""
        self.unseen = 0
        self.pending.clear()

    def begin_anew(self) -> None:
        """Forget everything, after the ranks were found to differ; all of them do."""
        self._count = self._rolled = self.unseen = 0
        self._seen.clear()
        self.pending.clear()
