"""How long a collective may wait for the other ranks."""

from __future__ import annotations

import math
import os
from typing import Any

from mpistrategy.errors import OptionError

#: The environment variable that sets the limit, in seconds; 0 means no limit.
VARIABLE = "MPISTRATEGY_TIMEOUT_SECONDS"
DEFAULT_SECONDS = 600.0
_EXPECTED = "seconds >= 0 (0: no limit)"


def limit(seconds: float) -> float:
    """Return the limit that `seconds` means: 0 is no limit."""
    return float(seconds) or math.inf


def parse(text: str, where: str = VARIABLE) -> float:
    """Return the seconds that `text` names.

    Raises:
        OptionError: for text that is not a number, or a negative one.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise OptionError.at(where, found=f"{text!r}", expected=_EXPECTED)
    return limit(seconds)


def expected() -> float:
    """Return the limit before a strategy exists; a malformed variable raises later, on all ranks."""
    try:
        return chosen()
    except OptionError:
        return DEFAULT_SECONDS


def chosen(given: Any = None) -> float:
    """Return the limit of a strategy: its argument, else the variable, else `DEFAULT_SECONDS`."""
    if given is not None:
        return limit(given)
    text = os.environ.get(VARIABLE, "")
    return parse(text) if text else DEFAULT_SECONDS
