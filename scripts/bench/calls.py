"""This rank's own work of one repeated small call, in every spelling, beside a sketch of the least it can be.

One process, no MPI: the other rank's mailbox is this rank's own, so there are no waits in the figures. Each is the
least of many rounds, in microseconds.

The sketch has one call, one dictionary and one plan for every spelling, and leaves out what a call must have besides:
flags, hooks, threads, calls inside calls, GPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe
from threading import get_ident
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy import context
from mpistrategy.arrays.devices import Device
from mpistrategy.arrays.dtypes import dtype_name
from mpistrategy.arrays.nest import leaves_of
from mpistrategy.mpi.contract.call_sites import Signature, digest_of
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.ranks import Alone
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, segment_bytes
from mpistrategy.mpi.shared_memory.segments import SharedMemory, private_memory
from mpistrategy.mpi.shared_memory.spin_wait import SpinWait
from mpistrategy.reduction.inputs import arrays_of, in_kind
from mpistrategy.reduction.plan import usual_route
from mpistrategy.reduction.transfer import layouts_of
from mpistrategy.strategy.extended import StrategyExtended

ROOM = 32768
SUM = ms.ReduceOp.SUM


class SketchedCall:
    """One public call: enters the record, and leaves it."""

    __slots__ = ("entered", "guard", "left", "name", "place", "signature", "structure", "timeout", "where")

    def __init__(self, guard: Guard, where: str, timeout: float | None) -> None:
        self.guard, self.where, self.timeout = guard, where, timeout
        self.signature: Signature | None = None
        self.structure, self.name, self.place, self.left = "", "", "", 0.0

    def __enter__(self) -> SketchedCall:
        guard: Any = self.guard
        if guard.current is not None or guard.closed:
            raise RuntimeError("nested, or closed")
        self.entered = monotonic()
        guard.thread = get_ident()
        guard.record.number += 1
        guard.record.entries.append((guard.record.number, self, self.entered, 0.0))
        guard.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.guard.current = None
        self.left = monotonic()


def site_of(frame: FrameType | None, step: Any) -> tuple[Any, ...]:
    """Return code and instruction of the call and of two callers, up to the step function."""
    lines: list[Any] = []
    for _ in range(3):
        if frame is None:
            break
        code = frame.f_code
        lines += (code, frame.f_lasti)
        frame = frame.f_back
        if code is step:
            break
    return tuple(lines)


def kind_of(value: Any) -> Any:
    """Return structure, types, dtypes and shapes."""
    kind = type(value)
    if kind is np.ndarray:
        return value.dtype, value.shape
    if kind is dict:
        return tuple(value), tuple(map(kind_of, value.values()))
    if kind is list or kind is tuple:
        return kind, tuple(map(kind_of, value))
    return kind


class SketchedPlan:
    """Packs, agrees, sums, unpacks."""

    def __init__(self, ranks: Any, value: Any, name: str | None, place: str) -> None:
        where = leaves_of(value)
        assert where is not None
        self.where = where
        arrays = arrays_of(where.take(value)) or []
        self.layouts = layouts_of(arrays)
        self.plan = usual_route(ranks, self.layouts, SUM, 0, None)
        values = tuple((dtype_name(dtype), shape) for dtype, shape in self.layouts)
        self.signature = Signature(
            "reduce", "SUM", where.text, values, "every rank", "", name or "", "sketch", "" if name else place
        )
        self.guard: Any = ranks.guard
        self.digest = digest_of(self.signature)

    def run(self, call: SketchedCall, value: Any, out: Any) -> Any:
        leaves = self.where.take(value)
        arrays = arrays_of(leaves, self.layouts) or []
        memory = self.plan.bring(arrays)
        call.signature = self.signature
        if not self.guard._channel.all_equal(self.digest | self.guard._flag):
            raise RuntimeError("the calls differ")
        results = self.plan.run(arrays, memory)
        if out is not None:
            for target, result in zip(self.where.take(out), results, strict=True):
                target[...] = result
            return out
        return self.where.pack([*map(in_kind, results, leaves)])


class Sketch:
    """The sketch of a reducer; `step` is the code of the step function."""

    step: Any = None

    def __init__(self, ranks: Any) -> None:
        self.ranks, self.plans = ranks, dict[Any, SketchedPlan]()

    def all_reduce(self, value: Any, options: Any = None, *, name: str | None = None, out: Any = None) -> Any:
        frame, step = _getframe(1), context.current_frame() and self.step
        with SketchedCall(self.ranks.guard, "sketch", options and options.timeout_seconds) as call:
            key = (name or site_of(frame, step), SUM, options, kind_of(value))
            plan = self.plans.get(key)
            if plan is None:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                plan = self.plans[key] = SketchedPlan(self.ranks, value, name, place)
            return plan.run(call, value, out)


def strategy_of(algorithm: Any = None) -> tuple[Any, Any]:
    """Return a strategy of two ranks, both of which are this rank, and its ranks."""
    segment = private_memory(segment_bytes(ROOM)).own_segment
    boxes = Mailboxes(SharedMemory((segment, segment), 0, True), ROOM, SpinWait(lambda: None).until)
    ranks = Alone(devices=(Device(0, "CPU", 0), Device(1, "CPU", 0)))
    ranks.size, ranks.node_of, ranks.guard, ranks.mailboxes = 2, (0, 0), Guard(boxes, 0, 2), boxes

    class Pair(ms.Strategy):
        def __init__(self) -> None:
            super().__init__(StrategyExtended(self, ranks, algorithm))

    strategy = Pair()
    strategy.extended._reducer.is_alone = False
    return strategy, ranks


def least_in_turns(works: Sequence[Callable[[], Any]], rounds: int, times: int = 30) -> list[float]:
    """Return the least microseconds of one call of each work; in turns, so that other programs disturb all alike.

    A turn makes many calls: the first few pay for the caches that the other work has emptied.
    """
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for at, work in enumerate(works):
            start = time.perf_counter()
            for _ in range(times):
                work()
            best[at] = min(best[at], time.perf_counter() - start)
    return [seconds / times * 1e6 for seconds in best]


def measure(options: argparse.Namespace) -> None:
    """Print the figures."""
    strategy, ranks = strategy_of()
    sketch, extended = Sketch(ranks), strategy.extended
    x, y, k = np.ones(1, np.float32), np.empty(1, np.float32), np.ones(1024, np.float32)
    numbers = {str(i): float(i) for i in range(10)}
    layers = [np.ones((8, i + 1), np.float32) for i in range(20)]
    pairs = [(layer, layer) for layer in layers]
    spelt: dict[str, tuple[Any, dict[str, Any]]] = {
        "4 B": (x, {}),
        "4 KiB": (k, {}),
        "a float": (1.5, {}),
        "out=": (x, {"out": y}),
        "name=": (x, {"name": "loss"}),
        "options=": (x, {"options": ms.CommunicationOptions(timeout_seconds=60)}),
        "dict of 10 floats": (numbers, {}),
        "20 arrays": (layers, {}),
    }

    def show(name: str, work: Callable[[], Any], beside: str = "4 B") -> None:
        value, more = spelt[beside]
        shipped, sketched = least_in_turns((work, partial(sketch.all_reduce, value, **more)), options.rounds)
        print(f"{name:42} {shipped:8.1f} {sketched:8.1f} {shipped / sketched:8.2f}", flush=True)

    def step() -> None:
        replica_context = ms.get_replica_context()
        for spelling, (value, more) in spelt.items():
            show(spelling, partial(replica_context.all_reduce, SUM, value, **more), spelling)
        show("weight=", partial(replica_context.all_reduce, "MEAN", x, weight=2.0))
        show("all_reduce_async().wait()", lambda: replica_context.all_reduce_async(SUM, x).wait())
        replica_context.merge_call(across)

    def across(_: Any) -> None:
        show("reduce_to", partial(extended.reduce_to, SUM, x, x))
        show("batch_reduce_to", partial(extended.batch_reduce_to, SUM, pairs), "20 arrays")

    def by_algorithm(name: str) -> None:
        show(name, partial(ms.get_replica_context().all_reduce, SUM, x))

    print(f"{'us':42} {'shipped':>8} {'sketch':>8} {'ratio':>8}")
    sketch.step = step.__code__
    strategy.run(step)
    show("Strategy.reduce", partial(strategy.reduce, SUM, x))
    for algorithm in (ms.NcclAllReduce(), ms.HierarchicalCopyAllReduce()):
        strategy_of(algorithm)[0].run(by_algorithm, (type(algorithm).__name__,))
