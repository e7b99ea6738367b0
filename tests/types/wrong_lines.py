"""Lines that a type checker must refuse: each says so, and a checker that takes one reports an unused comment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import mpistrategy as ms


def step(x: NDArray[np.float64], scale: float = 1.0) -> float:
    """Return a number."""
    return float(x.sum()) * scale


def wrong(strategy: ms.MirroredStrategy, replica: ms.ReplicaContext, variable: ms.Variable) -> None:
    """Call everything wrongly."""
    x = np.ones(3)
    strategy.reduce("SMU", x)  # type: ignore[call-overload]
    replica.all_reduce("AVERAGE", x)  # type: ignore[call-overload]
    replica.all_reduce_async("SUMM", x)  # type: ignore[call-overload]
    strategy.reduce(ms.VariableAggregation.ONLY_FIRST_REPLICA, x)  # type: ignore[call-overload]
    strategy.reduce("SUM", x, weigth=3.0)  # type: ignore[call-overload]
    strategy.reduce("SUM", x, axis="rows")  # type: ignore[call-overload]
    strategy.reduce("SUM", x, name=3)  # type: ignore[call-overload]
    replica.all_reduce("SUM", x, out=None, options={"timeout": 3})  # type: ignore[call-overload]
    strategy.gather(x)  # type: ignore[call-arg]
    strategy.gather(x, 0.5)  # type: ignore[arg-type]
    strategy.broadcast(x, root="first")  # type: ignore[arg-type]
    strategy.run(step)  # type: ignore[arg-type]
    strategy.run(step, x)  # type: ignore[call-overload]
    strategy.run(step, args=("text",))  # type: ignore[arg-type]
    strategy.run(step, args=(x, 2.0, 3.0))  # type: ignore[arg-type]
    strategy.run(3)  # type: ignore[call-overload]
    text: str = strategy.run(step, args=(x,))  # type: ignore[assignment]
    number: int = strategy.reduce("SUM", x)  # type: ignore[assignment]
    narrow: NDArray[np.float32] = replica.all_reduce("SUM", x)  # type: ignore[call-overload]
    waited: NDArray[np.float32] = replica.all_reduce_async("SUM", x).wait()  # type: ignore[assignment]
    strategy.rank = 3  # type: ignore[misc]
    strategy.sise  # type: ignore[attr-defined]  # noqa: B018
    variable.assign_ad(x)  # type: ignore[attr-defined]
    strategy.experimental_distribute_dataset(3)  # type: ignore[arg-type]
    strategy.distribute_dataset([x], check_batches="wran")  # type: ignore[arg-type]
    ms.Dataset.from_arrays(x, 4, 1)  # type: ignore[call-arg]
    arena: ms.Arena[list[int]] = strategy.arena({"w": x})  # type: ignore[arg-type]
    strategy.arena(x, shared=True)  # type: ignore[call-overload]
    ms.Checkpoint(x=x).save(3)  # type: ignore[arg-type]
    stateful: ms.Stateful = x  # type: ignore[assignment]
    ms.optimizers.SGD(0.1, 0.9, False, "MEAN")  # type: ignore[call-arg]
    ms.optimizers.SGD(0.1, aggregation="mena")  # type: ignore[arg-type]
    ms.optimizers.Adam(nonfinite="rase")  # type: ignore[arg-type]
    ms.MirroredStrategy(check="alwys")  # type: ignore[arg-type]
    ms.MirroredStrategy(on_error="stop")  # type: ignore[arg-type]
    ms.Variable(x, aggregation="AVERAGE")  # type: ignore[arg-type]
    ms.Variable(x, synchronization="ON_WRIT")  # type: ignore[arg-type]
    ms.CommunicationOptions(implementation="NCLC")  # type: ignore[arg-type]
    ms.CommunicationOptions(wire="float8")  # type: ignore[arg-type]
    ms.CommunicationOptions(bytes_per_pack="8 MiB")  # type: ignore[arg-type]
    strategy.explain(x, "SMU")  # type: ignore[arg-type]
    strategy.extended.reduce_to("SMU", x, x)  # type: ignore[arg-type]
    print(arena, stateful, text, number, narrow, waited)
