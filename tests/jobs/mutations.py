"""Small programs of collectives, made wrong on one rank: how they are written, run, and judged.

A program is a list of calls; each has a kind, an operation, a dtype, a shape, a destination, and a line of its own in
a made-up source file, so that a report can be held against the lines.  What a call brings depends on the rank and on
the call alone: where two equal calls of one line are paired, which nobody can see, the sums are right all the same.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import declared
import launching
import numpy as np
from replicas import RANK, RANKS, SIZE, context, gather_texts

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import local_component
from mpistrategy.errors import MpiStrategyError
from mpistrategy.input.distributed import part_of_batch
from mpistrategy.mpi.over_mpi.background import Background

FILE = "made_up_program.py"
DTYPES = ("float64", "float32", "int64", "int32", "uint32")
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (6,), (2, 3), (0,), (50_000,), (100_000,))
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
UNTOUCHED = 77

Layout = tuple[str, tuple[int, ...]]
_ALL_LAYOUTS: tuple[Layout, ...] = tuple((dtype, shape) for dtype in DTYPES for shape in SHAPES)
_WITH_AXES = tuple((dtype, shape) for dtype, shape in _ALL_LAYOUTS if shape)
_ARENAS: tuple[Layout, ...] = (
    ("float64", (3,)),
    ("float32", (3,)),
    ("float64", (50_000,)),
    ("float64", (100_000,)),
)
_VECTOR, _ROWS = ("float64", (3,)), ("float64", (2, 3))


class Kind(NamedTuple):
    """A collective of the library.

    Attributes:
        source: the call.
        public: its names in reports.
        ops: the operations it knows; empty where it has none.
        layouts: what may be brought; empty where nothing is.
        goes_to: whether it has a destination.
        refused: a rank that brings another layout may be refused by itself, and its peers hear of it.
    """

    source: str
    public: tuple[str, ...]
    ops: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    goes_to: bool = False
    refused: bool = False


def _in_step(call: str) -> str:
    return f"strategy.run(lambda: {call})"


def _declared(method: str) -> Kind:
    """Return a declared collective of the replica context, with the operations and the layouts that it takes."""
    source = _in_step(f"context().{method}({declared.in_words(method, reduce_op='op', value='value')})")
    one = np.ones(1)
    ops = tuple(op for op in OPS if declared.takes(method, reduce_op=op, value=one))
    layouts = _ALL_LAYOUTS if declared.takes(method, value=np.float64(1)) else _WITH_AXES
    has_op = "reduce_op" in declared.parameters(method)
    return Kind(source, (f"ReplicaContext.{method}",), ops if has_op else (), layouts)


KINDS = {
    "all_reduce": Kind(
        _in_step("context().all_reduce(op, value, out=out)"), ("ReplicaContext.all_reduce",), OPS, _ALL_LAYOUTS
    ),
    "all_reduce of a nest": Kind(
        _in_step('context().all_reduce(op, {"a": value, "b": [1.0]})["a"]'),
        ("ReplicaContext.all_reduce",),
        OPS,
        _ALL_LAYOUTS,
    ),
    "all_reduce_async": Kind(
        _in_step("context().all_reduce_async(op, value, out=out).wait()"),
        ("ReplicaContext.all_reduce", "AllReduceHandle.wait"),
        OPS,
        _ALL_LAYOUTS,
    ),
    "all_reduce of an arena": Kind(
        _in_step("context().all_reduce(op, arena)[0]"), ("ReplicaContext.all_reduce",), OPS, _ARENAS
    ),
    **{method: _declared(method) for method in declared.IN_STEPS if not method.startswith("all_reduce")},
    "reduce": Kind("strategy.reduce(op, value)", ("Strategy.reduce",), OPS, _ALL_LAYOUTS),
    "gather": Kind("strategy.gather(value, 0)", ("Strategy.gather",), layouts=_WITH_AXES),
    "reduce_to": Kind(
        "strategy.extended.reduce_to(op, value, to)", ("StrategyExtended.reduce_to",), OPS, _ALL_LAYOUTS, True
    ),
    "batch_reduce_to": Kind(
        "strategy.extended.batch_reduce_to(op, [(value, to), (1.0, to)])[0]",
        ("StrategyExtended.batch_reduce_to",),
        OPS,
        _ALL_LAYOUTS,
        True,
    ),
    "broadcast_to": Kind(
        "strategy.extended.broadcast_to(value, to)",
        ("StrategyExtended.broadcast_to",),
        layouts=_ALL_LAYOUTS,
        goes_to=True,
    ),
    "assign": Kind(_in_step("vector.assign(value)"), ("Variable.assign",), layouts=(_VECTOR,), refused=True),
    "assign_add": Kind(
        _in_step("vector.assign_add(value)"), ("Variable.assign_add",), layouts=(_VECTOR,), refused=True
    ),
    "scatter_add": Kind(
        _in_step("matrix.scatter_add(rows(value))"), ("Variable.scatter_add",), layouts=(_ROWS,), refused=True
    ),
    "apply_gradients": Kind(
        _in_step("optimizer.apply_gradients([(value, weights)])"),
        ("SGD.apply_gradients",),
        layouts=(_VECTOR,),
        refused=True,
    ),
    "barrier": Kind("strategy.extended.barrier()", ("barrier",)),
}
PLACES = 2
#: The last call of every program: whoever has made a call too few or too many is found here.
CLOSING = "closing"


@dataclass(frozen=True)
class Call:
    """One line of a program; what its kind does not have is None."""

    kind: str
    place: int = 0
    op: str | None = None
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    to: int | None = None

    @property
    def line(self) -> int:
        """Its line in `FILE`."""
        return 1 + (len(KINDS) * PLACES if self.kind == CLOSING else PLACES * list(KINDS).index(self.kind) + self.place)

    @property
    def public(self) -> tuple[str, ...]:
        """Its names in reports."""
        return ("barrier",) if self.kind == CLOSING else KINDS[self.kind].public

    def key(self) -> Call:
        """Return the call without what ranks need not agree on: how many rows they gather."""
        if self.kind in ("all_gather", "gather") and self.shape:
            return replace(self, shape=(-1, *self.shape[1:]))
        return self

    def is_refused(self) -> bool:
        """Return whether the rank that makes it may be refused, whatever the others do."""
        kind = KINDS.get(self.kind)
        return kind is not None and kind.refused and (self.dtype, self.shape) not in kind.layouts


def call(kind: str, **chosen: Any) -> Call:
    """Return a call of a kind with what is not chosen as it comes first."""
    known = KINDS[kind]
    ordinary: dict[str, Any] = {"op": known.ops[0] if known.ops else None}
    if known.layouts:
        preferred = _VECTOR if _VECTOR in known.layouts else known.layouts[0]
        ordinary["dtype"], ordinary["shape"] = preferred
    return Call(kind, **(ordinary | chosen))


def changed(original: Call, what: str) -> list[Call]:
    """Return the calls that differ from one in its op, dtype, shape or destination, and in nothing else."""
    kind = KINDS[original.kind]
    fits = kind.layouts if not kind.refused else _ALL_LAYOUTS
    others: list[Call] = []
    if what == "op":
        others = [replace(original, op=op) for op in kind.ops]
    elif what == "to" and kind.goes_to:
        others = [replace(original, to=to) for to in (None, *RANKS)]
    elif what == "dtype" and kind.layouts:
        others = [replace(original, dtype=dtype) for dtype in DTYPES if (dtype, original.shape) in fits]
    elif what == "shape" and kind.layouts:
        others = [replace(original, shape=shape) for shape in SHAPES if (original.dtype, shape) in fits]
    return [other for other in others if other.key() != original.key()]


def _source() -> Iterator[str]:
    parameters = "strategy, op, value, to, out, arena, vector, matrix, rows, weights, optimizer"
    for number, (name, kind) in enumerate(KINDS.items()):
        for place in range(PLACES):
            yield f"def call_{PLACES * number + place}({parameters}): return {kind.source}  # {name}"
    yield f"def call_{PLACES * len(KINDS)}({parameters}): return strategy.extended.barrier()"


_program: dict[str, Any] = {"context": context}
exec(compile("\n".join(_source()), FILE, "exec"), _program)


# ------------------------------------------------------------------------------------------------------- running


def brought(one: Call, rank: int) -> Array:
    """Return what a rank brings: small whole numbers, of which every result is exact."""
    count = int(np.prod(one.shape or ()))
    return np.asarray((np.arange(count) % 3 + rank + 1).reshape(one.shape or ()).astype(one.dtype))


#: The collectives of the replica context of which `combined` knows what comes of them.
MODELLED = ("all_reduce", "all_reduce_async", "all_gather", "reduce_scatter")


@functools.cache
def simulated(one: Call) -> Array:
    """Return what simulated replicas get of a call; other tests hold what that is."""

    def program() -> Any:
        with ms.MirroredStrategy() as strategy:
            rank = strategy.replica_id_in_sync_group
            chosen = {"reduce_op": one.op, "value": brought(one, rank)}
            return strategy.run(lambda: declared.called(one.kind, **chosen))

    return np.asarray(ms.testing.run_replicas(program, SIZE)[RANK])


def combined(one: Call) -> Array:
    """Return what comes of a call that all ranks make."""
    parts = [brought(one, rank) for rank in RANKS]
    if one.kind in declared.IN_STEPS and one.kind not in MODELLED:
        return simulated(one)
    if one.op is None and "gather" in one.kind:
        return np.concatenate(parts)
    if one.kind == "broadcast_to":
        return parts[0]
    ufunc = {"MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}.get(one.op or "SUM", np.add)
    total = np.asarray(ufunc.reduce(np.stack(parts), axis=0, dtype=parts[0].dtype))
    total = np.asarray(total / total.dtype.type(SIZE)) if one.op == "MEAN" else total
    return total[part_of_batch(len(total), RANK, SIZE)] if one.kind == "reduce_scatter" else total


@dataclass(frozen=True)
class Ending:
    """How a program ended on one rank.

    Attributes:
        step: the call that raised; the number of calls when none did.
        error: the class of the error, "" without.
        text: its words.
        wrong: what it must not have done.
    """

    step: int
    error: str
    text: str
    wrong: list[str] = field(default_factory=list)


class Stage:
    """A strategy with variables, arenas and an optimizer, on which programs are run one after another.  Collective."""

    def __init__(self, strategy: ms.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.vector = ms.Variable(np.zeros(3), aggregation="SUM", name="vector")
            self.matrix = ms.Variable(np.zeros((4, 3)), aggregation="SUM", name="matrix")
            self.weights = ms.Variable(np.zeros(3), aggregation="SUM", name="weights")
            self.optimizer = ms.optimizers.SGD(0.5)
            self.optimizer.build([self.weights])
        self.arenas = {layout: strategy.arena([np.zeros(layout[1], layout[0])]) for layout in _ARENAS}
        #: What the variables hold when nothing has gone wrong.
        self.model = {"vector": np.zeros(3), "matrix": np.zeros((4, 3)), "weights": np.zeros(3)}
        strategy.run(lambda: context().all_reduce_async("SUM", 1.0).wait())  # the first one is a call of its own

    def run(self, program: Sequence[Call]) -> Ending:
        """Make the calls one after another until one raises."""
        wrong: list[str] = []
        for step, one in enumerate(program):
            value = None if one.shape is None else brought(one, RANK)
            out = np.full_like(combined(one), UNTOUCHED) if one.kind in ("all_reduce", "all_reduce_async") else None
            arena = self.arenas.get((one.dtype, one.shape or ())) if "arena" in one.kind else None
            if arena is not None:
                arena.values[0][...] = value
            try:
                result = self._make(one, value, out, arena)
            except MpiStrategyError as error:
                if value is not None and not np.array_equal(value, brought(one, RANK)):
                    wrong.append("what was brought has changed")
                if out is not None and not (out == UNTOUCHED).all():
                    wrong.append("something was delivered")
                if arena is not None and not np.array_equal(arena.values[0], brought(one, RANK)):
                    wrong.append("the arena has changed")
                return Ending(step, type(error).__name__, str(error), wrong + self._variables_that_differ())
            self._follow(one)
            if one.to in (None, RANK) and not self._is_right(one, result):
                wrong.append(f"step {step}, {one}: {result!r}")
            wrong += self._variables_that_differ()
        return Ending(len(program), "", "", wrong)

    def settle(self) -> None:
        """Start what some ranks have started in the background and others have not, so that no job is left over."""
        background = self._communicator().once.made.get(Background)
        if background is None:
            return  # each was done, or refused, when it was started
        started = [int(text) for text in gather_texts(str(background.submitted))]
        for _ in range(max(started) - background.submitted):
            self.strategy.run(lambda: context().all_reduce_async("SUM", 1.0))
        self.strategy.barrier()

    def close(self) -> None:
        """Close the strategy; that nobody waited for what `settle` started is no news.  Collective."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.strategy.close()

    def _communicator(self) -> Any:
        return self.strategy.extended.communicator

    def _make(self, one: Call, value: Any, out: Any, arena: Any) -> Any:
        to = self.vector if one.to is None else f"task:{one.to}"
        function: Callable[..., Any] = _program[f"call_{one.line - 1}"]
        return function(
            self.strategy,
            one.op,
            value,
            to,
            out,
            arena,
            self.vector,
            self.matrix,
            lambda rows: ms.IndexedSlices(rows, np.array([0, 2]), (4, 3)),
            self.weights,
            self.optimizer,
        )

    def _is_right(self, one: Call, result: Any) -> bool:
        if one.kind not in KINDS or KINDS[one.kind].refused or one.shape is None:
            return True  # a barrier; or the model knows
        return np.array_equal(np.asarray(local_component(result)), combined(one))

    def _follow(self, one: Call) -> None:
        if one.kind == "assign":
            self.model["vector"] = combined(one)
        elif one.kind == "assign_add":
            self.model["vector"] = self.model["vector"] + combined(one)
        elif one.kind == "scatter_add":
            self.model["matrix"][[0, 2]] += combined(one)
        elif one.kind == "apply_gradients":
            self.model["weights"] = self.model["weights"] - 0.5 * combined(one)

    def _variables_that_differ(self) -> list[str]:
        variables = (self.vector, self.matrix, self.weights)
        return [v.name for v in variables if not np.array_equal(v.local_view, self.model[v.name])]


# ------------------------------------------------------------------------------------------------------- judging


def first_difference(program: Sequence[Call], odd_program: Sequence[Call]) -> int:
    """Return the step at which two programs part; both end with the closing barrier."""
    steps = _keys(program), _keys(odd_program)
    return next(step for step, (one, other) in enumerate(zip(*steps, strict=False)) if one != other)


def _keys(program: Sequence[Call]) -> list[tuple[Call, int]]:
    """Return what tells the calls apart: an optimizer's steps are numbered."""
    kinds = [one.kind for one in program]
    numbers = [kinds[:at].count(kind) if kind == "apply_gradients" else 0 for at, kind in enumerate(kinds)]
    return list(zip([one.key() for one in program], numbers, strict=True))


def judged(stage: Stage, program: Sequence[Call], odd_program: Sequence[Call], odd: int) -> list[str]:
    """Run `odd_program` on rank `odd` and `program` on the others; return what was not as it should be.  Collective.

    All end with the closing barrier.
    """
    programs = [[*(odd_program if rank == odd else program), Call(CLOSING)] for rank in RANKS]
    mine = stage.run(programs[RANK])
    endings = [
        Ending(*json.loads(text)) for text in gather_texts(json.dumps([mine.step, mine.error, mine.text, mine.wrong]))
    ]
    stage.settle()

    at = first_difference(programs[0 if odd else 1], programs[odd])
    faults = [f"rank {rank}: {wrong}" for rank, ending in enumerate(endings) for wrong in ending.wrong]
    faults += [f"rank {rank} raised nothing" for rank, ending in enumerate(endings) if not ending.error]
    faults += [f"rank {rank} ended at {end.step}, not {at}" for rank, end in enumerate(endings) if end.step != at]
    if any(not ending.error for ending in endings):
        return faults
    calls = [program[min(at, len(program) - 1)] for program in programs]
    if not calls[odd].is_refused() or endings[odd].error == "CollectiveMismatchError":
        return faults + _of_report([f"{end.error}: {end.text}" for end in endings], calls, odd)
    words = f"rank {odd} could not make this call ({FILE}:{calls[odd].line}): {endings[odd].error}: "
    others = [ending for rank, ending in enumerate(endings) if rank != odd]
    faults += [f"{end.error}: {end.text}" for end in others if words + endings[odd].text != end.text]
    return faults + [f"the wrong kind: {end.error}" for end in others if end.error != endings[odd].error]


def _of_report(texts: list[str], calls: list[Call], odd: int) -> list[str]:
    """Return what is wrong with the ranks' reports: all are equal, and hold every rank's call and line."""
    text = launching.a_row_a_rank(texts[0])
    faults = [] if len(set(texts)) == 1 else ["the ranks were told different things"]
    if not text.startswith("CollectiveMismatchError: "):
        faults.append("another kind of error")
    rows = []
    for rank, one in enumerate(calls):
        public = "|".join(map(re.escape, one.public))
        row = re.search(rf"^  rank {rank}: (call=(?:{public})(?:  .*)?  at {re.escape(FILE)}:{one.line})$", text, re.M)
        if row is None:
            faults.append(f"rank {rank} is not said to make {one} at line {one.line}")
        else:
            rows.append(row[1])
    of_others = {row for rank, row in enumerate(rows) if rank != odd}
    if len(rows) == SIZE and (len(of_others) != 1 or rows[odd] in of_others):
        faults.append(f"rank {odd} is not told apart from the others")
    return [*faults, text] if faults else []
