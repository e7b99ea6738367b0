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

    def differing(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Return the values of a fact with their ranks, in words, and the ranks outside the majority.

        Empty where all ranks have one value; all ranks where there is no majority.
        """
        groups = [(ranks_of(members), value) for value, members in by(self.facts, key).items()]
        groups.sort(key=lambda group: (-len(group[0]), group[0]))
        if len(groups) == 1:
            return "", ()
        words = "; ".join(f"{value} on {ranks_in_words(ranks)}" for ranks, value in groups)
        odd = groups[len(groups[0][0]) > len(groups[1][0]) :]
        return words, tuple(sorted(rank for ranks, _ in odd for rank in ranks))


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
