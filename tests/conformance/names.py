"""TensorFlow's names for the roles that objects play: what a recording means when it notes a type's name."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import is_on_device

from .environment import Env
from .values import Json

_CLASS_NAMES = {"CommunicationOptions": "Options"}
_DEFAULT = ms.get_strategy()


def strategy_name(strategy: Any) -> str:
    """The name of a strategy's class."""
    return "_DefaultDistributionStrategy" if strategy is _DEFAULT else type(strategy).__name__


def context_name(context: Any) -> str | None:
    """The name of a replica context's class, which TensorFlow has one of for every kind of strategy."""
    if context is None:
        return None
    if context.strategy is _DEFAULT:
        return "_DefaultReplicaContext"
    return (
        "_OneDeviceReplicaContext" if isinstance(context.strategy, ms.OneDeviceStrategy) else "_MirroredReplicaContext"
    )


def variable_name(variable: Any, env: Env) -> str:
    """The name of a variable's class: plain ones are made outside a scope and where there is one device."""
    if not isinstance(variable, ms.Variable):
        return type_name(variable)
    distributed = env.kind in (
        "mirrored",
        "multi_worker",
    ) and env.strategy.extended.variable_created_in_scope(variable)
    if not distributed:
        return "ResourceVariable"
    on_read = variable.synchronization is ms.VariableSynchronization.ON_READ
    return "SyncOnReadVariable" if on_read else "MirroredVariable"


def type_name(value: Any) -> str:
    """The name of a value's class; an array is an eager tensor."""
    if isinstance(value, (np.ndarray, np.generic)) or is_on_device(value):
        return "EagerTensor"
    return _CLASS_NAMES.get(type(value).__name__, type(value).__name__)


def context_state(env: Env) -> Json:
    """What the context functions say here and now."""
    context, strategy = ms.get_replica_context(), ms.get_strategy()
    return {
        "get_replica_context": context_name(context),
        "in_cross_replica_context": ms.in_cross_replica_context(),
        "has_strategy": ms.has_strategy(),
        "get_strategy": "the strategy" if strategy is env.strategy else strategy_name(strategy),
        "get_strategy().num_replicas_in_sync": strategy.num_replicas_in_sync,
    }
