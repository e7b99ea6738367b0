"""Which path buffers in GPU memory take: a decision over what all ranks can do, the same on every rank.

For one strategy there is one path, from the first such buffer on: NCCL and an MPI that gets pointers to the memory of
the same GPUs can block each other.  MPISTRATEGY_GPU_PATH names one; without it the order is NCCL, then what the ranks
of one node can do among themselves (ipc), then MPI where it is known to take GPU memory, then the host (staged).
Between nodes with several ranks, MPI and the host get from each rank what it has combined with its node (ipc+mpi,
ipc+staged).  NCCL does the like itself, over all ranks; between nodes alone it would serve only ranks that share a GPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from mpistrategy.mpi.gpu.cuda_aware import Answer, weakest
from mpistrategy.mpi.interface.gpu_transport import PathName
from mpistrategy.objects.shown import ranks_in_words

#: The fastest first.
_ORDER: tuple[PathName, ...] = ("nccl", "ipc", "ipc+mpi", "mpi", "ipc+staged", "staged")
_BY_MPI: tuple[PathName, ...] = ("mpi", "staged")


@dataclass(frozen=True)
class Abilities:
    """What one rank has.

    Attributes:
        gpu: the unique identity of its GPU; "" if unknown.
        node: the number of its node.
        nccl: the version of CuPy's NCCL; 0 without one.
        verdict: whether its MPI takes GPU memory: "yes", "no" or "unverified".
        reason: why.
        ipc: why its GPU memory cannot be opened by other processes; "" where it can.
    """

    gpu: str = ""
    node: int = 0
    nccl: int = 0
    verdict: str = "unverified"
    reason: str = "not looked at"
    ipc: str = "not looked at"

    def text(self) -> str:
        """Return it as a text for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Abilities:
        """Return what `text` was made of."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Choice:
    """The path of a strategy.

    Attributes:
        name: as users call it.
        reason: in words.
        is_second_best: whether somebody asked for another one, which cannot be, NCCL is there and fails, or several
            nodes go through the host.
    """

    name: PathName
    reason: str
    is_second_best: bool = False


def choose(
    ranks: Sequence[Abilities],
    word: str = "auto",
    taken: Sequence[str] = (),
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Choice:
    """Return the path for these ranks.

    Args:
        ranks: what each of them has.
        word: what is asked for; see `mpistrategy.options.path_word`.
        taken: the paths that the strategy has already.
        failed: why paths that were tried cannot be; the same on all ranks.
    """
    if len(ranks) == 1:
        return Choice("alone", "one rank")
    nodes = Counter(rank.node for rank in ranks)
    by_ipc = _against_ipc(ranks)
    obstacles: dict[str, str] = {
        "nccl": _against_nccl(ranks),
        "ipc": "several nodes" if len(nodes) > 1 else by_ipc,
        "mpi": _against_mpi(ranks),
        "staged": "",
    }
    used = {part for name in taken for part in name.split("+")}
    for one, other in (("nccl", "mpi"), ("mpi", "nccl")):
        if one in used:
            obstacles[other] = obstacles[other] or f"this strategy uses {one}, and the two can block each other"
    one_each = "one node" if len(nodes) == 1 else "no node has several ranks" if len(nodes) == len(ranks) else ""
    for between in _BY_MPI:
        obstacles[f"ipc+{between}"] = one_each or by_ipc or obstacles[between]
    obstacles |= failed
    named = next((name for name in _ORDER if name == word), None)
    if named is not None and not obstacles[named]:
        return Choice(named, "as asked for" + _uneven(named, nodes))
    open_to = _BY_MPI if word == "ring" else _ORDER
    first = next(name for name in open_to if not obstacles[name])
    # What is against both parts of a path, or against its second part, is said once.
    said = {name: "+" in name and obstacles[name] in (one_each, obstacles[name.partition("+")[2]]) for name in _ORDER}
    skipped = [other for other in open_to[: open_to.index(first)] if not said[other]]
    asked = f"{word} cannot be: {obstacles[named]}" if named else ""
    why = "not " + "; ".join(f"{other} ({obstacles[other]})" for other in skipped) if skipped else "the fastest"
    reason = (asked or why) + _uneven(first, nodes)
    # An NCCL that is installed and does not work deserves a warning; ranks that cannot open each other's memory do not.
    slow = first.endswith("staged") and len(nodes) > 1
    if slow and not asked:
        reason += f". {_CURE}"
    return Choice(first, reason, is_second_best=bool(asked) or slow or "nccl" in failed)


#: Between nodes the host is the slowest way by far.
_CURE = (
    "Install NCCL: pip install nvidia-nccl-cu12, or nvidia-nccl-cu13; or run mpistrategy doctor once, as you start "
    "your program: it tries whether MPI takes GPU memory"
)


def _uneven(name: PathName, nodes: Mapping[int, int]) -> str:
    """Return what nodes of several sizes mean for a path by nodes."""
    sizes = sorted(set(nodes.values()))
    if "+" not in name or len(sizes) == 1:
        return ""
    return f"; nodes have {sizes[0]} to {sizes[-1]} ranks: those of a smaller node send more between nodes"


def _against_nccl(ranks: Sequence[Abilities]) -> str:
    without = [number for number, rank in enumerate(ranks) if not rank.nccl]
    if without:
        return f"CuPy has no NCCL on {ranks_in_words(without)}"
    versions = {rank.nccl // 100 for rank in ranks}  # the last two digits are a patch level
    if len(versions) > 1:
        return f"NCCL of different versions ({', '.join(map(str, sorted({rank.nccl for rank in ranks})))})"
    return _shared_gpu(ranks) and f"{_shared_gpu(ranks)}, which NCCL refuses"


def _against_ipc(ranks: Sequence[Abilities]) -> str:
    reasons = {rank.ipc: [n for n, r in enumerate(ranks) if r.ipc == rank.ipc] for rank in ranks if rank.ipc}
    return "; ".join(f"{reason} ({ranks_in_words(those)})" for reason, those in reasons.items())


def _against_mpi(ranks: Sequence[Abilities]) -> str:
    answer = weakest([Answer(rank.verdict, rank.reason) for rank in ranks])
    return "" if answer.is_yes else f"{answer.verdict}, {answer.reason}"


def _shared_gpu(ranks: Sequence[Abilities]) -> str:
    holders: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        if rank.gpu:
            holders.setdefault(rank.gpu, []).append(number)
    shared = [those for those in holders.values() if len(those) > 1]
    return f"{ranks_in_words(shared[0])} on one GPU" if shared else ""
