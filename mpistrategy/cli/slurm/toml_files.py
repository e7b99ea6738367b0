"""Reading files in TOML: sites' profiles, and what a job is to be."""

from __future__ import annotations

import os
import tomllib
from typing import Any

from mpistrategy import own_files

#: Far more than a profile has; keys of many parts take tomllib quadratic time.
_MOST_BYTES = 2**14


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what is in a file.

    Raises:
        OSError: when it cannot be read, is not a regular file or is too large; where everybody can write, for somebody
            else's.
        ValueError: when it is not TOML, or nested too deeply.
    """
    name = os.path.realpath(path)
    descriptor = own_files.open_trusted(name)
    try:
        text = own_files.read_all(descriptor, _MOST_BYTES, name).decode()
    finally:
        os.close(descriptor)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
