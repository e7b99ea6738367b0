"""Finds the known name that a misspelt one may stand for."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(given: object, names: Iterable[str], least: float = 0.6) -> str:
    """Return ``Did you mean 'MEAN'?`` for a name that is nearly one of `names`, in any letter case; else "".

    Args:
        given: what somebody wrote.
        names: those that there are.
        least: how alike they must be, from 0 to 1: twice the letters in common over all letters.
    """
    if not isinstance(given, str):
        return ""
    import difflib  # here, for the quick import

    known = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), known, 1, least)
    return f"Did you mean {known[near[0]]!r}?" if near else ""
