"""How long a collective may wait for the other ranks."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import Any

from mpistrategy.errors import OptionError

#: The environment variable that sets the limit, in seconds; 0 means no limit.
VARIABLE = "MPISTRATEGY_TIMEOUT_SECONDS"
DEFAULT_SECONDS = 600.0


def limit(seconds: float) -> float:
    """Return the limit that `seconds` means: 0 is no limit."""
    return float(seconds) or math.inf


def expected() -> float:
    """Return the limit before a strategy exists; a malformed variable raises later, on all ranks."""
    try:
        return limit_of()
    except OptionError:
        return DEFAULT_SECONDS


def limit_of(argument: Any = None) -> float:
    """Return the limit of a strategy: its argument, else the variable, else `DEFAULT_SECONDS`.

    Raises:
        OptionError: for a variable that is not a number, or is negative.
    """
    if argument is not None:
        return limit(argument)
    text, seconds = os.environ.get(VARIABLE) or str(DEFAULT_SECONDS), math.nan
    with suppress(ValueError):
        seconds = float(text)
    if not seconds >= 0:
        raise OptionError.at(VARIABLE, found=repr(text), expected="seconds >= 0 (0: no limit)")
    return limit(seconds)
