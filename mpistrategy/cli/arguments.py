"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress


def positive(text: str) -> float:
    """Read a positive number."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
