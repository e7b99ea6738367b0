"""How often calls are compared where a comparison costs a message: "always", "first" or "off".

Within a node the comparison travels with the data and is always made.  Between nodes, "first" compares a call when its
signature is new, and every `EVERY`-th call.  In between each rank hashes the digests of its calls into one number,
which is part of the next comparison.  So swapped calls are found at the next comparison, and the report names the first
call that differed.
"""

from __future__ import annotations

import os
from typing import Any

from mpistrategy.errors import OptionError
from mpistrategy.objects.nearest import did_you_mean

#: The environment variable that chooses the level.
VARIABLE = "MPISTRATEGY_CHECK"
ALWAYS, FIRST, OFF = LEVELS = ("always", "first", "off")
#: The most calls from one comparison to the next under "first".
EVERY = 32

_SEEN = 4096
_MASK = 2**62 - 1


def parse(value: Any, where: str, name: str = "") -> str:
    """Return the level that `value` names.

    Raises:
        OptionError: for anything else.
    """
    if isinstance(value, str) and value.lower() in LEVELS:
        return value.lower()
    raise OptionError.at(
        where,
        found=f"{name}{value!r}",
        expected=" or ".join(f'"{level}"' for level in LEVELS),
        fix=did_you_mean(value, LEVELS),
    )


def chosen(given: Any, default: str, where: str = "MirroredStrategy") -> str:
    """Return the level of a strategy: the argument `check`, else the variable, else `default`."""
    if given is not None:
        return parse(given, where, "check=")
    text = os.environ.get(VARIABLE, "")
    return parse(text, VARIABLE) if text else default


class Sparingly:
    """Decides which calls are compared, and remembers the others.

    Ranks that make the same calls decide alike.

    Args:
        level: "first" or "off".

    Attributes:
        pending: under "first", the calls since the last comparison: number, digest, signature.
        unseen: how many calls were made since the last comparison.
    """

    def __init__(self, level: str) -> None:
        self._is_off = level == OFF
        self._count = 0
        self._rolled = 0
        self._seen: set[int] = set()
        self.pending: list[tuple[int, int, Any]] = []
        self.unseen: int = 0

    def number_to_compare(self, digest: int, signature: Any, *, due: bool) -> int | None:
        """Return the number that the ranks compare now; None if this call is not compared.

        Args:
            digest: of the call.
            signature: of the call.
            due: whether to compare it at any level.
        """
        if self._is_off:
            self.unseen += not due
            return digest if due else None
        self._count = count = self._count + 1
        self._rolled = rolled = hash((self._rolled, digest))  # the hash of numbers is the same in every process
        if not due and count % EVERY and digest in self._seen:
            self.unseen += 1
            self.pending.append((count, digest, signature))
            return None
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen.add(digest)
        return rolled & _MASK

    def number_compared(self, digest: int) -> int:
        """Return what `number_to_compare` has just returned for this digest."""
        return digest if self._is_off else self._rolled & _MASK

    def number_to_leave_with(self, digest: int) -> int:
        """Return the number that the ranks compare at their end; it differs, too, if earlier calls differed."""
        return digest if self._is_off else digest ^ (self._rolled & _MASK)

    def agreed(self) -> None:
        """Forget the calls up to now: they were equal on all ranks."""
        self.unseen = 0
        self.pending.clear()

    def begin_anew(self) -> None:
        """Forget everything after a difference; all ranks do so."""
        self._count = self._rolled = self.unseen = 0
        self._seen.clear()
        self.pending.clear()
