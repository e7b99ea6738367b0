"""When the ranks do not make the same call, every rank is told who called what where, before any data moves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, all_refuse, context, in_scope, outcomes

import mpistrategy as ms
from mpistrategy import CommunicationOptions, errors
from mpistrategy.mpi.contract.mismatch_report import LEFT, Report, mismatch
from mpistrategy.optimizers import SGD

pytestmark = pytest.mark.mpi(min_size=2)

#: The last rank does something else than the others.
ODD = RANK == SIZE - 1


@pytest.fixture(scope="module")
def variables(strategy: ms.Strategy) -> tuple[ms.Variable, ms.Variable]:
    with strategy.scope():
        return (
            ms.Variable(np.zeros(2), aggregation="SUM", name="weights"),
            ms.Variable(np.zeros(2), aggregation="SUM", name="bias"),
        )


def all_reduce(value: Any, odd_value: Any, op: str = "SUM", odd_op: str = "SUM", **named: Any) -> Any:
    return lambda s, v: s.run(lambda: context().all_reduce(odd_op if ODD else op, odd_value if ODD else value, **named))


def either(call: Callable[[Any, Any], Any], odd_call: Callable[[Any, Any], Any]) -> Any:
    return lambda s, v: (odd_call if ODD else call)(s, v)


def created(value: Any = 0.0, odd_value: Any = 0.0, **named: Any) -> Any:
    return lambda s, v: in_scope(s, lambda: ms.Variable(odd_value if ODD else value, **named))


ONES = np.ones(3)
SLICES = ms.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
LONG_SLICES = ms.IndexedSlices(np.ones((1, 2)), np.array([0]), (4, 2))

# what differs, the call, what the text must say besides ranks and places
DIFFERENCES: list[tuple[str, Any, list[str]]] = [
    ("list and tuple", all_reduce([1.0], (1.0,)), ["structure", "[*]", "(*)"]),
    ("keys", all_reduce({"a": 1.0}, {"b": 1.0}), ["structure", "'a'", "'b'"]),
    ("number of leaves", all_reduce([1.0], [1.0, 2.0]), ["structure", "[*]", "[*,*]"]),
    ("dtype", all_reduce(ONES, ONES.astype("f4")), ["values", "float64[3]", "float32[3]"]),
    ("int and float", all_reduce(1, 1.0), ["values", "int64", "float64"]),
    ("shape", all_reduce(ONES, np.ones((1, 3))), ["values", "[3]", "[1, 3]"]),
    ("op", all_reduce(ONES, ONES, "SUM", "MEAN"), ["op", "SUM", "MEAN"]),
    ("name", all_reduce(ONES, ONES, name="odd" if ODD else "even"), ["name", "odd", "even"]),
    (
        "bytes_per_pack",
        all_reduce(ONES, ONES, options=CommunicationOptions(bytes_per_pack=8 if ODD else 64)),
        ["8", "64"],
    ),
    ("dense and sparse", all_reduce(np.ones((1, 2)), SLICES), ["values", "IndexedSlices"]),
    ("dense shapes of slices", all_reduce(SLICES, LONG_SLICES), ["values", "3, 2", "4, 2"]),
    ("Mirrored and plain", all_reduce(ONES, ms.Mirrored((ONES,)), "MEAN", "MEAN"), ["values", "Mirrored"]),
    (
        "kind",
        either(
            lambda s, v: s.run(lambda: context().all_reduce("SUM", ONES)),
            lambda s, v: s.run(lambda: context().all_gather(ONES, 0)),
        ),
        ["call", "ReplicaContext.all_reduce", "ReplicaContext.all_gather"],
    ),
    (
        "with and without axis",
        either(lambda s, v: s.reduce("SUM", ONES), lambda s, v: s.reduce("SUM", ONES, axis=0)),
        ["Strategy.reduce"],
    ),
    (
        "16 and 32 bits along an axis",
        lambda s, v: s.reduce("SUM", ONES.astype("f2" if ODD else "f4"), axis=0),
        ["float16", "float32"],
    ),
    ("axis", lambda s, v: s.reduce("SUM", np.ones((3, 3)), axis=int(ODD)), ["axis"]),
    ("destination", lambda s, v: s.extended.reduce_to("SUM", ONES, f"task:{int(ODD)}"), ["destination=rank 1"]),
    (
        "one and all destinations",
        lambda s, v: s.extended.reduce_to("SUM", ONES, "task:0" if ODD else v[0]),
        ["destination", "every rank"],
    ),
    (
        "reduce_to and broadcast_to",
        either(lambda s, v: s.extended.reduce_to("SUM", ONES, v[0]), lambda s, v: s.extended.broadcast_to(ONES, v[0])),
        ["reduce_to", "broadcast_to"],
    ),
    (
        "number of pairs",
        lambda s, v: s.extended.batch_reduce_to("SUM", [(ONES, v[0])] * (1 + ODD)),
        ["values", "float64[3], float64[3]"],
    ),
    ("shape of a broadcast", lambda s, v: s.extended.broadcast_to(np.ones(3 + ODD), v[0]), ["values", "[4]"]),
    ("other axes of a gather", lambda s, v: s.gather(np.ones((2, 3 + ODD)), 0), ["values"]),
    ("axes of a gather", lambda s, v: s.gather(np.ones((2, 2)), int(ODD)), ["op"]),
    ("op along an axis", lambda s, v: s.reduce("MEAN" if ODD else "SUM", ONES, axis=0), ["structure"]),
    ("bytes and strings", lambda s, v: s.gather(np.array([b"ab"] if ODD else ["ab"]), 0), ["values"]),
    ("width of strings", lambda s, v: s.gather(np.array(["a" * (1 + ODD)]), 0), ["values"]),
    ("variable", lambda s, v: s.run(lambda: v[int(ODD)].assign(np.ones(2))), ["name", "weights", "bias"]),
    (
        "assign and assign_add",
        lambda s, v: s.run(lambda: (v[0].assign_add if ODD else v[0].assign)(np.ones(2))),
        ["Variable.assign", "Variable.assign_add"],
    ),
    (
        "accumulation_fn",
        lambda s, v: _by(s, ms.ReductionToOneDevice(accumulation_fn=sum if ODD else None)),
        ["ReductionToOneDevice"],
    ),
    (
        "reduce_to_device",
        lambda s, v: _by(s, ms.ReductionToOneDevice(f"task:{int(ODD)}")),
        ["ReductionToOneDevice", "task:0", "task:1"],
    ),
    (
        "num_packs",
        lambda s, v: _by(s, ms.HierarchicalCopyAllReduce(1 + ODD)),
        ["HierarchicalCopyAllReduce"],
    ),
    ("barriers", lambda s, v: s.extended.barrier("end" if ODD else "begin"), ["name", "begin", "end"]),
    (
        "barrier and reduction",
        either(lambda s, v: s.barrier(), lambda s, v: s.reduce("SUM", 1.0)),
        ["barrier", "Strategy.reduce"],
    ),
    ("None in another place", all_reduce([None, 1.0], [1.0, None]), ["structure", "[None,*]"]),
    ("None and a value more", all_reduce([None, 1.0], [None, 1.0, 2.0]), ["structure", "[None,*]"]),
    ("None alone", all_reduce([None, 1.0], None), ["structure", "[None,*]"]),
    ("None along no axis", lambda s, v: s.reduce("SUM", [1.0, None] if ODD else [1.0, 2.0]), ["[*,None]"]),
    ("exclusive", lambda s, v: s.run(lambda: context().scan("SUM", 1.0, ODD)), ["SUM, exclusive"]),
    ("shape of a root's value", lambda s, v: s.broadcast(np.ones(3 + ODD)), ["values", "[4]"]),
    ("structure of a root's value", lambda s, v: s.broadcast([1.0] if ODD else (1.0,)), ["structure"]),
    ("root", lambda s, v: s.broadcast(1.0, int(ODD)), ["op"]),
    ("shape of a variable", created(np.zeros(2), np.zeros(3)), ["values", "float64[2]", "float64[3]"]),
    ("dtype of a variable", created(np.zeros(2), np.zeros(2, "f4")), ["values", "float64[2]", "float32[2]"]),
    ("aggregation", created(aggregation="SUM" if ODD else "MEAN"), ["op", "SUM", "MEAN"]),
    ("synchronization", created(synchronization="ON_READ" if ODD else "ON_WRITE"), ["op", "ON_READ", "ON_WRITE"]),
    ("name of a variable", created(name="odd" if ODD else "even"), ["name", "odd", "even"]),
    ("a variable and a reduction", either(created(), lambda s, v: s.reduce("SUM", 0.0)), ["Variable", "reduce"]),
    ("variables to compare", lambda s, v: s.assert_mirrored([v[ODD]]), ["structure", "weights", "bias"]),
    ("all to compare", lambda s, v: s.assert_mirrored(None if ODD else [v[0]]), ["structure", "weights", "all of"]),
    (
        "mirrored_check_steps",
        lambda s, v: s.run(lambda: SGD(mirrored_check_steps=1 + ODD).apply_gradients([(np.ones(2), v[0])])),
        ["mirrored_check_steps"],
    ),
]  # fmt: skip


def _by(strategy: ms.Strategy, ops: ms.CrossDeviceOps) -> Any:
    return in_scope(strategy, lambda: ops.batch_reduce("SUM", [(ONES, "CPU:0"), (np.ones(4), "CPU:0")]))


@pytest.mark.parametrize(("what", "call", "said"), DIFFERENCES, ids=[row[0] for row in DIFFERENCES])
def test_every_rank_is_told_what_differs(
    strategy: ms.Strategy, variables: tuple[ms.Variable, ms.Variable], what: str, call: Any, said: list[str]
) -> None:
    for rank, end in enumerate(outcomes(call, strategy, variables)):
        assert end.error is errors.CollectiveMismatchError, f"rank {rank}: {end.text}"
        for word in said:
            assert word in end.text
        for other in RANKS:
            assert re.search(rf"rank {other}: .* at {re.escape(__file__)}:\d+", end.text)
        assert "differ in:" in end.text
    for variable in variables:
        np.testing.assert_array_equal(variable.local_copy(), [0, 0])


@pytest.mark.parametrize("returned", [None, np.ones(4), np.ones(3, complex), "text", np.array([None] * 3)])
def test_what_an_accumulation_function_may_not_return(strategy: ms.Strategy, returned: Any) -> None:
    ops = ms.ReductionToOneDevice(accumulation_fn=lambda values: returned)
    all_refuse(
        errors.MpiStrategyError, in_scope, strategy, lambda: ops.reduce("SUM", ONES, "CPU:0"), words=["accumulation_fn"]
    )


@pytest.mark.one_rank
def test_a_table_of_many_ranks_is_short_and_its_data_whole() -> None:
    shapes = [3 if rank != 4711 else 4 for rank in range(10_000)]
    reports = [Report({"call": "Strategy.reduce", "values": f"float64[{each}]"}, "train.py:7") for each in shapes]
    reports[9_998:] = [Report({LEFT: "its program has ended"}, "its end") for _ in range(2)]
    error = mismatch(reports)
    assert str(error).splitlines()[:4] == [
        "the ranks do not make the same call; ranks 9998, 9999 left; they differ in: values",
        "  ranks 0-4710, 4712-9997: call=Strategy.reduce  values=float64[3]  at train.py:7",
        "  rank 4711: call=Strategy.reduce  values=float64[4]  at train.py:7",
        "  ranks 9998, 9999 left: its program has ended",
    ]
    assert len(error.calls) == 10_000
    apart = [Report({"call": "Strategy.reduce", "values": f"float64[{rank}]"}, "x.py:7") for rank in range(10_000)]
    lines = str(mismatch(apart)).splitlines()
    assert len(lines) <= 64
    assert lines[-4] == "  and 9944 more ranks, in other ways"
