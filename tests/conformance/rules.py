"""Reads deviations.toml: how recordings are read, and the outcomes that may differ from them.

A row is about some programs, and `when` and `unless` may narrow it to some cases: tables of regular expressions by the
name of a fact of the case.  Each fact is a set of texts (see `facts`); a condition holds when one of them matches.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .compare import Difference, is_typed_error, lineage
from .environment import kind_of
from .values import Json, array_of, at_path, is_array, leaves

TABLE = Path(__file__).with_name("deviations.toml")
KINDS = {bool: "bool", int: "number", float: "number", str: "string", type(None): "none"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What all rows have in common.

    Attributes:
        programs: the recorded programs it is about.
        when: facts of the case that must match.
        unless: facts of the case of which none may match.
    """

    programs: tuple[str, ...]
    when: dict[str, str] = dataclasses.field(default_factory=dict)
    unless: dict[str, str] = dataclasses.field(default_factory=dict)

    def covers(self, case: Json) -> bool:
        """Return whether the row is about this case, whatever we did."""

        def holds(condition: tuple[str, str]) -> bool:
            name, pattern = condition
            return any(re.fullmatch(pattern, text) for text in facts(case, name))

        about = case["program"] in self.programs
        return about and all(map(holds, self.when.items())) and not any(map(holds, self.unless.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(Row):
    """How the recording of one process with n replicas is read on a rank, besides that of every container it has one
    entry.

    Attributes:
        own: paths to lists with one entry a replica.
        own_leaves: observations of which each leaf is a tuple with one entry a replica.
        mine: paths to lists of texts, of which some are about one replica or its device.
        dropped: names of TensorFlow's insides.
        ignored: observations that may differ, by path prefix.
        partial: the fault is on some replicas only: a rank that took no part in it may return normally.
        training: bare numbers are those of a training loop, and agree to its rounding.
    """

    own: tuple[list[str], ...] = ()
    own_leaves: tuple[list[str], ...] = ()
    mine: tuple[list[str], ...] = ()
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    partial: bool = False
    training: bool = False

    def of_rank(self, observed: Json, rank: int, num_replicas: int) -> Json:
        """Return the recorded observations as a rank should make them."""

        def own(node: Json) -> Json:
            if isinstance(node, dict) and "tuple" in node:
                return {"tuple": own(node["tuple"])}
            return [node[rank]] if isinstance(node, list) and len(node) == num_replicas else node

        def own_leaves(node: Json) -> Json:
            if isinstance(node, list):
                return [own_leaves(child) for child in node]
            if not isinstance(node, dict) or is_array(node):
                return node
            if all(is_array(x) or not isinstance(x, (dict, list)) for x in node.get("tuple", [[]])):
                return own(node)
            return {key: own_leaves(child) for key, child in node.items()}

        def mine(texts: list[str]) -> list[str]:
            about = [re.search(r"(?:replica |CPU:)(\d+)", text) for text in texts]
            return [text for text, found in zip(texts, about, strict=True) if not found or int(found[1]) == rank]

        def kept(node: Json) -> Json:
            if not isinstance(node, dict):
                return node
            return {name: kept(child) for name, child in node.items() if name not in self.dropped}

        for paths, change in ((self.own, own), (self.own_leaves, own_leaves), (self.mine, mine)):
            for path in paths:
                observed = at_path(observed, path, change)
        return kept(observed) if self.dropped else observed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Row):
    """An outcome that may differ from the recording.

    Attributes:
        name: what is different, in a few words.
        kind: "deviation", or "superseded" where another environment recorded what SEMANTICS.md decided for.
        reason: "graph", "keras", "tf.data", or "semantics: <row of SEMANTICS.md>".
        why: what TensorFlow did, what we do.
        ours: "ok", or the type of the error that every rank must raise ("error" for any typed one); empty for any.
        only: the observations that may differ; empty for any.
        same_numbers: the numbers agree; only dtypes differ, or a Python number stands in place of an array.
    """

    name: str
    kind: str
    reason: str
    why: str
    ours: str = ""
    only: tuple[str, ...] = ()
    same_numbers: bool = False

    def excuses(self, case: Json, outcomes: list[Json], found: Iterable[Difference]) -> bool:
        """Return whether these differences are what the rule allows."""
        return (
            self.covers(case)
            and all(self._allows(outcome) for outcome in outcomes)
            and not (self.only and any(difference.name not in self.only for difference in found))
            and not (self.same_numbers and not all(map(numbers_agree, found)))
        )

    def _allows(self, outcome: Json) -> bool:
        if self.ours in ("", "ok"):
            return not self.ours or outcome["status"] == "ok"
        return is_typed_error(outcome) and self.ours in {"error", *lineage(outcome["error"])}


def load_table(path: Path = TABLE) -> tuple[list[Reading], list[Rule]]:
    """Return the readings and the rules, in the order of the file."""
    table = tomllib.loads(path.read_text())
    return [Reading(**row) for row in table["reading"]], [Rule(**row) for row in table["rule"]]


def numbers_agree(difference: Difference) -> bool:
    """Return whether both sides of a difference are the same numbers, whatever their dtype."""
    sides = [difference.expected, difference.found]
    arrays = [array_of(side) if is_array(side) else np.asarray(side) for side in sides]
    return all(a.dtype.kind in "biufc" for a in arrays) and np.array_equal(arrays[0], arrays[1])


# ------------------------------------------------------------------------------------------------ facts


def facts(case: Json, name: str) -> set[str]:
    """Return what a case says: one of the facts below, or else an input, as JSON or as a plain string.

    env: where it was recorded: mirrored (one process), multi_worker, one_device or default.
    recorded: statuses and types of errors, on any rank.
    text: the inputs as one line of JSON.
    reduction, spelling: the reduce op, and whether it is a string, an enum, an aggregation, or something else.
    leaf: kinds of the reduced values: number, bool, string, none, object, tensor, ndarray, sparse.
    dtype: the dtypes of arrays among them.
    start: the dtype, or the kind, of a variable's initial value.
    structure: "nest" where a replica's value is one, "several" where the replicas' values differ in it.
    """
    inputs = case.get("inputs") or {}
    match name:
        case "env":
            return {kind_of(case)}
        case "recorded":
            records = case["outcome"].get("by_rank", [case["outcome"]])
            types = {record["error"]["type"] for record in records if "error" in record}
            return types | {record.get("status", "ok") for record in records}
        case "text":
            return {json.dumps(inputs)}
        case "reduction" | "spelling":
            return {_op(inputs.get("reduce_op"))[name]}
        case "leaf":
            return set(map(_leaf_kind, leaves(_values(inputs))))
        case "dtype":
            return _dtypes(leaves(_values(inputs)))
        case "start":
            start = leaves(inputs.get("initial"))
            return _dtypes(start) | set(map(_leaf_kind, start))
        case "structure":
            value = inputs.get("value")
            values = inputs.get("per_replica") or (value.get("per_replica", ()) if isinstance(value, dict) else ())
            found = {json.dumps(_structure(child)) for child in values}
            nests = {"nest"} if found - {'"*"', '"sparse"'} else set()
            return nests | ({"several"} if len(found) > 1 else set())
    return {json.dumps(inputs[name]), str(inputs[name])} if name in inputs else set()


def _op(op: Json) -> dict[str, str]:
    if not isinstance(op, dict):
        return {"reduction": str(op).upper(), "spelling": "string" if isinstance(op, str) else "else"}
    kinds = {"reduce_op": "enum", "aggregation": "aggregation"}
    return {"reduction": str(op.get("reduce_op")).upper(), "spelling": kinds.get(next(iter(op), ""), "else")}


def _values(inputs: Json) -> list[Json]:
    return [inputs[name] for name in ("per_replica", "value", "pairs", "args") if name in inputs]


def _dtypes(found: list[Json]) -> set[str]:
    return {leaf["dtype"] for leaf in found if is_array(leaf)}


def _leaf_kind(leaf: Json) -> str:
    if is_array(leaf):
        return "ndarray" if "ndarray" in leaf or "numpy_scalar" in leaf else "tensor"
    if isinstance(leaf, dict):
        return "sparse" if "IndexedSlices" in leaf else "object"
    return KINDS[type(leaf)]


def _structure(node: Json) -> Json:
    if isinstance(node, list):
        return [_structure(child) for child in node]
    if is_array(node) or not isinstance(node, dict) or "object" in node:
        return "*"
    return "sparse" if "IndexedSlices" in node else {key: _structure(child) for key, child in node.items()}
