"""The declared collectives of the replica context, and calls of each: tables of tests are made of them.

A call is made of the method's signature.  So a new collective is in these tables as soon as it is declared; one with a
parameter of another name needs a value for it in `ORDINARY`.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from replicas import context

import mpistrategy as ms
from mpistrategy.mpi.contract.public_calls import PublicCall, all_declared

#: What the parameters of collectives are given.
ORDINARY: dict[str, Any] = {"reduce_op": "SUM", "value": np.ones(3), "axis": 0}
#: The same, other than that on one rank.
OTHER: dict[str, Any] = {"reduce_op": "MAX", "value": np.ones((3, 3), np.float32), "axis": 1, "name": "odd"}
_OWNER = "ReplicaContext."

#: The collectives of the replica context, by the name of the method.
IN_STEPS: dict[str, PublicCall] = {
    name.removeprefix(_OWNER): call for name, call in all_declared().items() if name.startswith(_OWNER)
}


def parameters(method: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a collective."""
    found = dict(inspect.signature(IN_STEPS[method].function).parameters)
    del found["self"]
    return found


def arguments(method: str, **chosen: Any) -> dict[str, Any]:
    """Return arguments for a collective: those of `ORDINARY` without a default, and what is chosen of those it has."""
    known = parameters(method)
    given = {name: ORDINARY[name] for name, parameter in known.items() if parameter.default is parameter.empty}
    return given | {name: value for name, value in chosen.items() if name in known}


def in_words(method: str, **words: str) -> str:
    """Return the arguments of a collective as source text; those of `words` are texts."""
    given = arguments(method)
    return ", ".join(f"{name}={words.get(name, repr(value))}" for name, value in given.items())


def takes(method: str, **chosen: Any) -> bool:
    """Return whether a collective takes such arguments: one replica tries them."""
    try:
        ms.OneDeviceStrategy().run(lambda: called(method, **chosen))
    except ms.errors.MpiStrategyError:
        return False
    return True


def called(method: str, on: ms.ReplicaContext | None = None, **chosen: Any) -> Any:
    """Call a collective of a context, of that of the step where none is given; return its result, waited for."""
    result = getattr(on or context(), method)(**arguments(method, **chosen))
    return result.wait() if isinstance(result, ms.AllReduceHandle) else result


def variants(method: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return, for each parameter, arguments that differ in it alone; all ranks must give the same."""
    square: dict[str, Any] = {"value": np.ones((3, 3))}
    known = parameters(method)
    flags = {name: not each.default for name, each in known.items() if isinstance(each.default, bool)}
    return {
        name: (arguments(method, **square), arguments(method, **square) | {name: value})
        for name, value in (OTHER | flags).items()
        if name in known
    }
