"""Bad input gets a typed error on every rank, leaves nobody waiting, and the strategy works on afterwards.

One row a mistake. ``bad`` is called on all ranks, or on the last rank while its peers make the good call of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from declared import IN_STEPS, arguments, parameters
from mpi4py import MPI
from replicas import RANK, SIZE, all_refuse, context, in_scope, new_variable, outcomes

import mpistrategy as ms
from mpistrategy import CommunicationOptions, errors
from mpistrategy.reduction.asynchronous import AllReduceHandle

pytestmark = pytest.mark.mpi

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


class Unhelpful:
    """Raises an exception of its own when it is looked at."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise ZeroDivisionError("from the user's class")


@pytest.fixture(scope="module")
def variable(strategy: ms.Strategy) -> ms.Variable:
    return new_variable(strategy, np.zeros(2), aggregation="SUM", name="weights")


Call = Callable[[ms.Strategy, ms.Variable], Any]


def in_step(method: str, *arguments: Any, **named: Any) -> Call:
    return lambda s, v: s.run(lambda: getattr(context(), method)(*arguments, **named))


ONES = np.ones(3)
OBJECTS = np.array([None, 1])
FIXED = np.broadcast_to(0.0, 3)
MASKED = np.ma.masked_array([1.0, 2.0], [True, False])
ROWS: dict[str, Any] = {"arrays": np.arange(4), "global_batch_size": 2}
SLICES = ms.IndexedSlices(np.ones((2, 2)), np.array([0, 1]), (3, 2))


def declared(method: str, **chosen: Any) -> Call:
    return in_step(method, **arguments(method, **chosen))


GOOD = {
    **{method: declared(method, value=ONES) for method in IN_STEPS},
    "reduce": lambda s, v: s.reduce("SUM", ONES),
    "gather": lambda s, v: s.gather(ONES, 0),
    "reduce_to": lambda s, v: s.extended.reduce_to("SUM", ONES, v),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to("SUM", [(ONES, v)]),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(ONES, v),
    "broadcast": lambda s, v: s.broadcast(1.0),
    "assert_mirrored": lambda s, v: s.assert_mirrored([v]),
    "Variable": lambda s, v: in_scope(s, lambda: ms.Variable(1.0)),
}

# name of the good call, what is bad about it, the bad call, the kind of error
REDUCTIONS: list[tuple[str, str, Call, Any]] = [
    *[
        (name, f"op {op!r}", make(op), ValueError)
        for op in (None, "MEDIAN", " SUM", True, sum, ms.VariableAggregation.NONE)
        for name, make in {
            "all_reduce": lambda op: in_step("all_reduce", op, ONES),
            "reduce": lambda op: lambda s, v: s.reduce(op, ONES),
            "reduce_to": lambda op: lambda s, v: s.extended.reduce_to(op, ONES, v),
            "batch_reduce_to": lambda op: lambda s, v: s.extended.batch_reduce_to(op, [(ONES, v)]),
        }.items()
    ],
    *[
        (name, what, make(value), kind)
        for what, value, kind in [
            ("None", None, ValueError),
            ("a string", "text", TypeError),
            ("strings", np.array(["a", "b"]), TypeError),
            ("True", True, TypeError),
            ("bools", np.array([True]), TypeError),
            ("objects", OBJECTS, ValueError),
            ("masked", MASKED, ValueError),
            ("dates", np.array(["2020"], "M8[D]"), TypeError),
            ("a record", np.zeros(1, [("a", "f4")]), TypeError),
            ("a set", {1}, ValueError),
            ("a class that raises", Unhelpful(), ZeroDivisionError),
            ("slices without rows", ms.IndexedSlices(np.ones((2, 2)), np.array([0])), ValueError),
            ("slices of no shape", ms.IndexedSlices(np.ones((1, 2)), np.array([0]), 5), ValueError),
            ("slices with float indices", ms.IndexedSlices(np.ones((2, 2)), np.zeros(2)), (TypeError, ValueError)),
        ]
        for name, make in {
            "all_reduce": lambda value: in_step("all_reduce", "SUM", value),
            "reduce": lambda value: lambda s, v: s.reduce("SUM", value),
            "reduce_to": lambda value: lambda s, v: s.extended.reduce_to("SUM", value, v),
            "batch_reduce_to": lambda value: lambda s, v: s.extended.batch_reduce_to("SUM", [(ONES, v), (value, v)]),
        }.items()
        if value is not None  # which stays as it is
    ],
    *[
        (method, f"{what}, as declared", declared(method, **chosen), ValueError)
        for what, chosen in {
            "objects": {"value": OBJECTS},
            "masked": {"value": MASKED},
            "an endless list": {"value": ENDLESS},
            "op 'MEDIAN'": {"reduce_op": "MEDIAN"},
        }.items()
        for method in IN_STEPS
        if chosen.keys() <= parameters(method).keys()
    ],
    *[
        (name, f"destination {where!r}", make(where), ValueError)
        for where in (None, "", "task:99", "GPU:0", "nonsense", "CPU:77", [], [None], 3, ["task:0", "task:99"],
                      "/job:ps/task:0", "/job:worker/replica:7/task:0/device:CPU:0")
        for name, make in {
            "reduce_to": lambda where: lambda s, v: s.extended.reduce_to("SUM", ONES, where),
            "batch_reduce_to": lambda where: lambda s, v: s.extended.batch_reduce_to("SUM", [(ONES, where)]),
            "broadcast_to": lambda where: lambda s, v: s.extended.broadcast_to(ONES, where),
        }.items()
    ],
    *[
        (name, f"options {options!r}", make(options), TypeError)
        for options in ({"bytes_per_pack": 8}, "RING", 8)
        for name, make in {
            "all_reduce": lambda options: in_step("all_reduce", "SUM", ONES, options),
            "all_gather": lambda options: in_step("all_gather", ONES, 0, options),
            "reduce_to": lambda options: lambda s, v: s.extended.reduce_to("SUM", ONES, v, options),
            "batch_reduce_to": lambda options: lambda s, v: s.extended.batch_reduce_to("SUM", [(ONES, v)], options),
        }.items()
    ],
    *[
        (name, f"axis {axis!r}", make(axis), kind)
        for axis, kind in [(1, ValueError), (-2, ValueError), ("0", TypeError), (0.0, TypeError)]
        for name, make in {
            "reduce": lambda axis: lambda s, v: s.reduce("SUM", ONES, axis=axis),
            "gather": lambda axis: lambda s, v: s.gather(ONES, axis),
            "all_gather": lambda axis: in_step("all_gather", ONES, axis),
        }.items()
    ],
    ("reduce", "an axis twice", lambda s, v: s.reduce("SUM", ONES, axis=(0, 0)), ValueError),
    ("reduce", "an axis of a scalar", lambda s, v: s.reduce("SUM", 1.0, axis=0), ValueError),
    ("reduce", "an axis of a nest", lambda s, v: s.reduce("SUM", {"a": ONES}, axis=0), (TypeError, ValueError)),
    ("reduce", "nothing", lambda s, v: s.reduce("SUM", []), ValueError),
    ("reduce", "an endless list", lambda s, v: s.reduce("SUM", ENDLESS), ValueError),
    ("reduce", "a Mirrored under SUM", lambda s, v: s.reduce("SUM", ms.Mirrored((ONES,))), ValueError),
    ("reduce", "a Mirrored along an axis", lambda s, v: s.reduce("SUM", ms.Mirrored((ONES,)), axis=0), ValueError),
    ("all_reduce", "nothing", in_step("all_reduce", "SUM", {"a": []}), ValueError),
    ("all_reduce", "out of another shape", in_step("all_reduce", "SUM", ONES, out=np.zeros(4)), ValueError),
    ("all_reduce", "out of another dtype", in_step("all_reduce", "SUM", ONES, out=np.zeros(3, "f4")), ValueError),
    ("all_reduce", "out of another structure", in_step("all_reduce", "SUM", ONES, out=[np.zeros(3)]), ValueError),
    ("all_reduce", "out that is no array", in_step("all_reduce", "SUM", ONES, out=[1]), ValueError),
    ("all_reduce", "out that cannot be written", in_step("all_reduce", "SUM", ONES, out=FIXED), ValueError),
    ("all_gather", "a scalar", in_step("all_gather", 1.0, 0), ValueError),
    ("all_gather", "a bad second leaf", in_step("all_gather", [ONES, OBJECTS], 0), ValueError),
    ("all_gather", "a record with an object", in_step("all_gather", np.zeros(1, [("a", object)]), 0), TypeError),
    ("all_gather", "slices", in_step("all_gather", SLICES, 0), NotImplementedError),
    ("reduce_scatter", "a scalar", in_step("reduce_scatter", "SUM", 1.0), ValueError),
    ("reduce_scatter", "no axis", in_step("reduce_scatter", "SUM", ONES, None), ValueError),
    ("reduce_scatter", "an axis too far", in_step("reduce_scatter", "SUM", ONES, 1), ValueError),
    ("reduce_scatter", "an axis that is no int", in_step("reduce_scatter", "SUM", ONES, 0.5), TypeError),
    ("reduce_scatter", "nothing", in_step("reduce_scatter", "SUM", []), ValueError),
    ("reduce_scatter", "bools", in_step("reduce_scatter", "SUM", np.array([True])), TypeError),
    ("reduce_scatter", "slices", in_step("reduce_scatter", "SUM", SLICES), NotImplementedError),
    ("gather", "a scalar", lambda s, v: s.gather(1.0, 0), ValueError),
    ("gather", "no axis", lambda s, v: s.gather(ONES, None), ValueError),
    ("gather", "slices", lambda s, v: s.gather(SLICES, 0), NotImplementedError),
    ("batch_reduce_to", "no pairs", lambda s, v: s.extended.batch_reduce_to("SUM", []), ValueError),
    ("batch_reduce_to", "no sequence", lambda s, v: s.extended.batch_reduce_to("SUM", 3), TypeError),
    ("batch_reduce_to", "a number", lambda s, v: s.extended.batch_reduce_to("SUM", np.array(3)), TypeError),
    ("batch_reduce_to", "no pair", lambda s, v: s.extended.batch_reduce_to("SUM", [ONES]), ValueError),
    ("batch_reduce_to", "a triple", lambda s, v: s.extended.batch_reduce_to("SUM", [(ONES, v, v)]), ValueError),
    ("broadcast_to", "objects", lambda s, v: s.extended.broadcast_to(OBJECTS, v), ValueError),
    ("broadcast_to", "masked", lambda s, v: s.extended.broadcast_to(MASKED, v), ValueError),
    ("broadcast_to", "slices", lambda s, v: s.extended.broadcast_to(SLICES, v), (ValueError, NotImplementedError)),
    ("broadcast", "no such root", lambda s, v: s.broadcast(1.0, SIZE), ValueError),
    ("broadcast", "a root below 0", lambda s, v: s.broadcast(1.0, -1), ValueError),
    ("broadcast", "a root that is no int", lambda s, v: s.broadcast(1.0, 0.5), TypeError),
    ("broadcast", "a root that is a bool", lambda s, v: s.broadcast(1.0, True), TypeError),
    ("broadcast", "an object", lambda s, v: s.broadcast({"a": object()}), ValueError),
    ("broadcast", "slices", lambda s, v: s.broadcast(SLICES), NotImplementedError),
    ("broadcast", "a name that is no text", lambda s, v: s.broadcast(1.0, name=3), TypeError),
    ("scan", "a mean", in_step("scan", "MEAN", 1.0), ValueError),
    ("scan", "bools", in_step("scan", "SUM", np.array([True])), TypeError),
    ("scan", "exclusive that is an int", in_step("scan", "SUM", 1.0, 1), TypeError),
    ("scan", "exclusive that is an array", in_step("scan", "SUM", 1.0, np.ones(2)), TypeError),
    ("scan", "an extreme of complex numbers", in_step("scan", "MAX", 1j), TypeError),
    ("scan", "slices", in_step("scan", "SUM", SLICES), NotImplementedError),
    ("assert_mirrored", "a number", lambda s, v: s.assert_mirrored(1.0), TypeError),
    ("assert_mirrored", "an array", lambda s, v: s.assert_mirrored(np.zeros(3)), TypeError),
    ("assert_mirrored", "text", lambda s, v: s.assert_mirrored(["weights"]), TypeError),
    ("assert_mirrored", "nothing", lambda s, v: s.assert_mirrored([]), ValueError),
    ("assert_mirrored", "an optimizer before its first step",
     lambda s, v: s.assert_mirrored(ms.optimizers.SGD(0.1)), ValueError),
    ("assert_mirrored", "another strategy's", lambda s, v: s.assert_mirrored(_of_nobody()), ValueError),
    *[
        ("Variable", f"{given!r:.40} {named}",
         lambda s, v, g=given, n=named: in_scope(s, lambda: ms.Variable(g, **n)), kind)
        for given, named, kind in [
            (2.7, {"dtype": np.int32}, TypeError),
            (1j, {"dtype": np.float32}, TypeError),
            (300, {"dtype": np.int8}, TypeError),
            (1.0, {"dtype": "nonsense"}, TypeError),
            ("text", {}, TypeError),
            (None, {}, ValueError),
            (object, {}, ValueError),
            (OBJECTS, {}, ValueError),
            ([[1], [1, 2]], {}, ValueError),
            (1.0, {"synchronization": "SOMETIMES"}, ValueError),
            (1.0, {"synchronization": None}, ValueError),
            (1.0, {"aggregation": "MEDIAN"}, ValueError),
            (1.0, {"aggregation": ms.ReduceOp.SUM}, ValueError),
            (1, {"aggregation": "MEAN"}, ValueError),
            (True, {"aggregation": "MEAN"}, ValueError),
        ]
    ],
]  # fmt: skip


@pytest.mark.parametrize("who", ["all ranks", "the last rank"])
@pytest.mark.parametrize(("good", "what", "bad", "kind"), REDUCTIONS, ids=[f"{row[0]}: {row[1]}" for row in REDUCTIONS])
def test_collective_calls(
    strategy: ms.Strategy, variable: ms.Variable, good: str, what: str, bad: Call, kind: Any, who: str
) -> None:
    call = bad if who == "all ranks" or RANK == SIZE - 1 else GOOD[good]

    def over() -> Any:
        made = call(strategy, variable)
        return made.wait() if isinstance(made, AllReduceHandle) else made  # between nodes it is begun, and fails later

    ends = outcomes(over)
    for rank, end in enumerate(ends):
        assert end.error is not None, f"rank {rank} raised nothing: {end.text}"
        if kind is ZeroDivisionError:  # the user's own exception where it was raised; its text everywhere
            assert end.error in (Exception, errors.RemoteError, errors.LeafError)
            assert "from the user's class" in end.text
            continue
        assert issubclass(end.error, errors.MpiStrategyError), f"rank {rank}: {end.text}"
        assert issubclass(end.error, kind), f"rank {rank}: {end.text}"
        assert "expected" in end.text, end.text
        if rank < SIZE - 1 and who == "the last rank":
            assert f"rank {SIZE - 1}" in end.text
            assert "test_bad_input.py:" in end.text


#: Types of the arguments of constructors, and of attributes, are tried in tests/whole/test_wrong_arguments.py.
LOCAL: list[tuple[str, Call, Any]] = [
    ("run: no function", lambda s, v: s.run(None), TypeError),
    ("run: args no tuple", lambda s, v: s.run(abs, args=3), TypeError),
    ("run: a string for args", lambda s, v: s.run(abs, args="ab"), TypeError),
    ("run: kwargs no dict", lambda s, v: s.run(abs, kwargs=3), TypeError),
    ("merge_call: no function", in_step("merge_call", None), TypeError),
    ("merge_call: args no tuple", in_step("merge_call", lambda s: 1, args=3), TypeError),
    ("merge_call: kwargs no dict", in_step("merge_call", lambda s: 1, kwargs=[1]), TypeError),
    ("update: no variable", lambda s, v: s.extended.update(ONES, lambda v: v), TypeError),
    ("update: no function", lambda s, v: s.extended.update(v, None), TypeError),
    ("update: args no tuple", lambda s, v: s.extended.update(v, lambda v: v, args=3), TypeError),
    ("update: a variable of nobody", lambda s, v: s.extended.update(_of_nobody(), lambda v: v), TypeError),
    ("update_non_slot: None", lambda s, v: s.extended.update_non_slot(s.extended.worker_devices, None), TypeError),
    ("update_non_slot: no device", lambda s, v: s.extended.update_non_slot("GPU:0", lambda: 1), ValueError),
    ("distribute values: no function", lambda s, v: s.experimental_distribute_values_from_function(3), TypeError),
    ("colocate_vars_with: no var",
     lambda s, v: in_scope(s, lambda: s.extended.colocate_vars_with(ONES).__enter__()), ValueError),
    ("ReplicaContext: no strategy", lambda s, v: ms.ReplicaContext("strategy", 0), TypeError),
    ("ReductionToOneDevice: nonsense", lambda s, v: ms.ReductionToOneDevice("nonsense"), ValueError),
    ("HierarchicalCopyAllReduce: -1", lambda s, v: ms.HierarchicalCopyAllReduce(-1), ValueError),
    ("MpiAllReduce outside every strategy", lambda s, v: ms.MpiAllReduce().reduce("SUM", ONES, "CPU:0"), RuntimeError),
    ("ReplicaContext: a text for a number", lambda s, v: ms.ReplicaContext(s, "0"), ValueError),
    ("ReplicaContext: no number", lambda s, v: ms.ReplicaContext(s, None).replica_id_in_sync_group, ValueError),
    *[
        (f"{name}: {wrong!r:.20}", lambda s, v, made=made, wrong=wrong: made(wrong), TypeError)
        for wrong in (None, "extended")
        for name, made in {
            "Strategy": ms.Strategy,
            "StrategyExtended": ms.StrategyExtended,
            "ReplicaContext": lambda wrong: ms.ReplicaContext(wrong, 0),
        }.items()
    ],
    *[
        (f"set_strategy: {wrong!r:.20}", lambda s, v, wrong=wrong: ms.experimental_set_strategy(wrong), TypeError)
        for wrong in ("strategy", ms.MirroredStrategy)
    ],
    *[
        (f"read_var: {wrong!r}", lambda s, v, wrong=wrong: s.extended.read_var(wrong), TypeError)
        for wrong in (3.0, ONES)
    ],
    *[
        (f"experimental_run: {name}", lambda s, v, wrong=wrong: s.experimental_run(len, wrong), TypeError)
        for name, wrong in {"a list": [1, 2], "another iterator": iter([1])}.items()
    ],
    *[
        (f"rng: {bad!r}", make(bad), kind)
        for bad, kind in [(-1, ValueError), ("7", TypeError)]
        for make in (lambda bad: lambda s, v: s.rng(bad), lambda bad: lambda s, v: s.rng(0).at(1, bad))
    ],
    *[
        (f"CommunicationOptions: {options}", lambda s, v, options=options: CommunicationOptions(**options), kind)
        for options, kind in [
            ({"bytes_per_pack": -1}, ValueError),
            ({"wire": "float8"}, ValueError),
        ]
    ],
    *[
        (f"InputContext: {numbers}", lambda s, v, numbers=numbers: ms.InputContext(*numbers), kind)
        for numbers, kind in [((0, 0, 1), ValueError), ((2, 2, 2), ValueError), ((1, -1, 1), ValueError),
                              ((1, 0, 0), ValueError)]
    ],
    *[
        (f"from_arrays: {wrong}", lambda s, v, wrong=wrong: ms.Dataset.from_arrays(**{**ROWS, **wrong}), kind)
        for wrong, kind in [
            ({"arrays": 3}, ValueError),
            ({"arrays": []}, ValueError),
            ({"arrays": [1, 2]}, ValueError),
            ({"arrays": None}, ValueError),
            ({"arrays": (np.zeros(2), np.zeros(3))}, ValueError),
            ({"global_batch_size": 0}, ValueError),
            ({"global_batch_size": -4}, ValueError),
            ({"global_batch_size": True}, TypeError),
            ({"shuffle_seed": -1}, ValueError),
            ({"epochs": -1}, ValueError),
        ]
    ],
    ("epoch: -1", lambda s, v: ms.Dataset.from_arrays(**ROWS).epoch(-1), ValueError),
]  # fmt: skip


def _of_nobody() -> ms.Variable:
    return new_variable(ms.OneDeviceStrategy("CPU:0"), 1.0)


@pytest.mark.parametrize(("what", "bad", "kind"), LOCAL, ids=[row[0] for row in LOCAL])
def test_local_calls(strategy: ms.Strategy, variable: ms.Variable, what: str, bad: Call, kind: Any) -> None:
    with pytest.raises(kind) as refusal:
        bad(strategy, variable)
    assert isinstance(refusal.value, errors.MpiStrategyError), repr(refusal.value)
    text = str(refusal.value)
    assert "found" in text
    assert "expected" in text
    assert not ms.has_strategy()


MAKERS: list[tuple[str, Callable[[], Any], Any]] = [
    ("too few devices on the node", lambda: ms.MirroredStrategy(["CPU:0"] if SIZE > 1 else ["GPU:0"]), ValueError),
    ("no such device", lambda: ms.MirroredStrategy([f"GPU:{i}" for i in range(SIZE)]), ValueError),
    ("a device twice", lambda: ms.MirroredStrategy(["CPU:0"] * max(2, SIZE)), ValueError),
    ("one device of nonsense", lambda: ms.MirroredStrategy([*(f"CPU:{i}" for i in range(SIZE - 1)), "x"]), ValueError),
    ("devices no list", lambda: ms.MirroredStrategy("CPU:0"), TypeError),
    ("communicator a number", lambda: ms.MirroredStrategy(communicator=3), TypeError),
    ("communicator without this rank", lambda: ms.MirroredStrategy(communicator=MPI.COMM_NULL), TypeError),
    ("no such processor", lambda: ms.MirroredStrategy([f"CPU:{9999 + i}" for i in range(SIZE)]), ValueError),
]


@pytest.mark.parametrize(("what", "make", "kind"), MAKERS, ids=[row[0] for row in MAKERS])
def test_a_strategy_that_cannot_be_made(strategy: ms.Strategy, what: str, make: Any, kind: Any) -> None:
    if "on the node" in what and strategy.extended.communicator.nodes > 1:
        pytest.skip("it is right for a node of one rank")
    all_refuse(kind, make, words=["found"])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: ms.MirroredStrategy(cross_device_ops=ms.MpiAllReduce() if RANK else ms.ReductionToOneDevice()),
        lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice(f"task:{RANK % 2}")),
        lambda: ms.MirroredStrategy(cross_device_ops=ms.HierarchicalCopyAllReduce(1 + RANK % 2)),
        lambda: ms.MirroredStrategy(communication_options=CommunicationOptions(bytes_per_pack=8 + RANK % 2)),
        lambda: ms.MirroredStrategy("CPU:0" if RANK else None),
    ],
    ids=["class", "device", "num_packs", "options", "bad devices on some"],
)
def test_a_strategy_that_is_made_differently(strategy: ms.Strategy, make: Callable[[], ms.Strategy]) -> None:
    """At the latest the first reduction is refused, on every rank."""

    def make_and_use() -> Any:
        made = make()
        return made.reduce("SUM", [np.ones(3), np.ones(4)])

    all_refuse(errors.MpiStrategyError, make_and_use)
