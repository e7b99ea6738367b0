"""Where variables live, and StrategyExtended of the default strategy: what the recorded programs mean."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env, constant, variable
from .names import variable_name
from .programs_extended import in_each_context
from .registry import program

Inputs = dict[str, Any]
ON_READ = ms.VariableSynchronization.ON_READ
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN


@program("colocate_vars_with", copies=("documentation example, v after update",))
def colocate_vars_with(env: Env, p: Inputs) -> Any:
    extended = env.strategy.extended
    with env.strategy.scope():
        v = variable(1.0)
        with extended.colocate_vars_with(v):
            w = variable([5.0, 6.0])
            x = variable(2.0, synchronization=ON_READ, aggregation=MEAN)
        extended.update(v, lambda a, b, c: a.assign_add(np.sum(b) + c), args=(w, x))
    return {
        "w": w,
        "same devices": w._colocated_with is v and x._colocated_with is v,
        "ON_READ inside": variable_name(x, env),
        "documentation example, v after update": env.copies(v),
    }


@program("colocate_with_wrong")
def colocate_with_wrong(env: Env, p: Inputs) -> Any:
    extended, plain = env.strategy.extended, variable(1.0)
    with env.strategy.scope():
        v = variable(1.0)
        wrong = {
            "plain variable": plain,
            "component": np.asarray(v),
            "tensor": constant(1.0),
            "device string": "CPU:0",
            "non_slot_devices (as the documentation says)": extended.non_slot_devices([v]),
        }
        observed = {name: env.attempt(extended.colocate_vars_with, value) for name, value in wrong.items()}
    if env.kind == "mirrored":
        with env.new_strategy().scope():
            of_another = variable(1.0)
        with env.strategy.scope():
            observed["variable of another strategy"] = env.attempt(extended.colocate_vars_with, of_another)
    return observed


@program("context_non_slot")
def context_non_slot(env: Env, p: Inputs) -> Any:
    return in_each_context(env, lambda: env.strategy.extended.non_slot_devices([]))


@program("read_var")
def read_var(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(3.0)
        total = variable(0.0, synchronization=ON_READ, aggregation=SUM)
        mean = variable(0.0, synchronization=ON_READ, aggregation=MEAN)

    def step() -> None:
        total.assign(env.rid() + 1.0)
        mean.assign(env.rid() + 1.0)

    env.run(step)
    extended = env.strategy.extended
    with env.strategy.scope():
        return {
            "mirrored": extended.read_var(v),
            "sum": extended.read_var(total),
            "mean": extended.read_var(mean),
        }


@program("value_container_destroyed")
def value_container_destroyed(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(1.0)
    component = env.strategy.experimental_local_results(v)[0]
    del v
    gc.collect()
    return {"gives the component itself": env.strategy.extended.value_container(component) is component}


@program("default_strategy_update")
def default_strategy_update(env: Env, p: Inputs) -> Any:
    extended, v, three = env.strategy.extended, variable(1.0), constant(3.0)
    return {
        "update": env.attempt(lambda: extended.update(v, lambda var, x: var.assign_add(x), args=(2.0,))),
        "v": v,
        "update group=False": env.attempt(lambda: extended.update(v, lambda var: {"a": 3}, group=False)),
        "update_non_slot": env.attempt(lambda: extended.update_non_slot(v, lambda x: x + 1, args=(4,))),
        "reduce_to SUM": env.attempt(lambda: extended.reduce_to(ms.ReduceOp.SUM, three, v)),
        "reduce_to MEAN": env.attempt(lambda: extended.reduce_to(ms.ReduceOp.MEAN, three, v)),
        "batch_reduce_to": env.attempt(lambda: extended.batch_reduce_to(ms.ReduceOp.SUM, [(three, v), (1, v)])),
        "broadcast_to": env.attempt(lambda: extended.broadcast_to(three, v)),
        "broadcast_to None": env.attempt(lambda: extended.broadcast_to(three, None)),
        "value_container": extended.value_container(v) is v,
        "variable_created_in_scope": extended.variable_created_in_scope(v),
        "call_for_each_replica": env.attempt(lambda: extended.call_for_each_replica(lambda x: x + 1, args=(3,))),
        "read_var": env.attempt(lambda: extended.read_var(v)),
        "worker_devices": env.attempt(lambda: extended.worker_devices),
        "parameter_devices": env.attempt(lambda: extended.parameter_devices),
    }
