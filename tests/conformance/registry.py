"""The interpreter functions, by the name of the recorded program that they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .compare import Rounding
from .values import Json, UnsupportedProgramError

if TYPE_CHECKING:
    from .environment import Env

__all__ = ["PROGRAMS", "Program", "UnsupportedProgramError", "program"]

Function = Callable[["Env", dict[str, Any]], Any]
View = Callable[[Json, int, Json], Json]


@dataclasses.dataclass(frozen=True)
class Program:
    """One interpreter function and how its recordings are to be read.

    Attributes:
        name: the `program` of the recorded cases.
        function: called with the environment and the recorded inputs; returns observations by name, like the
            recorded program did (anything but a dict is the observation "result").
        copies: observations that list one entry a local replica (a process with n replicas has n, a rank has
        one). ignored: observations that describe TensorFlow's insides, by path prefix, e.g.
        ``"fields[_num_packs]"``. partial: the fault is on some replicas only: a rank that took no part in it
        may return normally. view: turns the recorded observations of a process with n replicas into those of
        one rank, where the
            general reading (own entry of every container) is not enough.
        rounding: the row of compare's table that bare numbers follow; None means that they are exact.
    """

    name: str
    function: Function
    copies: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    partial: bool = False
    view: View | None = None
    rounding: Rounding | None = None


PROGRAMS: dict[str, Program] = {}


def program(
    name: str,
    *,
    copies: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
    partial: bool = False,
    view: View | None = None,
    rounding: Rounding | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function as the meaning of the recorded program `name`."""

    def register(function: Function) -> Function:
        if name in PROGRAMS:
            raise ValueError(f"program {name!r} is registered twice")
        PROGRAMS[name] = Program(name, function, copies, ignored, partial, view, rounding)
        return function

    return register
