"""Does the outcome of a case, rank by rank, agree with the recording?

The recording of one process with n replicas is read as n recordings: of every container, rank i has entry i;
what the process saw once, every rank sees.  The recording of n workers has a record a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .compare import Difference, Tolerance, differences
from .environment import kind_of
from .registry import Program
from .values import Json, is_array, local_view, own_copy

#: Exceptions that tf.distribute documents: ours must be that type or a subclass.
DOCUMENTED = ("ValueError", "TypeError", "RuntimeError", "NotImplementedError", "IndexError")

#: Exceptions that only a user's function raises, and the end of an iteration: they must come back unchanged.
USERS_OWN = ("KeyError", "StopIteration")

#: What counts as a typed error of ours, where TensorFlow failed by an accident of its internals.
TYPED = ("MpiStrategyError", *DOCUMENTED)


def judge(case: Json, program: Program, outcomes: list[Json]) -> list[Difference]:
    """Return every difference between the recording and the ranks' outcomes; an empty list is a pass."""
    expected = [expected_outcome(case, program, rank) for rank in range(len(outcomes))]
    if any(record["status"] == "no_result" for record in expected) and all(map(is_typed_error, outcomes)):
        return []
    found_all = list(_judge_ranks(case, program, expected, outcomes))
    return found_all + _judge_placement(case, outcomes)


def _judge_ranks(case: Json, program: Program, expected: list[Json], outcomes: list[Json]) -> Iterator[Difference]:
    tolerance = Tolerance.of_training(case, program.rounding) if program.rounding else Tolerance.of_case(case)
    bystanders = may_be_bystanders(case, program, expected, outcomes)
    for rank, (want, got) in enumerate(zip(expected, outcomes, strict=True)):
        if rank in bystanders and (got["status"] == "ok" or is_typed_error(got)):
            continue
        for difference in judge_rank(want, got, program, tolerance):
            yield Difference(f"{difference.path}[rank {rank}]", difference.expected, difference.found)


def may_be_bystanders(case: Json, program: Program, expected: list[Json], outcomes: list[Json]) -> set[int]:
    """Return the ranks that may fare otherwise although the one recorded process failed as a whole: return
    normally, or raise a typed error where they waited for the one that failed.

    That is so for faults of some replicas only: a program marked `partial`, and an exception of the user's
    own. At least one rank must have failed as recorded.
    """
    if kind_of(case) != "mirrored" or expected[0]["status"] != "error":
        return set()
    users_own = expected[0]["error"]["type"] in USERS_OWN
    if not (program.partial or users_own):
        return set()
    failed = [rank for rank, got in enumerate(outcomes) if errors_agree(expected[rank], got)]
    return {rank for rank in range(len(outcomes)) if rank not in failed} if failed else set()


def judge_rank(want: Json, got: Json, program: Program, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the differences of one rank's outcome."""
    if want["status"] == "no_result":
        if got["status"] != "ok" and not is_typed_error(got):
            yield Difference("status", "a typed error instead of a hang", _status(got))
        return
    if want["status"] == "error":
        if not errors_agree(want, got):
            yield Difference("status", _status(want), _status(got))
    elif got["status"] != "ok":
        yield Difference("status", "ok", _status(got))
        return
    yield from _observation_differences(want.get("observed", {}), got.get("observed", {}), program, tolerance)


def _observation_differences(want: Json, got: Json, program: Program, tolerance: Tolerance) -> Iterator[Difference]:
    for name, value in want.items():
        if name == "notes":
            notes = {f"notes.{key}": note for key, note in value.items()}
            ours = {f"notes.{key}": note for key, note in got.get("notes", {}).items()}
            yield from _observation_differences(notes, ours, program, tolerance)
        elif name not in got:
            if value != {}:
                yield Difference(name, value, "no such observation")
        else:
            for difference in _value_differences(value, got[name], tolerance, name):
                if not difference.path.startswith(program.ignored or ("\0",)):
                    yield difference


def _value_differences(want: Json, got: Json, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    """Like compare.differences, with the judge's readings of errors and of values that live elsewhere."""
    if _is_error(want):
        if not (_is_error(got) and kinds_agree(want["error"], got["error"])):
            yield Difference(path, want, got)
    elif is_elsewhere(got) and is_array(want):
        return
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for index, (a, b) in enumerate(zip(want, got, strict=True)):
            yield from _value_differences(a, b, tolerance, f"{path}[{index}]")
    elif _is_plain_dict(want) and _is_plain_dict(got) and set(want) == set(got):
        for key in want:
            yield from _value_differences(want[key], got[key], tolerance, f"{path}[{key}]")
    else:
        yield from differences(want, got, tolerance, path)


def _judge_placement(case: Json, outcomes: list[Json]) -> list[Difference]:
    """A value that was recorded on one device must live on at least one rank; one of every worker, on every
    rank."""
    places = [set(elsewhere_paths(outcome.get("observed", {}))) for outcome in outcomes]
    nowhere = set.intersection(*places) if kind_of(case) == "mirrored" else set.union(*places)
    return [Difference(path, "a value that lives here", "it lives elsewhere") for path in sorted(nowhere)]


def elsewhere_paths(node: Json, path: str = "") -> Iterator[str]:
    """Yield where an encoded outcome has values that live on other ranks."""
    if is_elsewhere(node):
        yield path
    elif isinstance(node, (dict, list)) and not is_array(node):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            yield from elsewhere_paths(child, f"{path}[{key}]" if path else str(key))


def is_elsewhere(node: Json) -> bool:
    """Return whether an encoded value says that it lives on another rank."""
    return isinstance(node, dict) and "elsewhere" in node


def _is_error(node: Json) -> bool:
    return isinstance(node, dict) and isinstance(node.get("error"), dict)


def _is_plain_dict(node: Json) -> bool:
    return isinstance(node, dict) and not is_array(node) and "IndexedSlices" not in node


# ------------------------------------------------------------------------------------------------ recordings


def expected_outcome(case: Json, program: Program, rank: int) -> Json:
    """Return the recorded outcome as `rank` should see it."""
    outcome = case["outcome"]
    if "by_rank" in outcome:
        record = outcome["by_rank"][rank]
        observed = local_view(record.get("observed", {}), rank)
        return {**record, "status": record.get("status", "ok"), "observed": observed}
    record = {key: value for key, value in outcome.items() if key != "same_on_every_rank"}
    observed = record.get("observed", {})
    if kind_of(case) != "multi_worker":
        observed = _observations_of_rank(observed, case, program, rank)
    return {**record, "observed": local_view(observed, rank)}


def _observations_of_rank(observed: Json, case: Json, program: Program, rank: int) -> Json:
    seen = dict(observed)
    if "notes" in seen:
        seen["notes"] = {name: _own_note(note, rank) for name, note in seen["notes"].items()}
        seen["notes"] = {name: note for name, note in seen["notes"].items() if note != {}}
    for name in program.copies:
        group, key = (seen.get("notes", {}), name[len("notes.") :]) if name.startswith("notes.") else (seen, name)
        if key in group:
            group[key] = own_copy(group[key], rank, case["num_replicas"])
    return program.view(seen, rank, case) if program.view else seen


def _own_note(note: Json, rank: int) -> Json:
    if isinstance(note, dict) and note and all(key.startswith("replica ") for key in note):
        return {key: value for key, value in note.items() if key == f"replica {rank}"}
    return note


# ------------------------------------------------------------------------------------------------ errors


def errors_agree(want: Json, got: Json) -> bool:
    """Return whether two outcomes are errors of the same kind."""
    return got["status"] == "error" and kinds_agree(want["error"], got["error"])


def kinds_agree(want: dict[str, Any], got: dict[str, Any]) -> bool:
    """Return whether an exception of ours is the kind that was recorded.

    A documented type must be that type or a subclass; a user's own exception must be the same; where
    TensorFlow failed by an accident of its internals, any typed error of ours counts, and so does the very
    same accident of plain Python (``None.merge_call`` is an AttributeError everywhere).
    """
    lineage = (got["type"], *got.get("bases", ()))
    if want["type"] in DOCUMENTED or want["type"] in USERS_OWN:
        return want["type"] in lineage
    python_accident = want["type"] == got["type"] == "AttributeError" and want["message"] == got["message"]
    return python_accident or bool(set(lineage) & set(TYPED))


def is_typed_error(outcome: Json) -> bool:
    """Return whether an outcome is an exception that says what was wrong."""
    return outcome["status"] == "error" and bool({outcome["error"]["type"], *outcome["error"]["bases"]} & set(TYPED))


def _status(outcome: Json) -> str:
    if outcome["status"] != "error":
        return str(outcome["status"])
    return f"error {outcome['error']['type']}: {outcome['error']['message'][:200]}"
