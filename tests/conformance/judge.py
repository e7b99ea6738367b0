"""Does the outcome of a case, rank by rank, agree with the recording?

The recording of one process with n replicas is read as n recordings: of every container, rank i has entry i;
what the process saw once, every rank sees.  The recording of n workers has a record a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .compare import USERS_OWN, Difference, Tolerance, differences, is_typed_error, kinds_agree, short
from .environment import kind_of
from .rules import Reading, Rule
from .values import Json, elsewhere_paths, local_view


@dataclasses.dataclass(frozen=True)
class Result:
    """The verdict on one case: "passed", "deviations", "superseded", "unsupported" or "failed"."""

    case_id: str
    verdict: str
    rule: str = ""
    details: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Judge:
    """The reviewed tables: how recordings are read, and what may differ."""

    readings: Sequence[Reading] = ()
    rules: Sequence[Rule] = ()

    def verdict(self, case: Json, outcomes: list[Json], twins: Sequence[Json] = ()) -> Result:
        """Judge the ranks' outcomes of one case.

        Args:
            case: the recording.
            outcomes: what our ranks did, in rank order.
            twins: the same case recorded in other environments, with the same number of replicas.  Where a rule says
                that another environment decides, the outcome must be the one recorded there.
        """
        notes = tuple(f"rank {rank}: {o['note']}" for rank, o in enumerate(outcomes) if "note" in o)
        if all(outcome["status"] == "unsupported" for outcome in outcomes):
            return Result(case["id"], "unsupported", details=notes)
        if notes:
            return Result(case["id"], "failed", details=notes)
        found = self.differences(case, outcomes)
        if not found:
            return Result(case["id"], "passed")
        rule = self._rule(case, outcomes, found)
        details = tuple(f"{d.path}: expected {short(d.expected)}, found {short(d.found)}" for d in found)
        if rule is None:
            return Result(case["id"], "failed", details=details)
        if rule.kind == "deviation":
            return Result(case["id"], "deviations", rule.name, details)
        if twins and not any(self._holds_for(twin, outcomes) for twin in twins):
            return Result(case["id"], "failed", rule.name, (*details, "nor is it what the other environment recorded"))
        return Result(case["id"], "superseded", rule.name, details)

    def _rule(self, case: Json, outcomes: list[Json], found: list[Difference]) -> Rule | None:
        return next((rule for rule in self.rules if rule.excuses(case, outcomes, found)), None)

    def _holds_for(self, twin: Json, outcomes: list[Json]) -> bool:
        """Return whether the outcomes agree with another environment's recording, or deviate from it as allowed."""
        if any(set(elsewhere_paths(outcome.get("observed", {}))) for outcome in outcomes):
            return True  # where a value lives is said differently there
        found = self.differences(twin, outcomes)
        rule = self._rule(twin, outcomes, found) if found else None
        return not found or (rule is not None and rule.kind == "deviation")

    def differences(self, case: Json, outcomes: list[Json]) -> list[Difference]:
        """Return every difference between the recording and the ranks' outcomes; an empty list is a pass."""
        expected = [self.expected(case, rank) for rank in range(len(outcomes))]
        if any(record["status"] == "no_result" for record in expected) and all(map(is_typed_error, outcomes)):
            return []
        readings = self._readings(case)
        is_training = any(reading.training for reading in readings)
        tolerance = Tolerance.of_training(case) if is_training else Tolerance.of_case(case)
        ignored = tuple(path for reading in readings for path in reading.ignored)
        partial = any(reading.partial for reading in readings)
        excused = _bystanders(case, expected, outcomes, partial=partial)
        return [
            Difference(f"{found.path}[rank {rank}]", found.expected, found.found)
            for rank, (want, got) in enumerate(zip(expected, outcomes, strict=True))
            if rank not in excused
            for found in _of_rank(want, got, tolerance)
            if not (ignored and found.path.startswith(ignored))
        ] + _placement(case, outcomes)

    def expected(self, case: Json, rank: int) -> Json:
        """Return the recorded outcome as `rank` should see it."""
        outcome = case["outcome"]
        record = outcome["by_rank"][rank] if "by_rank" in outcome else outcome
        observed = record.get("observed", {})
        if kind_of(case) != "multi_worker":
            notes = {name: _own_note(note, rank) for name, note in observed.get("notes", {}).items()}
            observed = {**observed, "notes": {name: note for name, note in notes.items() if note != {}}}
            for reading in self._readings(case):
                observed = reading.of_rank(observed, rank, case["num_replicas"])
        return {**record, "status": record.get("status", "ok"), "observed": local_view(observed, rank)}

    def _readings(self, case: Json) -> list[Reading]:
        return [reading for reading in self.readings if reading.covers(case)]


def _own_note(note: Json, rank: int) -> Json:
    if isinstance(note, dict) and note and all(key.startswith("replica ") for key in note):
        return {key: value for key, value in note.items() if key == f"replica {rank}"}
    return note


def _bystanders(case: Json, expected: list[Json], outcomes: list[Json], *, partial: bool) -> set[int]:
    """Return the ranks that may fare otherwise although the one recorded process failed as a whole: return
    normally, or raise a typed error where they waited for the one that failed.

    That is so for faults of some replicas only: of a `partial` program, and an exception of the user's own.
    At least one rank must have failed as recorded.
    """
    if kind_of(case) != "mirrored" or expected[0]["status"] != "error":
        return set()
    if not partial and expected[0]["error"]["type"] not in USERS_OWN:
        return set()
    failed = [kinds_agree(want["error"], got.get("error")) for want, got in zip(expected, outcomes, strict=True)]
    others = {rank for rank, got in enumerate(outcomes) if got["status"] == "ok" or is_typed_error(got)}
    return {rank for rank in others if any(failed) and not failed[rank]}


def _of_rank(want: Json, got: Json, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the differences of one rank's outcome."""
    if want["status"] == "no_result":
        if got["status"] != "ok" and not is_typed_error(got):
            yield Difference("status", "a typed error instead of a hang", _status(got))
        return
    if want["status"] != got["status"] or not kinds_agree(want.get("error"), got.get("error")):
        yield Difference("status", _status(want), _status(got))
        if want["status"] == "ok":
            return
    yield from _observations(want["observed"], got.get("observed", {}), tolerance)
    notes = got.get("observed", {}).get("notes", {})
    for difference in _observations(want["observed"].get("notes", {}), notes, tolerance):
        yield dataclasses.replace(difference, path=f"notes.{difference.path}")


def _observations(want: Json, got: Json, tolerance: Tolerance) -> Iterator[Difference]:
    for name, value in want.items():
        if name in got and name != "notes":
            yield from differences(value, got[name], tolerance, name)
        elif value != {} and name != "notes":
            yield Difference(name, value, "no such observation")


def _placement(case: Json, outcomes: list[Json]) -> list[Difference]:
    """A value that was recorded on one device must live on at least one rank; one of every worker, on every
    rank."""
    places = [set(elsewhere_paths(outcome.get("observed", {}))) for outcome in outcomes]
    nowhere = set.intersection(*places) if kind_of(case) == "mirrored" else set.union(*places)
    return [Difference(path, "a value that lives here", "it lives elsewhere") for path in sorted(nowhere)]


def _status(outcome: Json) -> str:
    if outcome["status"] != "error":
        return str(outcome["status"])
    return f"error {outcome['error']['type']}: {outcome['error']['message'][:200]}"
