"""`Strategy.explain` says what happens, and runs with the same `Strategy.layout` give the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from replicas import RANK, RANKS, SIZE, OnNodes, context, gather_texts, outcomes, same_everywhere

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds, trying
from mpistrategy.testing import run_replicas

several = pytest.mark.mpi(min_size=2)
PATHS = Thresholds(2**15, 2**13, 2**18, 2**16, source="this test")
LARGE = np.zeros(2**20, np.float32)
SMALL = np.zeros(2**10, np.float32)


@pytest.fixture(scope="module")
def one_node() -> Iterator[ms.Strategy]:
    with trying(PATHS):
        made = OnNodes([0] * SIZE, ms.MpiAllReduce())
    yield made
    made.close()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[ms.Strategy]:
    with trying(PATHS):
        made = OnNodes([r % 2 for r in RANKS], ms.MpiAllReduce())
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------- one node


@several
def test_a_number_goes_in_the_mailboxes(one_node: ms.Strategy) -> None:
    text = one_node.explain(1.0)
    assert f"SUM of 1 array, 8 B, on {SIZE} ranks of 1 node by MpiAllReduce" in text
    assert (
        "1 array in 1 buffer, float64, 8 B: in the ranks' mailboxes, with the check of the call\n    copies: all"
        in text
    )
    assert text.endswith("thresholds: this test")


@several
def test_small_arrays_are_packed_and_large_ones_are_not(one_node: ms.Strategy) -> None:
    lines = one_node.explain([SMALL] * 9 + [LARGE, LARGE], "mean").splitlines()
    assert lines[0].startswith("all_reduce MEAN of 11 arrays, 8.04 MiB, ")
    pack, large = lines.index(_line(lines, "9 arrays in 1 buffer")), lines.index(_line(lines, "2 arrays in 2 buffers"))
    where = "through memory of the node, a share by each rank"
    assert f"float32, 36 KiB: {where}" in lines[pack]
    assert f"float32, 8 MiB: {where}; the results stay there" in lines[large]
    assert "all into the pack, " in lines[pack + 1]
    assert lines[pack + 1].endswith("the others' shares into it, the result out of it")
    assert lines[large + 1].strip() == "copies: the others' shares into it"


@several
def test_what_must_be_converted(one_node: ms.Strategy) -> None:
    text = one_node.explain({"half": np.zeros(2**16, np.float16), "turned": np.zeros((300, 200)).T})
    assert "float32, 256 KiB: through memory of the node" in text
    assert "all into float32 and the results back, " in text
    assert "all in order, " in text


@several
@pytest.mark.parametrize("shared_result", [False, True])
def test_an_arena_is_reduced_where_it_is(one_node: ms.Strategy, shared_result: bool) -> None:
    arena = one_node.arena([SMALL, LARGE, 1], shared_result=shared_result)
    lines = one_node.explain(arena).splitlines()
    bucket = lines.index(_line(lines, "2 arrays in 1 buffer, float32"))
    target = "the node's one result" if shared_result else "every one"
    assert lines[bucket].endswith(f": where the arrays are, each rank 1/{SIZE} of them, into {target}")
    assert lines[bucket + 1].strip() == "copies: none"
    assert _line(lines, "1 array in 1 buffer, int64, 8 B: ")
    assert "through memory of the node" in one_node.explain(arena.values)  # they are ordinary arrays without the arena
    arena.close()
    with pytest.raises(ms.errors.ContextError, match="close"):
        one_node.explain(arena)


@several
def test_without_shared_memory_mpi_does_it() -> None:
    with trying(replace(PATHS, window_bytes=2**30)), ms.MirroredStrategy() as strategy:
        text = strategy.explain(LARGE)
    assert "by MPI's Allreduce\n    copies: none\n" in text


@several
def test_slices_and_mirrored_values(one_node: ms.Strategy) -> None:
    slices = ms.IndexedSlices(np.zeros((4, 2)), np.arange(4))
    text = one_node.explain([slices, LARGE, ms.Mirrored((1.0,))], "MEAN")
    assert "1 IndexedSlices: gathered on all ranks" in text
    assert "1 Mirrored: the same everywhere, nothing is sent" in text
    assert "1 array in 1 buffer, float32, 4 MiB" in text


def _line(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.strip().startswith(start))


# ------------------------------------------------------------------------------------------------- several nodes


@several
def test_between_nodes(two_nodes: ms.Strategy) -> None:
    text = two_nodes.explain(LARGE)
    assert f"on {SIZE} ranks of 2 nodes" in text
    if SIZE < 4:  # one rank a node on average
        assert ": by MPI's Allreduce\n" in text
    else:
        assert "within each node, by MPI's Allreduce between the nodes, and back" in text
    rounded = two_nodes.explain(LARGE, options=ms.CommunicationOptions(wire="bfloat16"))
    assert "as bfloat16" in rounded
    assert "in the first message of the call, with its check" in two_nodes.explain(1)
    assert ": by MPI's Allreduce\n" in two_nodes.explain(np.zeros(1000))


@several
@pytest.mark.parametrize(
    ("algorithm", "way"),
    [
        (ms.HierarchicalCopyAllReduce(), "between the nodes, and back"),
        (ms.ReductionToOneDevice(), "by MPI's Reduce to one rank, and from there by Bcast\n    copies: all "),
    ],
)
def test_other_algorithms(algorithm: ms.CrossDeviceOps, way: str) -> None:
    with OnNodes([r % 2 for r in RANKS], algorithm) as strategy:
        text = strategy.explain(SMALL)
        assert way in text
        assert type(algorithm).__name__ in text
        assert strategy.layout()["algorithm"].startswith(type(algorithm).__name__)


class Own(ms.CrossDeviceOps):
    """An algorithm of which nothing is known."""


def test_an_algorithm_of_ones_own() -> None:
    with ms.MirroredStrategy(cross_device_ops=Own()) as strategy:
        assert "Own reduces them: its routes are not known" in strategy.explain([SMALL, 1])
        assert "about" not in strategy.explain(1).splitlines()[0]
        assert strategy.layout()["algorithm"] == "Own"


class Telling(Own):
    """An algorithm that says what it does."""

    def explain_implementation(self, reduce_op: ms.ReduceOp, count: int) -> str:
        return f"{count} of them, {reduce_op.value} by hand"


def test_an_algorithm_says_its_own_words() -> None:
    with ms.MirroredStrategy(cross_device_ops=Telling()) as strategy:
        assert "\n  2 of them, MAX by hand\n" in strategy.explain([SMALL, 1], "MAX")


# ------------------------------------------------------------------------------------------------- any ranks


def test_alone_nothing_is_sent() -> None:
    text = ms.OneDeviceStrategy("CPU:0").explain([LARGE, np.zeros(0)])
    assert "on 1 rank of 1 node" in text
    assert "stays here, the only replica\n    copies: all into the result\n" in text
    assert ms.OneDeviceStrategy("CPU:0").layout()["ranks"] == 1


def test_replica_0_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with ms.MirroredStrategy() as strategy:
        capsys.readouterr()
        text = strategy.explain(SMALL)
        assert capsys.readouterr().out == (f"{text}\n" if RANK == 0 else "")


def test_one_rank_alone_may_ask_in_any_context() -> None:
    with ms.MirroredStrategy() as strategy:
        with strategy.scope():
            variable = ms.Variable(SMALL, synchronization="ON_READ", aggregation="SUM")
            outside = strategy.explain(variable) if RANK == SIZE - 1 else ""
        inside = strategy.run(lambda: strategy.explain(variable) if RANK == SIZE - 1 else "")
        assert inside == outside
        assert strategy.run(lambda: context().all_reduce("SUM", 1)) == SIZE


def test_simulated_replicas() -> None:
    texts = run_replicas(lambda: ms.MirroredStrategy().explain(SMALL), 2)
    assert "on 2 ranks of 1 node" in texts[0]
    assert "between the threads of this process" in texts[0]


@pytest.mark.parametrize(
    ("value", "op"),
    [
        (SMALL, "AVERAGE"),
        ({"a": [1, "text"]}, "SUM"),
        ([np.zeros(2, bool)], "SUM"),
        (np.zeros(2, complex), "MAX"),
        (ms.IndexedSlices(np.ones((1, 1)), np.zeros(1, int)), "MIN"),
        (ms.Mirrored((1,)), "SUM"),
        (None, "AVERAGE"),
        ([], "SUM"),
    ],
)
def test_bad_input_is_that_of_all_reduce(value: Any, op: str) -> None:
    with ms.MirroredStrategy() as strategy:
        for told, raised in zip(
            outcomes(strategy.explain, value, op),
            outcomes(lambda: strategy.run(lambda: context().all_reduce(op, value))),
            strict=True,
        ):
            assert told.error is raised.error is not None
            found = told.text.partition("found ")[2] or told.text
            assert found.partition(";")[0].partition(", expected")[0] in raised.text


@pytest.mark.parametrize(("value", "absent"), [(None, 1), ({"a": None, "b": [None]}, 2)])
def test_what_has_no_leaves_but_none_is_taken(value: Any, absent: int) -> None:
    with ms.MirroredStrategy() as strategy:
        assert strategy.run(lambda: context().all_reduce("SUM", value)) == value
        lines = strategy.explain(value).splitlines()
    assert lines[0].startswith("all_reduce SUM of 0 arrays, 0 B, on ")
    assert lines[1:-1] == [f"  {absent} None: left as None, nothing is sent"]


def test_leaves_that_are_none_are_told_beside_others() -> None:
    with ms.MirroredStrategy() as strategy:
        lines, alone = (strategy.explain(value).splitlines() for value in ([SMALL, None], [SMALL]))
    assert lines == [*alone[:-1], "  1 None: left as None, nothing is sent", alone[-1]]


# ------------------------------------------------------------------------------------------------- equal bits

TABLES: dict[str, Thresholds] = {
    "the defaults": DEFAULT,
    "all in the window": replace(DEFAULT, cell_bytes=64, window_bytes=64, chunk_bytes=4096),
    "all by MPI": replace(DEFAULT, cell_bytes=64, window_bytes=2**40),
    "nothing is packed": replace(DEFAULT, cell_bytes=64, pack_bytes=64),
}
PLACES: dict[str, list[int]] = {"one node": [0] * SIZE, "two nodes": [r % 2 for r in RANKS], "a node each": [*RANKS]}


@contextmanager
def strategy_of(paths: Thresholds, places: list[int]) -> Iterator[ms.Strategy]:
    with trying(paths):
        made = OnNodes(places, ms.MpiAllReduce())
    with made:
        yield made


def gradients() -> list[Array]:
    """Return arrays whose sums depend on the order: in a mailbox, in packs, large, and between."""
    random = np.random.default_rng(RANK)
    scales = 10.0 ** random.integers(-3, 4, 6)
    sizes = (1, 3, 1000, 20_011, 70_001, 300_007)
    return [
        (scale * random.standard_normal(size)).astype(np.float32) for scale, size in zip(scales, sizes, strict=True)
    ]


def sums(strategy: ms.Strategy) -> list[Array]:
    """Return the sums of the gradients, each alone, together, and in an arena."""
    mine = gradients()
    arena = strategy.arena(mine)
    for view, array in zip(arena.values, mine, strict=True):
        view[...] = array

    def step() -> list[Any]:
        return [*(context().all_reduce("SUM", each) for each in mine), *context().all_reduce("SUM", mine)]

    results = [*strategy.run(step), *strategy.reduce("SUM", arena)]
    return [np.array(each) for each in results]


@several
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("table", TABLES)
def test_equal_layouts_give_equal_bits(table: str, places: str) -> None:
    runs, layouts = [], []
    for number in range(2):
        with strategy_of(replace(TABLES[table], source=f"run {number}"), PLACES[places]) as strategy:
            runs.append([each.tobytes() for each in sums(strategy)])
            layouts.append(strategy.layout())
            assert same_everywhere([np.frombuffer(each, np.uint8) for each in runs[-1]])
    assert runs[0] == runs[1]
    assert layouts[0].pop("source") == "run 0"
    assert layouts[1].pop("source") == "run 1"
    assert layouts[0] == layouts[1]


@several
def test_a_layout_is_for_json_and_the_same_everywhere() -> None:
    with strategy_of(TABLES["all by MPI"], [min(r, 1) for r in RANKS]) as strategy:
        layout = strategy.layout()
    assert json.loads(json.dumps(layout)) == layout
    assert len(set(gather_texts(json.dumps(layout)))) == 1
    assert layout["ranks"] == SIZE
    assert layout["node_of"] == [min(r, 1) for r in RANKS]
    assert layout["thresholds"]["window_bytes"] == 2**40
    assert any(name in MPI.Get_library_version() for name in layout["mpi"].split())


@several
@pytest.mark.parametrize("places", PLACES)
def test_the_order_of_buckets_is_fixed(places: str) -> None:
    orders = []
    for _ in range(2):
        with strategy_of(DEFAULT, PLACES[places]) as strategy:
            with strategy.scope():
                variables = [ms.Variable(np.zeros(size, np.float32)) for size in (70_001, 3, 1100, 20_011)]
                optimizer = ms.optimizers.SGD()
            buckets = optimizer.gradient_buckets(variables, bytes_per_bucket=4096)
            orders.append([bucket.members for bucket in buckets._buckets])
    assert orders[0] == orders[1] == [(3,), (2,), (1, 0)]
    assert len(set(gather_texts(str(orders)))) == 1
