"""The known facts of a job, and findings: each check is a function from `Job` to a list of findings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.gpu.cuda_aware import Outcome
from mpistrategy.objects.shown import ranks_in_words

OK, NOTE, BAD = VERDICTS = ("ok", "note", "bad")  # from the best on

#: What one rank knows of itself: the keys of `mpistrategy.cli.doctor.facts.UNKNOWN`.
Facts = dict[str, Any]


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


@dataclass(frozen=True)
class Job:
    """What is known of a job.

    Attributes:
        facts: of each rank that answered, by its number.
        wanted_ranks: how many ranks there should be; 0 if not given.
        missing: the ranks that did not answer.
        patience: how many seconds the other ranks waited for these.
        sums_right: whether a sum over the ranks was right; None if not tried.
        untried: why not.
        trial: what came of GPU memory given to MPI; None if not tried.
    """

    facts: Sequence[Facts]
    wanted_ranks: int = 0
    missing: Sequence[int] = ()
    patience: float = 0.0
    sums_right: bool | None = None
    untried: str = ""
    trial: Outcome | None = None

    @property
    def nodes(self) -> dict[int, list[Facts]]:
        """The ranks of each node, by the node's first rank."""
        return by(self.facts, "leader")

    def with_several(self, key: str) -> dict[Any, list[int]]:
        """Return the ranks by the value of a fact, the most frequent first; empty if all ranks have one value."""
        groups = {value: ranks_of(members) for value, members in by(self.facts, key).items()}
        ordered = sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[1]))
        return dict(ordered) if len(groups) > 1 else {}


def by(facts: Sequence[Facts], key: str) -> dict[Any, list[Facts]]:
    """Return the ranks by the value of a fact."""
    groups: dict[Any, list[Facts]] = {}
    for rank in facts:
        groups.setdefault(rank[key], []).append(rank)
    return groups


def ranks_of(facts: Iterable[Facts]) -> list[int]:
    """Return the numbers of ranks."""
    return [rank["rank"] for rank in facts]


def finding_of(check: str, verdict: str, facts: Sequence[Facts], found: str, fix: str, **extra: object) -> Finding:
    """Return a finding about some ranks.

    Args:
        check, verdict: as in `Finding`.
        facts: of the ranks.
        found, fix: in words, with facts of the first of these ranks in braces, ``{these_ranks}`` for all, and `extra`.
        extra: further values.
    """
    ranks = ranks_of(facts)
    values = {**facts[0], "these_ranks": ranks_in_words(ranks), **extra}
    return Finding(check, verdict, found.format_map(values), fix.format_map(values), tuple(ranks))


def odd_ranks(ranks_by_value: dict[Any, list[int]]) -> tuple[int, ...]:
    """Return the ranks outside the majority, of a result of `Job.with_several`; all ranks, without a majority."""
    groups = list(ranks_by_value.values())
    if len(groups[0]) > len(groups[1]):
        groups = groups[1:]
    return tuple(sorted(rank for ranks in groups for rank in ranks))


def in_words(ranks_by_value: dict[Any, list[int]]) -> str:
    """Return ``2.4.1 on ranks 0, 1, 2; 2.3.0 on rank 3``."""
    return "; ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in ranks_by_value.items())


def count(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``4 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parts_of(error: MpiStrategyError) -> tuple[str, str]:
    """Return the problem that an error of this library names, and its fix."""
    return error.found or str(error), error.fix or (f"Expected {error.expected}" if error.expected else "")


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict; "ok" of none."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=OK)


def as_text(job: Job, findings: Sequence[Finding]) -> str:
    """Return the report for people: one line a finding, and its fix below it."""
    first, width = job.facts[0], max(len(finding.check) for finding in findings)
    nodes = "" if job.missing or first["refusal"] else f" on {count(len(job.nodes), 'node')}"
    lines = [f"mpistrategy doctor: {count(first['size'], 'rank')}{nodes}"]
    for finding in findings:
        verdict = "BAD" if finding.verdict == BAD else finding.verdict
        lines.append(f"{verdict:<4}  {finding.check:<{width}}  {finding.found}")
        for number, line in enumerate(finding.fix.splitlines()):
            lines.append(f"      {'':<{width}}  {'  ' if number else '->'} {line}")
    bad, notes = (sum(finding.verdict == verdict for finding in findings) for verdict in (BAD, NOTE))
    notes_text = f"; {count(notes, 'note')}" if notes else ""
    lines.append(f"{bad} BAD{notes_text}. Fix what is BAD first." if bad else f"Nothing is bad{notes_text}.")
    return "\n".join(lines)


def as_json(job: Job, findings: Sequence[Finding]) -> str:
    """Return the report as one JSON object.

    Its keys: ``format`` (1), ``verdict`` (ok, note, bad: the worst), ``ranks``, ``nodes``, ``findings`` (each with
    ``check``, ``verdict``, ``found``, ``fix``, ``ranks``) and ``facts``, one object for each rank, with the keys of
    `mpistrategy.cli.doctor.facts.UNKNOWN`.
    """
    report = {
        "format": 1,
        "verdict": worst(findings),
        "ranks": job.facts[0]["size"],
        "nodes": len(job.nodes),
        "findings": [asdict(finding) for finding in findings],
        "facts": job.facts,
    }
    return json.dumps(report, indent=1)
