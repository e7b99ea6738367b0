"""The cases of whole training steps: what communication adds to one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import network
from libraries import Peer
from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Case, Variant
from mpistrategy.cli.bench.raw import RawRanks
from mpistrategy.optimizers import SGD
from mpistrategy.strategy.current import get_replica_context
from mpistrategy.strategy.one_device import OneDeviceStrategy
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

ALONE = "no communication"
REFERENCE = f"NumPy, {ALONE}"
#: Sums are taken in another order, and matrix products by another library.
TOLERANCE = 1e-3
#: Widths of the layers: a classifier of handwritten digits, and one of 25.1 million parameters.
NETWORKS = {"64-128-10": (64, 128, 10), "1024-4096-4096-1000": (1024, 4096, 4096, 1000)}
#: Calls that are timed together; steps of a program follow one another without a barrier.
BATCHES = {"64-128-10": 50, "1024-4096-4096-1000": 1}


@dataclass(frozen=True)
class Bench:
    """What the steps are made with.

    Attributes:
        ranks: the reference's ranks.
        strategy: the library's.
        peers: other libraries that run here.
    """

    ranks: RawRanks
    strategy: Strategy
    peers: Sequence[Peer]


def training_steps(bench: Bench, names: Sequence[str]) -> Iterator[Case]:
    """Yield a step of stochastic gradient descent of each network, 64 rows a rank, float32."""
    for name in names:
        widths = NETWORKS[name]
        inputs, classes = network.rows(widths, bench.ranks.rank)
        expected = _expected(widths, bench.ranks.size)
        makers: list[Callable[[], Iterator[Variant]]] = [
            partial(_by_hand, bench, widths, inputs, classes, expected),
            partial(_by_strategy, bench, widths, inputs, classes, expected),
            *(partial(_by_peer, bench, peer, widths, inputs, classes, expected) for peer in bench.peers),
        ]
        variants = [variant for make in makers for variant in make()]
        nbytes = sum(array.nbytes for array in expected)
        yield Case("steps", name, nbytes, variants, batch=BATCHES[name])


def communication(case: dict[str, Any]) -> dict[str, float]:
    """Return how much longer than without communication a step takes with it, in microseconds, by variant.

    Steps by a library whose step without it was not run are left out: Horovod's, where torch is no peer.
    """
    median = {row["name"]: row["median_us"] for row in case["variants"]}
    alone = {name.partition(",")[0]: time for name, time in median.items() if name.endswith(ALONE)}
    return {
        name: round(time - alone[library], 1)
        for name, time in median.items()
        if not name.endswith(ALONE) and (library := "torch" if name.startswith("torch") else "NumPy") in alone
    }


def _expected(widths: Sequence[int], ranks: int) -> list[Array]:
    """Return the parameters after the first step, computed here for all ranks."""
    parameters = network.initial(widths)
    totals = [np.zeros_like(array) for array in parameters]
    mine = [np.empty_like(array) for array in parameters]
    for rank in range(ranks):
        network.gradients(parameters, *network.rows(widths, rank), mine, 1 / ranks)
        for total, array in zip(totals, mine, strict=True):
            total += array
    _descend(parameters, totals)
    return parameters


def _descend(parameters: Sequence[Array], totals: Sequence[Array]) -> None:
    for parameter, total in zip(parameters, totals, strict=True):
        total *= np.float32(network.RATE)
        parameter -= total


class _Check:
    """Whether the first step leads where it should, and the ranks are equal after every later check."""

    def __init__(self, bench: Bench, step: Callable[[], None], parameters: Sequence[Any], expected: Sequence[Array]):
        self._bench, self._step, self._parameters = bench, step, parameters
        self._expected: Sequence[Array] | None = expected

    def __call__(self) -> bool:
        self._step()
        found = [np.asarray(array) for array in self._parameters]
        digest = hashlib.sha256()
        for array in found:
            digest.update(np.ascontiguousarray(array).data)
        right = self._bench.ranks.all_equal(digest.digest())
        if self._expected is not None:
            pairs = zip(found, self._expected, strict=True)
            right = right and all(np.allclose(mine, other, TOLERANCE, 1e-6) for mine, other in pairs)
            self._expected = None
        return right


def _by_hand(bench: Bench, widths: Any, inputs: Array, classes: Array, expected: list[Array]) -> Iterator[Variant]:
    scale = 1 / bench.ranks.size

    def steps(exchange: Callable[[Sequence[Array]], None] | None) -> tuple[Callable[[], None], list[Array]]:
        parameters = network.initial(widths)
        mine = [np.zeros_like(array) for array in parameters]

        def step() -> None:
            network.gradients(parameters, inputs, classes, mine, scale)
            if exchange is not None:
                exchange(mine)
            _descend(parameters, mine)

        return step, parameters

    step, _ = steps(None)
    yield Variant(REFERENCE, step, [], check=lambda: True)
    step, parameters = steps(bench.ranks.sum_each_in_place)
    yield Variant("NumPy, mpi4py in place", step, [], check=_Check(bench, step, parameters, expected))

    resident = network.initial(widths)
    arena = bench.strategy.arena(resident)

    def step_in_arena() -> None:
        network.gradients(resident, inputs, classes, arena.values, scale)
        get_replica_context().all_reduce("SUM", arena)
        _descend(resident, arena.values)

    call = partial(bench.strategy.run, step_in_arena)
    check = _Check(bench, call, resident, expected)
    yield Variant("NumPy, mpistrategy arena", call, [], check=check, close=arena.close)


def _by_strategy(bench: Bench, widths: Any, inputs: Array, classes: Array, expected: list[Array]) -> Iterator[Variant]:
    scale = 1 / bench.ranks.size
    forms: list[tuple[str, Strategy, bool]] = [
        (f"mpistrategy SGD, {ALONE}", OneDeviceStrategy("CPU:0"), False),
        ("mpistrategy SGD", bench.strategy, False),
        ("mpistrategy SGD, sliced update", bench.strategy, True),
    ]
    for name, strategy, in_arena in forms:
        with strategy.scope():
            variables = [Variable(value) for value in network.initial(widths)]
            optimizer = SGD(network.RATE)
            optimizer.build(variables)
        parameters = [np.asarray(variable) for variable in variables]  # views
        mine = (
            optimizer.gradient_arena(variables).values if in_arena else [np.zeros_like(array) for array in parameters]
        )

        def step(
            parameters: list[Array] = parameters,
            mine: list[Array] = mine,
            variables: list[Variable] = variables,
            optimizer: SGD = optimizer,
        ) -> None:
            network.gradients(parameters, inputs, classes, mine, scale)
            optimizer.apply_gradients(zip(mine, variables, strict=True))

        call = partial(strategy.run, step)
        check = (lambda: True) if name.endswith(ALONE) else _Check(bench, call, parameters, expected)
        yield Variant(name, call, [], check=check)


def _by_peer(
    bench: Bench, peer: Peer, widths: Any, inputs: Array, classes: Array, expected: list[Array]
) -> Iterator[Variant]:
    for step in peer.training_steps(network.initial(widths), inputs, classes, network.RATE):
        check = (lambda: True) if step.apart else _Check(bench, step.call, step.parameters, expected)
        yield Variant(step.name, step.call, [], check=check, within=step.within)
