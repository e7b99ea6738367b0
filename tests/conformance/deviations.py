"""Reads deviations.toml, the reviewed table of outcomes that may differ from the recording.

A rule names programs, conditions on the recorded case (`when`) and on what mpistrategy did instead (`ours`),
and may say which observations alone may differ (`only`).  It never names a case.  The vocabulary of
conditions is the set of small functions below; a condition is ``"word"``, ``"word:argument"``, or either
after ``"not "``.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import mpistrategy as ms

from .compare import Difference
from .environment import kind_of
from .judge import is_typed_error
from .values import Json, array_of, is_array, leaves

TABLE = Path(__file__).with_name("deviations.toml")
KINDS = ("deviation", "superseded")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        name: what is different, in a few words.
        kind: "deviation", or "superseded" where another environment recorded what SEMANTICS.md decided for.
        programs: the recorded programs it is about.
        reason: "graph", "keras", "tf.data", or "semantics: <row of SEMANTICS.md>".
        why: what TensorFlow did, what we do.
        when: conditions on the recorded case; all must hold.
        ours: conditions on the outcomes of our ranks; all must hold.
        only: the observations that may differ; empty for any.
        same_numbers: the numbers agree; only dtypes differ, or a Python number stands in place of an array.
    """

    name: str
    kind: str
    programs: tuple[str, ...]
    reason: str
    why: str
    when: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    same_numbers: bool = False

    def covers(self, case: Json) -> bool:
        """Return whether the rule is about this case, whatever we did."""
        return case["program"] in self.programs and all(_holds(WHEN, text, case) for text in self.when)

    def excuses(self, case: Json, outcomes: list[Json], found: Iterable[Difference]) -> bool:
        """Return whether these differences are what the rule allows."""
        if not self.covers(case) or not all(_holds(OURS, text, outcomes) for text in self.ours):
            return False
        if self.same_numbers and not all(map(numbers_agree, found)):
            return False
        return not self.only or all(difference.name in self.only for difference in found)


def load_rules(path: Path = TABLE) -> list[Rule]:
    """Return the rules of the table, checked for spelling."""
    rules = []
    for row in tomllib.loads(path.read_text())["rule"]:
        lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
        rule = Rule(**{**row, **lists})
        _check(rule)
        rules.append(rule)
    return rules


def _check(rule: Rule) -> None:
    if rule.kind not in KINDS:
        raise ValueError(f"rule {rule.name!r}: kind {rule.kind!r} is none of {KINDS}")
    if not (rule.reason in ("graph", "keras", "tf.data") or rule.reason.startswith("semantics: ")):
        raise ValueError(f"rule {rule.name!r}: reason {rule.reason!r}")
    for words, texts in ((WHEN, rule.when), (OURS, rule.ours)):
        for text in texts:
            if _word(text)[1] not in words:
                raise ValueError(f"rule {rule.name!r}: unknown condition {text!r}")


def find_rule(rules: list[Rule], case: Json, outcomes: list[Json], found: list[Difference]) -> Rule | None:
    """Return the first rule that excuses a case's differences."""
    return next((rule for rule in rules if rule.excuses(case, outcomes, found)), None)


def numbers_agree(difference: Difference) -> bool:
    """Return whether both sides of a difference are the same numbers, whatever their dtype."""
    sides = [difference.expected, difference.found]
    arrays = [array_of(side) if is_array(side) else np.asarray(side) for side in sides]
    return all(a.dtype.kind in "biufc" for a in arrays) and np.array_equal(arrays[0], arrays[1])


def _word(text: str) -> tuple[bool, str, str]:
    negated = text.startswith("not ")
    word, _, argument = text.removeprefix("not ").partition(":")
    return negated, word, argument


def _holds(words: dict[str, Callable[..., bool]], text: str, subject: Json) -> bool:
    negated, word, argument = _word(text)
    return words[word](subject, argument) is not negated


# ------------------------------------------------------------------------------------------------ `when`


def _environment(case: Json, name: str) -> bool:
    """``env:mirrored`` (one process, n replicas), ``env:multi_worker``, ``env:one_device``,
    ``env:default``."""
    return kind_of(case) == name


def _replicas(case: Json, number: str) -> bool:
    """``replicas:1``: the number of replicas."""
    return int(case["num_replicas"]) == int(number)


def _recorded(case: Json, text: str) -> bool:
    """``recorded:ok``, ``recorded:error``, ``recorded:ValueError``, ``recorded:no_result`` on any rank."""
    records = case["outcome"].get("by_rank", [case["outcome"]])
    statuses = {record.get("status", "ok") for record in records}
    types = {record["error"]["type"] for record in records if "error" in record}
    return text in statuses | types


def _input(case: Json, text: str) -> bool:
    """``input:destinations=value``: an input has this JSON value (quotes may be left out of strings)."""
    name, _, wanted = text.partition("=")
    inputs = case.get("inputs") or {}
    return name in inputs and wanted in (inputs[name], json.dumps(inputs[name]))


def _given(case: Json, name: str) -> bool:
    """``given:policy``: the program was given this input."""
    return (case.get("inputs") or {}).get(name) is not None


def _operation(case: Json, names: str) -> bool:
    """``op:MEAN`` or ``op:MIN,MAX``: the reduce op, however it is spelled."""
    op = (case.get("inputs") or {}).get("reduce_op")
    return str(op.get("reduce_op") if isinstance(op, dict) else op).upper() in names.split(",")


def _op_kind(case: Json, name: str) -> bool:
    """``op_kind:aggregation``: the reduce op is a "string", an "enum", an "aggregation", or something
    "else"."""
    op = (case.get("inputs") or {}).get("reduce_op")
    kinds = {"reduce_op": "enum", "aggregation": "aggregation"}
    found = (
        "string" if isinstance(op, str) else kinds.get(next(iter(op), ""), "else") if isinstance(op, dict) else "else"
    )
    return found == name


def _leaf_kind(leaf: Json) -> str:
    if is_array(leaf):
        return "ndarray" if "ndarray" in leaf or "numpy_scalar" in leaf else "tensor"
    if isinstance(leaf, dict):
        return "sparse" if "IndexedSlices" in leaf else "object"
    names = {bool: "bool", int: "number", float: "number", str: "string", type(None): "none"}
    return names[type(leaf)]


def _values(case: Json) -> Json:
    inputs = case.get("inputs") or {}
    return [inputs[name] for name in ("per_replica", "value", "pairs", "args") if name in inputs]


def _leaf(case: Json, kinds: str) -> bool:
    """``leaf:number``: the reduced values have a bare Python number; bool, string, none, object, ndarray,
    sparse."""
    return any(_leaf_kind(leaf) in kinds.split(",") for leaf in leaves(_values(case)))


def _dtype(case: Json, names: str) -> bool:
    """``dtype:int8,int16``: the values have an array of one of these dtypes."""
    return any(is_array(leaf) and leaf["dtype"] in names.split(",") for leaf in leaves(_values(case)))


def _initial(case: Json, kinds: str) -> bool:
    """``initial:int32,int64,number``: the variable begins with an array of one of these dtypes, or with a bare
    Python number."""
    values = leaves((case.get("inputs") or {}).get("initial"))
    return any((leaf["dtype"] if is_array(leaf) else _leaf_kind(leaf)) in kinds.split(",") for leaf in values)


def _shape_of(node: Json) -> Json:
    if is_array(node) or not isinstance(node, (dict, list)) or "object" in node:
        return "*"
    if isinstance(node, list):
        return [_shape_of(child) for child in node]
    if "IndexedSlices" in node:
        return "sparse"
    return {key: _shape_of(child) for key, child in node.items()}


def _differ(case: Json, what: str) -> bool:
    """``differ:structure``, ``differ:dtype``, ``differ:shape``: the replicas' values differ in this."""
    values = (case.get("inputs") or {}).get("per_replica")
    if values is None:
        values = ((case.get("inputs") or {}).get("value") or {}).get("per_replica")
    if values is None:
        return False
    describe: dict[str, Callable[[Json], Json]] = {
        "structure": _shape_of,
        "dtype": lambda value: [leaf.get("dtype") for leaf in leaves(value) if is_array(leaf)],
        "shape": lambda value: [leaf.get("shape") for leaf in leaves(value) if is_array(leaf)],
    }
    return any(describe[what](value) != describe[what](values[0]) for value in values)


def _lacks(case: Json, name: str) -> bool:
    """``lacks:NcclAllReduce``: the library has no such public name yet."""
    return not hasattr(ms, name)


def _plain(case: Json, _: str) -> bool:
    """``plain``: the reduced value is one plain object, the same on every replica."""
    value = (case.get("inputs") or {}).get("value")
    pairs = [pair[0] for pair in (case.get("inputs") or {}).get("pairs", ())]
    return any(isinstance(node, dict) and "plain" in node for node in [value, *pairs])


def _mixes_int32(case: Json, _: str) -> bool:
    """``int32 beside another``: a nest or batch of several leaves has an int32 tensor."""
    inputs = case.get("inputs") or {}
    groups = inputs.get("per_replica") or [[pair[0] for pair in inputs.get("pairs", ())]]
    return any(
        len(leaves(group)) > 1 and any(is_array(x) and x["dtype"] == "int32" for x in leaves(group)) for group in groups
    )


def _mirrored_value(case: Json, _: str) -> bool:
    """``mirrored value``: the reduced value is a Mirrored."""
    return "mirrored_from_sum_of" in ((case.get("inputs") or {}).get("value") or {})


def _structured_value(case: Json, _: str) -> bool:
    """``structured value``: each replica's value is a dict, a list or a tuple."""
    values = ((case.get("inputs") or {}).get("value") or {}).get("per_replica", ())
    return any(_shape_of(value) not in ("*", "sparse") for value in values)


def _negative_axis(case: Json, _: str) -> bool:
    """``negative axis``."""
    axis = (case.get("inputs") or {}).get("axis")
    return isinstance(axis, int) and axis < 0


def _impossible_device(case: Json, _: str) -> bool:
    """``impossible device``: a device is named that no replica has."""
    inputs = case.get("inputs") or {}
    kind, _, index = str(inputs.get("reduce_to_device", "")).rpartition(":")
    beyond = kind.endswith("CPU") and int(index) >= case["num_replicas"]
    impossible = ("unknown_device", "other_device") if case["num_replicas"] <= 3 else ("unknown_device",)
    destinations = [inputs.get("destinations"), *(pair[1] for pair in inputs.get("pairs", ()))]
    return beyond or any(destination in impossible for destination in destinations)


def _result_counts_calls(case: Json, _: str) -> bool:
    """``result counts calls``: the function that update calls returns which call it was."""
    return (case.get("inputs") or {}).get("fn") in ("return_call_number", "return_dict", "return_number")


def _per_replica_argument(case: Json, _: str) -> bool:
    """``per-replica argument``: an argument of update is a PerReplica."""
    arguments = (case.get("inputs") or {}).get("args") or ()
    return any(isinstance(node, dict) and "per_replica" in node for node in arguments)


def _nccl(case: Json, _: str) -> bool:
    """``nccl``: the class under test is NcclAllReduce."""
    inputs = case.get("inputs") or {}
    return "NcclAllReduce" in (inputs.get("class"), inputs.get("cdo"))


WHEN: dict[str, Callable[..., bool]] = {
    "env": _environment,
    "replicas": _replicas,
    "recorded": _recorded,
    "input": _input,
    "given": _given,
    "op": _operation,
    "op_kind": _op_kind,
    "leaf": _leaf,
    "dtype": _dtype,
    "initial": _initial,
    "differ": _differ,
    "lacks": _lacks,
    "plain": _plain,
    "int32 beside another": _mixes_int32,
    "mirrored value": _mirrored_value,
    "structured value": _structured_value,
    "negative axis": _negative_axis,
    "impossible device": _impossible_device,
    "per-replica argument": _per_replica_argument,
    "nccl": _nccl,
    "result counts calls": _result_counts_calls,
}

# ------------------------------------------------------------------------------------------------ `ours`


def _all_ok(outcomes: list[Json], _: str) -> bool:
    """``ok``: no rank failed."""
    return all(outcome["status"] == "ok" for outcome in outcomes)


def _all_errors(outcomes: list[Json], kind: str) -> bool:
    """``error`` or ``error:TypeError``: every rank raised a typed error (of this type)."""
    if not all(map(is_typed_error, outcomes)):
        return False
    return not kind or all(kind in (o["error"]["type"], *o["error"]["bases"]) for o in outcomes)


def _some_errors(outcomes: list[Json], kind: str) -> bool:
    """``some error:RuntimeError``: at least one rank raised it, the others too or returned normally."""
    failed = [outcome for outcome in outcomes if outcome["status"] == "error"]
    return bool(failed) and _all_errors(failed, kind)


OURS: dict[str, Callable[..., bool]] = {"ok": _all_ok, "error": _all_errors, "some error": _some_errors}


def usage(rules: list[Rule], cases: Iterable[Json]) -> Counter[str]:
    """Return how many cases each rule is about; a rule about none does not belong in the table."""
    counts: Counter[str] = Counter({rule.name: 0 for rule in rules})
    for case in cases:
        counts.update(rule.name for rule in rules if rule.covers(case))
    return counts
