"""The result of a check: a verdict, what was found, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpistrategy.cli.doctor.facts.facts import Facts
from mpistrategy.objects.shown import ranks_in_words

OK, NOTE, BAD = VERDICTS = ("ok", "note", "bad")  # from the best on

_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name.
        verdict: "ok"; "note": works, but worth knowing; "bad": wrong results, no start, or much slower.
        found: in words.
        fix: what to type or to change; "" where there is nothing to do.
        ranks: the ranks concerned; empty for all.
    """

    check: str
    verdict: str
    found: str
    fix: str = ""
    ranks: tuple[int, ...] = ()


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict; "ok" of none."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=OK)


def groups(facts: Sequence[Facts], value: Callable[[Facts], _Value]) -> dict[_Value, list[int]]:
    """Return the ranks by a value of theirs; what most of them have comes first."""
    found: dict[_Value, list[int]] = {}
    for each in facts:
        found.setdefault(value(each), []).append(each.rank)
    return dict(sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[1])))


def odd_ones(found: dict[_Value, list[int]]) -> tuple[int, ...]:
    """Return the ranks that do not have what most of them have; all, where there is no majority."""
    sizes = [len(ranks) for ranks in found.values()]
    first = 0 if len(sizes) > 1 and sizes[0] == sizes[1] else 1
    return tuple(sorted(rank for ranks in list(found.values())[first:] for rank in ranks))


def in_words(found: dict[_Value, list[int]]) -> str:
    """Return ``2.4.1 on ranks 0, 1, 2; 2.3.0 on rank 3``."""
    return "; ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in found.items())


def count(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``4 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def mebibytes(nbytes: float) -> str:
    """Return a size in words."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
