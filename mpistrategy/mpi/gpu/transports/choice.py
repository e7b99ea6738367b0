"""Which path buffers in GPU memory take: a decision over what all ranks can do, the same on every rank.

For one strategy there is one path, from the first such buffer on: NCCL and an MPI that gets pointers to the memory of
the same GPUs can block each other.  MPISTRATEGY_GPU_PATH names one; without it the order is NCCL, then MPI where it is
known to take GPU memory, then the host (staged).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from mpistrategy.mpi.gpu.cuda_aware import Answer, weakest
from mpistrategy.mpi.interface.gpu_transport import PathName
from mpistrategy.objects.shown import ranks_in_words

#: The fastest first.
_ORDER: tuple[PathName, ...] = ("nccl", "mpi", "staged")
_BY_MPI: tuple[PathName, ...] = ("mpi", "staged")


@dataclass(frozen=True)
class Abilities:
    """What one rank has.

    Attributes:
        gpu: the unique identity of its GPU; "" if unknown.
        nccl: the version of CuPy's NCCL; 0 without one.
        verdict: whether its MPI takes GPU memory: "yes", "no" or "unverified".
        reason: why.
    """

    gpu: str = ""
    nccl: int = 0
    verdict: str = "unverified"
    reason: str = "not looked at"

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
        is_second_best: whether somebody asked for another one, which cannot be, NCCL is there and fails, or arrays go
            through the host though nobody asked for that.
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
    obstacles: dict[str, str] = {"nccl": _against_nccl(ranks), "mpi": _against_mpi(ranks), "staged": ""}
    for one, other in (("nccl", "mpi"), ("mpi", "nccl")):
        if one in taken:
            obstacles[other] = obstacles[other] or f"this strategy uses {one}, and the two can block each other"
    obstacles |= failed
    named = next((name for name in _ORDER if name == word), None)
    if named is not None and not obstacles[named]:
        return Choice(named, "as asked for")
    open_to = _BY_MPI if word == "ring" else _ORDER
    first = next(name for name in open_to if not obstacles[name])
    skipped = [f"{name} ({obstacles[name]})" for name in open_to[: open_to.index(first)]]
    why = f"not {'; '.join(skipped)}" if skipped else "the fastest"
    reason = f"{named} cannot be: {obstacles[named]}" if named else why
    if first == "staged":
        reason += f". {_cure(ranks)}"
    return Choice(first, reason, is_second_best=named is not None or first == "staged" or "nccl" in failed)


def _cure(ranks: Sequence[Abilities]) -> str:
    """Return what makes arrays travel faster than through the host."""
    nccl = "Install NCCL: pip install nvidia-nccl-cu12, or nvidia-nccl-cu13"
    if all(rank.nccl for rank in ranks):
        nccl = 'Let each rank drive a GPU of its own, as devices="gpu" does: NCCL needs that'
    return (
        f"{nccl}; or run mpistrategy doctor once, as you start your program: it tries whether MPI takes GPU memory; "
        "or export MPISTRATEGY_GPU_PATH=staged, and this is as you ask for"
    )


def _against_nccl(ranks: Sequence[Abilities]) -> str:
    without = [number for number, rank in enumerate(ranks) if not rank.nccl]
    if without:
        return f"CuPy has no NCCL on {ranks_in_words(without)}"
    versions = {rank.nccl // 100 for rank in ranks}  # the last two digits are a patch level
    if len(versions) > 1:
        return f"NCCL of different versions ({', '.join(map(str, sorted({rank.nccl for rank in ranks})))})"
    return _shared_gpu(ranks) and f"{_shared_gpu(ranks)}, which NCCL refuses"


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
