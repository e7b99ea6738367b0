"""Small programs of collectives, made wrong on one rank: how they are written, run, and judged.

A program is a list of calls; each has a kind, an operation, a dtype, a shape, a destination, and a line of its own in
a made-up source file, so that a report can be held against the lines.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import declared
import launching
import numpy as np
from replicas import RANK, RANKS, context, gather_texts

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import MpiStrategyError
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
    """

    source: str
    public: tuple[str, ...]
    ops: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    goes_to: bool = False


def _in_step(call: str) -> str:
    return f"stage.strategy.run(lambda: {call})"


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
    "reduce": Kind("stage.strategy.reduce(op, value)", ("Strategy.reduce",), OPS, _ALL_LAYOUTS),
    "gather": Kind("stage.strategy.gather(value, 0)", ("Strategy.gather",), layouts=_WITH_AXES),
    "reduce_to": Kind(
        "stage.strategy.extended.reduce_to(op, value, to)", ("StrategyExtended.reduce_to",), OPS, _ALL_LAYOUTS, True
    ),
    "batch_reduce_to": Kind(
        "stage.strategy.extended.batch_reduce_to(op, [(value, to), (1.0, to)])[0]",
        ("StrategyExtended.batch_reduce_to",),
        OPS,
        _ALL_LAYOUTS,
        True,
    ),
    "broadcast_to": Kind(
        "stage.strategy.extended.broadcast_to(value, to)",
        ("StrategyExtended.broadcast_to",),
        layouts=_ALL_LAYOUTS,
        goes_to=True,
    ),
    "assign": Kind(_in_step("stage.vector.assign(value)"), ("Variable.assign",), layouts=(_VECTOR,)),
    "assign_add": Kind(_in_step("stage.vector.assign_add(value)"), ("Variable.assign_add",), layouts=(_VECTOR,)),
    "scatter_add": Kind(
        _in_step("stage.matrix.scatter_add(stage.rows(value))"), ("Variable.scatter_add",), layouts=(_ROWS,)
    ),
    "apply_gradients": Kind(
        _in_step("stage.optimizer.apply_gradients([(value, stage.weights)])"),
        ("SGD.apply_gradients",),
        layouts=(_VECTOR,),
    ),
    "barrier": Kind("stage.strategy.extended.barrier()", ("barrier",)),
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
    others: list[Call] = []
    if what == "op":
        others = [replace(original, op=op) for op in kind.ops]
    elif what == "to" and kind.goes_to:
        others = [replace(original, to=to) for to in (None, *RANKS)]
    elif what == "dtype":
        others = [replace(original, dtype=dtype) for dtype, shape in kind.layouts if shape == original.shape]
    elif what == "shape":
        others = [replace(original, shape=shape) for dtype, shape in kind.layouts if dtype == original.dtype]
    return [other for other in others if other.key() != original.key()]


_HEAD = "(stage, op, value, to, out, arena): return "
_LINES = [
    *(
        f"def call_{PLACES * number + place}{_HEAD}{kind.source}"
        for number, kind in enumerate(KINDS.values())
        for place in range(PLACES)
    ),
    f"def call_{PLACES * len(KINDS)}{_HEAD}stage.strategy.extended.barrier()",
]
_program: dict[str, Any] = {"context": context}
exec(compile("\n".join(_LINES), FILE, "exec"), _program)


# ------------------------------------------------------------------------------------------------------- running


def brought(one: Call, rank: int) -> Array:
    """Return what a rank brings: small numbers."""
    shape = one.shape or ()
    return np.asarray(np.resize(np.arange(3) + rank + 1, shape)).astype(one.dtype)


class Ending(NamedTuple):
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
    wrong: list[str]


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
        strategy.run(lambda: context().all_reduce_async("SUM", 1.0).wait())  # the first one is a call of its own

    def rows(self, value: Array) -> ms.IndexedSlices:
        return ms.IndexedSlices(value, np.array([0, 2]), (4, 3))

    def run(self, program: Sequence[Call]) -> Ending:
        """Make the calls one after another until one raises, which must change and deliver nothing."""
        for step, one in enumerate(program):
            value = None if one.shape is None else brought(one, RANK)
            of_mean = one.op == "MEAN" and one.dtype[:1] in "iu"
            out = np.full(one.shape or (), UNTOUCHED, "f8" if of_mean else one.dtype) if one.dtype else None
            arena = self.arenas.get((one.dtype, one.shape or ())) if "arena" in one.kind else None
            if arena is not None:
                arena.values[0][...] = value
            kept = (value, out, *(arena.values if arena else ()), self.vector, self.matrix, self.weights)
            before = [np.array(each) for each in kept]
            to = self.vector if one.to is None else f"task:{one.to}"
            try:
                _program[f"call_{one.line - 1}"](self, one.op, value, to, out, arena)
            except MpiStrategyError as error:
                changes = [
                    f"{was} has become {each}" for was, each in zip(before, kept, strict=True) if np.any(was != each)
                ]
                return Ending(step, type(error).__name__, str(error), changes)
        return Ending(len(program), "", "", [])

    def settle(self) -> None:
        """Start what some ranks have started in the background and others have not, so that no job is left over."""
        communicator: Any = self.strategy.extended.communicator
        background = communicator.made.get(Background)
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


# ------------------------------------------------------------------------------------------------------- judging


def _keys(program: Sequence[Call]) -> list[tuple[Call, int]]:
    """Return what tells the calls apart: an optimizer's steps are numbered."""
    kinds = [one.kind for one in program]
    numbers = [kinds[:at].count(kind) if kind == "apply_gradients" else 0 for at, kind in enumerate(kinds)]
    return list(zip([one.key() for one in program], numbers, strict=True))


def judged(stage: Stage, program: Sequence[Call], odd_program: Sequence[Call], odd: int) -> list[str]:
    """Run `odd_program` on rank `odd` and `program` on the others; return what was not as it should be.  Collective.

    All end with the closing barrier.  All raise where the programs part, and are told every rank's call and its line.
    """
    programs = [[*(odd_program if rank == odd else program), Call(CLOSING)] for rank in RANKS]
    endings = [Ending(*json.loads(text)) for text in gather_texts(json.dumps(stage.run(programs[RANK])))]
    stage.settle()
    both = zip(_keys(programs[0 if odd else 1]), _keys(programs[odd]), strict=False)
    at = next(step for step, (one, other) in enumerate(both) if one != other)
    faults = [f"rank {rank}: {wrong}" for rank, ending in enumerate(endings) for wrong in ending.wrong]
    faults += [f"rank {rank} ended at {end.step}, not {at}" for rank, end in enumerate(endings) if end.step != at]
    texts = [f"{end.error}: {end.text}" for end in endings]
    text = launching.a_row_a_rank(texts[0])
    faults += ["the ranks were told different things"] * (len({*texts}) != 1)
    faults += ["another kind of error"] * (not text.startswith("CollectiveMismatchError: "))
    rows = []
    for rank, calls in enumerate(programs):
        one = calls[min(at, len(calls) - 1)]
        public = "|".join(map(re.escape, one.public))
        row = re.search(rf"^  rank {rank}: (call=(?:{public})(?:  .*)?  at {re.escape(FILE)}:{one.line})$", text, re.M)
        faults += [] if row else [f"rank {rank} is not said to make {one} at line {one.line}"]
        rows.append(row[1] if row else "")
    of_others = {row for rank, row in enumerate(rows) if rank != odd}
    faults += [f"rank {odd} is not told apart from the others"] * (len(of_others) != 1 or rows[odd] in of_others)
    return [*faults, text] if faults else []
