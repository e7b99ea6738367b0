"""Which path buffers in GPU memory take: all ranks choose it together, at the first such buffer.

For one strategy there is one path, from then on, whatever later calls ask for: NCCL and an MPI that gets pointers to
the memory of the same GPUs can block each other.  MPISTRATEGY_GPU_PATH names one; without it the order is NCCL, then
MPI where it is known to take GPU memory, then the host (staged).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpistrategy.arrays.convert import cupy_for
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.gpu import cuda_aware, device_selection
from mpistrategy.mpi.gpu.transports import nccl
from mpistrategy.mpi.gpu.transports.by_mpi import DirectPath, StagedPath
from mpistrategy.mpi.interface.gpu_transport import UNCHOSEN, DevicePath, PathName, chosen_path
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.shown import ranks_by, ranks_in_words
from mpistrategy.options import GPU_PATH, CommunicationOptions, path_word

_WHERE = "the path of arrays in GPU memory"
#: The fastest first.
_ORDER: tuple[PathName, ...] = ("nccl", "mpi", "staged")


class Abilities(NamedTuple):
    """What one rank has.

    Attributes:
        gpu: the unique name of its GPU; "" if unknown.
        nccl: the version of CuPy's NCCL; 0 without one.
        against_mpi: why its MPI gets no GPU memory; "" where it takes it.
    """

    gpu: str = ""
    nccl: int = 0
    against_mpi: str = ""


def _own_abilities(ranks: Ranks) -> Abilities:
    cupy = cupy_for(_WHERE)
    if ranks.size == 1 or ranks.is_simulated:
        return Abilities()
    gpus, number = device_selection.look().gpus, cupy.cuda.runtime.getDevice()
    gpu = gpus[number].name if number < len(gpus) else ""
    return Abilities(gpu, nccl.version(), cuda_aware.obstacle(ranks.nodes))


def device_path(ranks: Ranks, word: str = "") -> DevicePath:
    """Return the path; the first time the ranks choose it together, inside an agreed call.

    Args:
        ranks: the ranks that take part.
        word: what the first call asks for; see `mpistrategy.options.path_word`.  Broadcasts, gathers and assignments
            ask for nothing.

    Raises:
        UnsupportedError: without a CuPy that works.
        MpiStrategyError: on every rank, when one cannot have the path.
    """
    chosen = chosen_path(ranks)
    if chosen is not UNCHOSEN:
        return chosen
    with Call(ranks.guard, _WHERE) as call:
        call.expect_more()  # a rank that fails from here on must tell the others
        word = word or path_word(CommunicationOptions())
        own_text = json.dumps(_own_abilities(ranks))
        call.agree("look for the path of arrays in GPU memory", options=f"{GPU_PATH}, or implementation=, says {word}")
        abilities = [Abilities(*json.loads(text)) for text in ranks.allgather_text(own_text)]
        call.expect_more()
        path, reason, is_second_best = _choose(ranks, word, abilities)
        if is_second_best and ranks.rank == 0:  # before the agreement: warnings may be errors
            warn(f"{_WHERE} is {path.name}: {reason}", FallbackWarning)
        call.agree("use the path of arrays in GPU memory")
    path.reason = reason
    return ranks.once(DevicePath, lambda: path)


def _choose(ranks: Ranks, word: str, abilities: Sequence[Abilities]) -> tuple[DevicePath, str, bool]:
    """Return the path, and the answers of `in_words`; the same on all ranks.  Collective."""
    if ranks.size == 1:
        return DevicePath(), "one rank", False
    if ranks.is_simulated:
        return StagedPath(), "these replicas are threads", False
    against, is_broken = obstacles(abilities), False
    for name in candidates(word):
        if not against[name]:
            path = nccl.join(ranks) if name == "nccl" else DirectPath() if name == "mpi" else StagedPath()
            if not isinstance(path, str):
                return path, *in_words(name, word, against, abilities, is_broken=is_broken)
            against[name], is_broken = path, True
    raise AssertionError("staged can always be")


def candidates(word: str) -> list[PathName]:
    """Return the paths for a word, in the order in which they are taken."""
    return [*(name for name in _ORDER if name == word), *_ORDER[word == "ring" :]]


def obstacles(ranks: Sequence[Abilities]) -> dict[PathName, str]:
    """Return why each path cannot be, from the abilities of each rank; "" where it can."""
    refusing = ranks_by(rank.against_mpi for rank in ranks)
    by_mpi = "; ".join(f"{why} ({ranks_in_words(numbers)})" for why, numbers in refusing.items() if why)
    return {"nccl": _against_nccl(ranks), "mpi": by_mpi, "staged": ""}


def _against_nccl(ranks: Sequence[Abilities]) -> str:
    without = [number for number, rank in enumerate(ranks) if not rank.nccl]
    if without:
        return f"CuPy has no NCCL on {ranks_in_words(without)}"
    if len({rank.nccl // 100 for rank in ranks}) > 1:  # the last two digits are a patch level
        return f"NCCL of different versions ({', '.join(map(str, sorted({rank.nccl for rank in ranks})))})"
    holders = ranks_by(rank.gpu for rank in ranks)
    sharing = next((numbers for gpu, numbers in holders.items() if gpu and len(numbers) > 1), [])
    return f"{ranks_in_words(sharing)} on one GPU, which NCCL refuses" if sharing else ""


def in_words(
    name: PathName, word: str, against: Mapping[PathName, str], ranks: Sequence[Abilities], *, is_broken: bool = False
) -> tuple[str, bool]:
    """Return why a path was chosen, and whether to warn: where it was not asked for, and a better path is thinkable.

    Args:
        name: of the path.
        word: the path that was asked for.
        against: why paths cannot be.
        ranks: the abilities of each rank.
        is_broken: whether NCCL is there, and does not work.
    """
    if name == word:
        return "as asked for", False
    before = dict.fromkeys(candidates(word)[: candidates(word).index(name)])
    reason = f"not {'; '.join(f'{path} ({against[path]})' for path in before)}" if before else "the fastest"
    if name == "staged":
        nccl_too = "Install NCCL: pip install nvidia-nccl-cu12, or nvidia-nccl-cu13"
        if all(rank.nccl for rank in ranks):
            nccl_too = 'Let each rank drive a GPU of its own, as devices="gpu" does: NCCL needs that'
        reason += (
            f". {nccl_too}; or run mpistrategy doctor once, as you start your program: it tries whether MPI takes GPU "
            "memory; or export MPISTRATEGY_GPU_PATH=staged, and this is as you ask for"
        )
    return reason, name == "staged" or is_broken or word in _ORDER
