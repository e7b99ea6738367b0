"""The report: one line a finding with its fix below it, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mpistrategy.cli.doctor.checks.finding import BAD, NOTE, Finding, count, worst
from mpistrategy.cli.doctor.facts.facts import Facts, Job
from mpistrategy.cli.doctor.report.privacy import covered

FORMAT = 1
_SHOWN = {BAD: "BAD "}


def as_text(job: Job, findings: Sequence[Finding]) -> str:
    """Return the report for people."""
    first = job.facts[0]
    width = max((len(finding.check) for finding in findings), default=0)
    nodes = f" on {count(len(job.nodes), 'node')}" if not job.missing and not first.refusal else ""
    lines = [f"mpistrategy doctor: {count(first.size, 'rank')}{nodes}"]
    for each in findings:
        lines.append(f"{_SHOWN.get(each.verdict, each.verdict):<4}  {each.check:<{width}}  {each.found}")
        if each.fix:
            first_line, *more = each.fix.splitlines()
            lines.append(f"      {'':<{width}}  -> {first_line}")
            lines += [f"      {'':<{width}}     {line}" for line in more]
    bad, notes = (sum(each.verdict == verdict for each in findings) for verdict in (BAD, NOTE))
    told = ", ".join(text for text in (f"{bad} BAD" * bool(bad), count(notes, "note") * bool(notes)) if text)
    lines.append(f"{told}. Fix what is BAD first." if bad else f"Nothing is bad{f'; {told}' * bool(notes)}.")
    return "\n".join(lines)


def as_json(job: Job, findings: Sequence[Finding], cover: Callable[[str], str]) -> str:
    """Return the report as one JSON object.

    Its keys: ``format`` (1), ``verdict`` (ok, note, bad: the worst), ``ranks``, ``nodes``, ``findings`` (each with
    ``check``, ``verdict``, ``found``, ``fix``, ``ranks``) and ``facts``, one object for each rank, with the names of
    `mpistrategy.cli.doctor.facts.facts.Facts`.

    Args:
        job: what is known of the job.
        findings: the results of the checks.
        cover: removes secrets from a text.
    """
    told: dict[str, Any] = {
        "format": FORMAT,
        "verdict": worst(findings),
        "ranks": job.facts[0].size,
        "nodes": len(job.nodes),
        "findings": [asdict(each) for each in findings],
        "facts": [_shown(each) for each in job.facts],
    }
    return json.dumps(covered(told, cover), indent=1)


def _shown(each: Facts) -> dict[str, Any]:
    return asdict(each) | {"sight": json.loads(each.sight) if each.sight else None}
