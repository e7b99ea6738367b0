"""Whether calls are compared where a comparison costs a message: "always" or "off".

Within a node the comparison travels with the data and is always made.  Between nodes it travels in the first message of
each call, with the data where they are a few sums.  "off" leaves this message out where the call needs no barrier.
"""

from __future__ import annotations

import os
from typing import Any

from mpistrategy.objects.settings import one_of

#: The environment variable that chooses the level.
VARIABLE = "MPISTRATEGY_CHECK"
ALWAYS, OFF = LEVELS = ("always", "off")


def level_of(check: Any) -> str:
    """Return the level of a strategy: the argument `check`, else the variable, else "always".

    Raises:
        OptionError: for any other value.
    """
    name, value = (VARIABLE, os.environ.get(VARIABLE) or ALWAYS) if check is None else ("check", check)
    return one_of("MirroredStrategy", name, value, LEVELS)
