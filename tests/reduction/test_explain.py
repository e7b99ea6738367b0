"""`Strategy.explain` says what happens, and runs with the same `Strategy.layout` give the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from replicas import RANK, RANKS, SIZE, OnNodes, context, gather_texts, outcomes, rows, same_everywhere, several

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds, trying
from mpistrategy.testing import run_replicas

PATHS = Thresholds(2**15, 2**13, 2**18, 2**16, source="this test")
PLACES: dict[str, list[int]] = {"one node": [0] * SIZE, "two nodes": [r % 2 for r in RANKS], "a node each": [*RANKS]}
LARGE = np.zeros(2**20, np.float32)
SMALL = np.zeros(2**10, np.float32)


class Own(ms.CrossDeviceOps):
    """An algorithm of which nothing is known."""


class Telling(Own):
    """An algorithm that says what it does."""

    def explain_implementation(self, reduce_op: ms.ReduceOp, count: int) -> str:
        return f"{count} of them, {reduce_op.value} by hand"


@contextmanager
def strategy_of(
    place: str, paths: Thresholds = PATHS, algorithm: Callable[[], ms.CrossDeviceOps] = ms.MpiAllReduce
) -> Iterator[ms.Strategy]:
    with trying(paths):
        made = OnNodes(PLACES[place], algorithm())
    with made:
        yield made


SHARES = "through memory of the node, a share by each rank"
SLICES = ms.IndexedSlices(np.zeros((4, 2)), np.arange(4))
HALVES = {"half": np.zeros(2**16, np.float16), "turned": np.zeros((300, 200)).T}
BETWEEN = (
    ": by MPI's Allreduce\n"  # one rank a node on average
    if SIZE < 4
    else "within each node, by MPI's Allreduce between the nodes, and back"
)
#: A place, an algorithm, what is asked, and texts that are found in the answer.
ANSWERS: dict[str, tuple[str, Any, Callable[[ms.Strategy], str], list[str]]] = {
    "a number": (
        "one node", ms.MpiAllReduce, lambda s: s.explain(1.0),
        [f"all_reduce SUM of 1 array, 8 B, on {SIZE} ranks of 1 node by MpiAllReduce\n",
         "1 array in 1 buffer, float64, 8 B: in the ranks' mailboxes, with the check of the call\n    copies: all",
         "\n  thresholds: this test"],
    ),
    "small ones are packed": (
        "one node", ms.MpiAllReduce, lambda s: s.explain([SMALL] * 9 + [LARGE, LARGE], "mean"),
        ["all_reduce MEAN of 11 arrays, 8.04 MiB, ",
         f"9 arrays in 1 buffer, float32, 36 KiB: {SHARES}\n    copies: all",
         " into the pack, the others' shares into it, the result out of it\n",
         f"2 arrays in 2 buffers, float32, 8 MiB: {SHARES}; the results stay there\n"
         "    copies: the others' shares into it\n"],
    ),
    "what must be converted": (
        "one node", ms.MpiAllReduce, lambda s: s.explain(HALVES),
        ["float32, 256 KiB: through memory of the node", "all into float32 and the results back, ", "all in order, "],
    ),
    "slices and mirrored values": (
        "one node", ms.MpiAllReduce, lambda s: s.explain([SLICES, LARGE, ms.Mirrored((1.0,)), None], "MEAN"),
        ["1 IndexedSlices: gathered on all ranks", "1 Mirrored: the same everywhere, nothing is sent",
         "1 array in 1 buffer, float32, 4 MiB", "\n  1 None: left as None, nothing is sent\n"],
    ),
    "only None": (
        "one node", ms.MpiAllReduce, lambda s: s.explain({"a": None, "b": [None]}),
        ["all_reduce SUM of 0 arrays, 0 B, on ", "\n  2 None: left as None, nothing is sent\n"],
    ),
    "between nodes": (
        "two nodes", ms.MpiAllReduce, lambda s: s.explain(LARGE), [f"on {SIZE} ranks of 2 nodes", BETWEEN],
    ),
    "another dtype between them": (
        "two nodes", ms.MpiAllReduce,
        lambda s: s.explain(LARGE, options=ms.CommunicationOptions(wire="bfloat16")), ["as bfloat16"],
    ),
    "hierarchical": (
        "two nodes", ms.HierarchicalCopyAllReduce, lambda s: s.explain(SMALL),
        ["between the nodes, and back", "by HierarchicalCopyAllReduce"],
    ),
    "to one device": (
        "two nodes", ms.ReductionToOneDevice, lambda s: s.explain(SMALL),
        ["by MPI's Reduce to one rank, and from there by Bcast\n    copies: all ", "by ReductionToOneDevice"],
    ),
    "so many bytes a pack": (
        "one node", ms.ReductionToOneDevice,
        lambda s: s.explain([np.zeros(1, np.float32), np.zeros(1)] * 10, options=ms.CommunicationOptions(8)),
        ["10 arrays in 5 buffers, float32, 40 B: ", "10 arrays in 10 buffers, float64, 80 B: "],
    ),
    "one dtype a pack": (
        "one node", ms.ReductionToOneDevice, lambda s: s.explain([np.zeros(1, np.float32), np.zeros(1)] * 10),
        ["10 arrays in 1 buffer, float32, 40 B: ", "10 arrays in 1 buffer, float64, 80 B: "],
    ),
    "an algorithm of one's own": (
        "one node", Own, lambda s: s.explain([SMALL, 1]), ["Own reduces them: its routes are not known"],
    ),
    "one that says its own words": (
        "one node", Telling, lambda s: s.explain([SMALL, 1], "MAX"), ["\n  2 of them, MAX by hand\n"],
    ),
}  # fmt: skip


@several
@pytest.mark.parametrize("what", ANSWERS)
def test_what_it_says(what: str) -> None:
    place, algorithm, ask, texts = ANSWERS[what]
    with strategy_of(place, algorithm=algorithm) as strategy:
        answer = ask(strategy)
        assert strategy.layout()["algorithm"].startswith(algorithm.__name__)
    for text in texts:
        assert text in answer, answer


@several
@pytest.mark.parametrize("shared_result", [False, True])
def test_an_arena_is_reduced_where_it_is(shared_result: bool) -> None:
    with strategy_of("one node") as strategy:
        arena = strategy.arena([SMALL, LARGE, 1], shared_result=shared_result)
        text, ordinary = strategy.explain(arena), strategy.explain(arena.values)
        arena.close()
        with pytest.raises(ms.errors.ContextError, match="close"):
            strategy.explain(arena)
    target = "the node's one result" if shared_result else "every one"
    way = f": where the arrays are, each rank 1/{SIZE} of them, into {target}\n    copies: none\n"
    assert "2 arrays in 1 buffer, float32" in text
    assert f"1 array in 1 buffer, int64, 8 B{way}" in text
    assert text.count(way) == 2
    assert "through memory of the node" in ordinary


def test_alone_and_simulated() -> None:
    alone = ms.OneDeviceStrategy("CPU:0")
    text = alone.explain([LARGE, np.zeros(0)])
    assert "on 1 rank of 1 node" in text
    assert "stays here, the only replica\n    copies: all into the result\n" in text
    assert alone.layout()["ranks"] == 1
    texts = run_replicas(lambda: ms.MirroredStrategy().explain(SMALL), 2)
    assert "on 2 ranks of 1 node" in texts[0]
    assert "between the threads of this process" in texts[0]


def test_replica_0_prints_it_and_one_rank_alone_may_ask(
    strategy: ms.Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    text = strategy.explain(SMALL)
    assert capsys.readouterr().out == (f"{text}\n" if RANK == 0 else "")
    with strategy.scope():
        variable = ms.Variable(SMALL, synchronization="ON_READ", aggregation="SUM")
        outside = strategy.explain(variable) if RANK == SIZE - 1 else ""
    assert strategy.run(lambda: strategy.explain(variable) if RANK == SIZE - 1 else "") == outside
    assert strategy.run(lambda: context().all_reduce("SUM", 1)) == SIZE


BAD: list[tuple[Any, str]] = [
    (SMALL, "AVERAGE"),
    ({"a": [1, "text"]}, "SUM"),
    ([np.zeros(2, bool)], "SUM"),
    (np.zeros(2, complex), "MAX"),
    (ms.IndexedSlices(np.ones((1, 1)), np.zeros(1, int)), "MIN"),
    (ms.Mirrored((1,)), "SUM"),
    (None, "AVERAGE"),
    ([], "SUM"),
]


@pytest.mark.parametrize(("value", "op"), BAD)
def test_bad_input_is_that_of_all_reduce(value: Any, op: str) -> None:
    with ms.MirroredStrategy() as strategy:
        ends = outcomes(lambda: strategy.run(lambda: context().all_reduce(op, value)))
        for told, raised in zip(outcomes(strategy.explain, value, op), ends, strict=True):
            assert told.error is raised.error is not None
            found = told.text.partition("found ")[2] or told.text
            assert found.partition(";")[0].partition(", expected")[0] in raised.text


# ------------------------------------------------------------------------------------------------- equal bits

TABLES: dict[str, Thresholds] = {
    "the defaults": DEFAULT,
    "all in the window": replace(DEFAULT, cell_bytes=64, window_bytes=64, chunk_bytes=4096),
    "all by MPI": replace(DEFAULT, cell_bytes=64, window_bytes=2**40),
    "nothing is packed": replace(DEFAULT, cell_bytes=64, pack_bytes=64),
}


def sums(strategy: ms.Strategy) -> list[Array]:
    """Return sums that depend on the order: small, in packs, large, and between; alone, together, in an arena."""
    random = np.random.default_rng(RANK)
    sizes = (1, 3, 1000, 20_011, 70_001, 300_007)
    mine = [(10.0**scale * random.standard_normal(n)).astype(np.float32) for scale, n in enumerate(sizes, -3)]
    arena = strategy.arena(mine)
    for view, array in zip(arena.values, mine, strict=True):
        view[...] = array

    def step() -> list[Any]:
        return [*(context().all_reduce("SUM", each) for each in mine), *context().all_reduce("SUM", mine)]

    return [np.array(each) for each in (*strategy.run(step), *strategy.reduce("SUM", arena))]


@several
@pytest.mark.parametrize(("table", "place"), rows(1, TABLES, PLACES))
def test_equal_layouts_give_equal_bits(table: str, place: str) -> None:
    runs, layouts = [], []
    for number in range(2):
        with strategy_of(place, replace(TABLES[table], source=f"run {number}")) as strategy:
            results = sums(strategy)
            layouts.append(strategy.layout())
            runs.append([each.tobytes() for each in results])
        assert same_everywhere(results)
        assert layouts[number].pop("source") == f"run {number}"
    assert runs[0] == runs[1]
    layout = layouts[0]
    assert layout == layouts[1] == json.loads(json.dumps(layout))
    assert len(set(gather_texts(json.dumps(layout)))) == 1
    assert (layout["ranks"], layout["node_of"]) == (SIZE, PLACES[place])
    assert layout["thresholds"]["window_bytes"] == TABLES[table].window_bytes
    assert any(name in MPI.Get_library_version() for name in layout["mpi"].split())
