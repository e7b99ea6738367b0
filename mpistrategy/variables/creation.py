"""Checks of the arguments that a variable is created with."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy import context
from mpistrategy.arrays.dtypes import dtype_name, is_bfloat16
from mpistrategy.errors import DTypeError, OptionError, OutsideStepWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.variables.policies import CREATION, NEEDS_FLOATING
from mpistrategy.variables.protocols import Extended


def check_place(synchronization: VariableSynchronization, aggregation: VariableAggregation) -> None:
    """Raise ContextError, or warn, outside every scope once a strategy of several ranks was made.

    A variable is then this rank's own.  It raises where the ranks' values are to be combined.
    """
    is_combined = synchronization is VariableSynchronization.ON_READ or aggregation is not VariableAggregation.NONE
    if is_combined:
        context.refuse_outside("Variable", f"a variable {synchronization.name}/{aggregation.name}")
    elif context.current_frame() is None and context.has_peers():
        warn(
            "Variable was made outside scope(): it is this rank's own, and its values may differ between ranks. Make "
            "it in `with strategy.scope():`. If this rank alone is meant, make it in the scope of a OneDeviceStrategy.",
            OutsideStepWarning,
        )


def kept_as(given: VariableSynchronization, extended: Extended) -> VariableSynchronization:
    """Return the synchronization that a variable gets.

    Raises:
        OptionError: for one that variables of several replicas cannot have.
    """
    if extended._is_local:
        return given
    kept = CREATION[given].kept_as
    if kept is None:
        raise OptionError.at(
            "Variable",
            found=f"synchronization={given.name} in the scope of a strategy of several replicas",
            expected="AUTO, ON_WRITE or ON_READ",
            fix="Create variables of one rank in the scope of a OneDeviceStrategy.",
        )
    return kept


def check_dtype(dtype: np.dtype[Any], aggregation: VariableAggregation, extended: Extended) -> None:
    """Raise DTypeError or OptionError for a dtype that variables with this aggregation cannot have."""
    if dtype.hasobject or dtype.kind in "SU":
        raise DTypeError.at("Variable", found=f"dtype {dtype}", expected="a numeric or bool dtype")
    floating = dtype.kind == "f" or is_bfloat16(dtype)
    if aggregation in NEEDS_FLOATING and not floating and not extended._is_local:
        raise OptionError.at(
            "Variable",
            found=f"aggregation={aggregation.name} of dtype {dtype_name(dtype)}",
            expected="a floating dtype",
            fix="Use SUM.",
        )


def parsed_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype; raise DTypeError for what is none."""
    try:
        parsed: np.dtype[Any] = np.dtype(dtype)
        return parsed
    except TypeError as error:
        raise DTypeError.at("Variable", found=f"dtype={dtype!r}", expected="a NumPy dtype") from error
