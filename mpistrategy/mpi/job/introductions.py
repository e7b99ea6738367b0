"""Ranks that have found each other introduce themselves: do their versions fit together?"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

from mpistrategy.errors import LaunchError
from mpistrategy.objects.shown import ranks_in_words


class Introduction(NamedTuple):
    """The introduction of a rank to the others, sent as JSON.

    Attributes:
        versions: of this package and of Python.
        leader: the first rank on its node.
        cores: the cores that it may use.
        directory: where the job's records would go, if this rank is the first.
    """

    versions: str
    leader: int
    cores: Sequence[int]
    directory: str = ""


@functools.cache
def version() -> str:
    """Return the version of this package."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def versions() -> str:
    """Return what must be equal on all ranks: the versions of this package and of Python."""
    return f"mpistrategy {version()}, Python {sys.version_info.major}.{sys.version_info.minor}"


def introductions(texts: Sequence[str], where: str = "MirroredStrategy") -> list[Introduction]:
    """Return the introductions of all ranks.

    Args:
        texts: the `Introduction` of every rank as JSON, in rank order.
        where: the public name in the error.

    Raises:
        LaunchError: when the ranks run different versions.  On every rank alike.
    """
    fields = [json.loads(text) for text in texts]
    ranks: dict[str, list[int]] = {}
    for rank, introduction in enumerate(fields):
        ranks.setdefault(str(introduction.get("versions", "?")), []).append(rank)
    if len(ranks) > 1:
        raise LaunchError.at(
            where,
            found="different versions: " + "; ".join(f"{text} on {ranks_in_words(ranks[text])}" for text in ranks),
            expected="the same on all ranks",
            fix="Give all nodes one environment: the same venv, container or module.",
        )
    return [Introduction(**rank_fields) for rank_fields in fields]
