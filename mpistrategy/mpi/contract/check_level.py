"""Whether calls are compared where a comparison costs a message: "always" or "off".

Within a node the comparison travels with the data and is always made.  Between nodes it travels in the first message of
each call, with the data where they are a few sums.  "off" leaves this message out where the call needs no barrier.
"""

from __future__ import annotations

import os
from typing import Any

from mpistrategy.errors import OptionError
from mpistrategy.objects.nearest import did_you_mean

#: The environment variable that chooses the level.
VARIABLE = "MPISTRATEGY_CHECK"
ALWAYS, OFF = LEVELS = ("always", "off")


def parse(value: Any, where: str, name: str = "") -> str:
    """Return the level that `value` names.

    Raises:
        OptionError: for anything else.
    """
    if isinstance(value, str) and value.lower() in LEVELS:
        return value.lower()
    raise OptionError.at(
        where,
        found=f"{name}{value!r}",
        expected=" or ".join(f'"{level}"' for level in LEVELS),
        fix=did_you_mean(value, LEVELS),
    )


def chosen(given: Any, where: str = "MirroredStrategy") -> str:
    """Return the level of a strategy: the argument `check`, else the variable, else "always"."""
    if given is not None:
        return parse(given, where, "check=")
    text = os.environ.get(VARIABLE, "")
    return parse(text, VARIABLE) if text else ALWAYS
