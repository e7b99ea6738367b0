"""Which of some names somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """Return ``Did you mean 'MEAN'?`` for a name that is nearly one of `names`, in any letter case; else ""."""
    if not isinstance(given, str):
        return ""
    import difflib  # here, for the quick import

    known = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), known, 1, 0.7)
    return f"Did you mean {known[near[0]]!r}?" if near else ""
