"""Public objects, ranks, sizes, times and names that are nearly right, in words."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Hashable, Iterable
from typing import TypeVar

_MOST_RANGES = 8
Value = TypeVar("Value", bound=Hashable)
_UNITS = ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)


def in_words(instance: object) -> str:
    """Return ``SGD(learning_rate=0.1, momentum=0.9)``: the arguments of the constructor that are not its defaults."""
    kind, words = type(instance), []
    attributes = getattr(instance, "__dict__", {})  # first: a setting may refuse to be read where it may be printed
    for name, parameter in inspect.signature(kind).parameters.items():
        value = attributes[name] if name in attributes else getattr(instance, name, parameter.default)
        is_member = isinstance(value, enum.Enum)
        if (value.name if is_member else value) != parameter.default:
            words.append(f"{name}={value.name if is_member else repr(value)}")
    return f"{kind.__name__}({', '.join(words)})"


def did_you_mean(word: object, names: Iterable[str], least: float = 0.6) -> str:
    """Return ``Did you mean 'MEAN'?`` for a name that is nearly one of `names`, in any letter case; else "".

    Args:
        word: the name that somebody wrote.
        names: the names that exist.
        least: how alike they must be, from 0 to 1: twice the letters in common over all letters.
    """
    if not isinstance(word, str):
        return ""
    import difflib  # here, for the quick import

    names_by_lower_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), names_by_lower_case, 1, least)
    return f"Did you mean {names_by_lower_case[near[0]]!r}?" if near else ""


def ranks_by(values: Iterable[Value]) -> dict[Value, list[int]]:
    """Return the ranks by their value, from the values of all ranks in rank order."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0-2, 5``; of many ranks the first."""
    ordered, ranges = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in ranges[:_MOST_RANGES]]
    more = f", ... ({len(ordered)} in all)" if len(ranges) > _MOST_RANGES else ""
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(texts)}{more}"


def size_in_words(nbytes: float) -> str:
    """Return a number of bytes as ``24 B`` or ``1.5 MiB``."""
    unit, factor = next((pair for pair in _UNITS if nbytes >= pair[1]), ("B", 1))
    size = nbytes / factor
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def time_in_words(seconds: float) -> str:
    unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("us", 1e-6))
    return f"{float(f'{seconds / factor:.2g}'):g} {unit}"
