"""Ranks that have found each other introduce themselves: do their versions fit together, and their layout?"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mpistrategy.errors import LaunchError
from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.objects.shown import ranks_in_words


@dataclass(frozen=True)
class Introduction:
    """What a rank says when it meets the others.

    Attributes:
        mpistrategy: the version of this package.
        python: the version of Python: major and minor.
        size: how many ranks there are, as far as this one knows.
        leader: the first rank on its node.
        local_size: how many ranks its node has.
        cores: the cores that it may use.
        directory: where the job's records would go, if this rank is the first.
    """

    mpistrategy: str
    python: str
    size: int
    leader: int
    local_size: int
    cores: tuple[int, ...]
    directory: str = ""

    @classmethod
    def of_this_rank(cls, rank: int, size: int, leader: int, local_size: int, cores: Sequence[int]) -> Introduction:
        """Return what this rank says."""
        directory = run_directory.new_path() if rank == 0 else ""
        return cls(version(), python_version(), size, leader, local_size, tuple(cores), directory)

    def text(self) -> str:
        """Return it as a text for the others."""
        return json.dumps(asdict(self))


@functools.cache
def version() -> str:
    """Return the version of this package."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def python_version() -> str:
    """Return the version of Python: major and minor."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def introductions(texts: Sequence[str], where: str = "MirroredStrategy") -> list[Introduction]:
    """Return what all ranks said.

    Args:
        texts: `Introduction.text` of every rank, in rank order.
        where: the public name that the error speaks of.

    Raises:
        LaunchError: when the ranks run different versions, or do not agree on who is where.  On every rank alike.
    """
    told = [json.loads(text) for text in texts]
    for key, what, fix in _MUST_BE_EQUAL:
        _compare([str(each.get(key, "?")) for each in told], what, fix, where)
    ranks = [Introduction(**{**each, "cores": tuple(each["cores"])}) for each in told]
    _compare([str(each.size) for each in ranks], "numbers of ranks", _ANOTHER_START, where)
    leaders = [each.leader for each in ranks]
    sizes = Counter(leaders)
    for rank, each in enumerate(ranks):
        on_node = sizes[each.leader]
        is_led = each.leader <= rank and leaders[each.leader] == each.leader
        if each.size != len(ranks) or each.local_size != on_node or not is_led:
            raise LaunchError.at(
                where,
                found=f"rank {rank} counting {each.local_size} ranks on the node of rank {each.leader} and {each.size} "
                f"in all, where {on_node} and {len(ranks)} say so",
                expected="ranks that agree on who is on which node",
                fix=_ANOTHER_START,
            )
    return ranks


_ANOTHER_START = "Start the job anew, all ranks with one launcher and one MPI."
_MUST_BE_EQUAL = (
    ("mpistrategy", "versions of mpistrategy", "Give all nodes one environment: the same venv, container or module."),
    ("python", "versions of Python", "Give all nodes one environment: the same venv, container or module."),
)


def _compare(values: Sequence[str], what: str, fix: str, where: str) -> None:
    if len(set(values)) <= 1:
        return
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    shown = "; ".join(f"{value} on {ranks_in_words(members)}" for value, members in ranks.items())
    raise LaunchError.at(where, found=f"different {what}: {shown}", expected="the same on all ranks", fix=fix)
