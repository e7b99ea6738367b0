"""The types that the overloads of reductions and gathers are written with; nothing happens here at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
#: The scalar type of an array.
S = TypeVar("S", bound=np.generic)
#: The arguments of a step function.
Ts = TypeVarTuple("Ts")

#: An axis, several, or none.
Axis: TypeAlias = "int | Sequence[int] | None"
Integers: TypeAlias = NDArray[np.integer[Any]]
Floats: TypeAlias = NDArray[np.floating[Any]]


class Named(TypedDict, total=False):
    """The keywords of every collective."""

    name: str | None


class WithOut(Named, total=False):
    """The keywords of a reduction that may be given memory."""

    out: Any


class OutAndWeight(WithOut, total=False):
    """The keywords of `ReplicaContext.all_reduce`."""

    weight: Any


class WithWeight(Named, total=False):
    """The keywords of `Strategy.reduce`."""

    weight: Any
