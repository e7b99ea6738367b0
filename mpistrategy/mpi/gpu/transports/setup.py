"""The path of a strategy for arrays in GPU memory: found out by all ranks together, at the first such array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.gpu import cuda_aware, cuda_trials, inventory, loaded_mpi
from mpistrategy.mpi.gpu.transports import nccl
from mpistrategy.mpi.gpu.transports.choice import Abilities, Choice, choose
from mpistrategy.mpi.gpu.transports.direct import DirectPath
from mpistrategy.mpi.gpu.transports.staged import StagedPath
from mpistrategy.mpi.interface.gpu_transport import Alone, DevicePath, PathName, device_paths
from mpistrategy.options import GPU_PATH, CommunicationOptions, path_word

if TYPE_CHECKING:
    from mpistrategy.mpi.interface.ranks import Ranks

_WHERE = "the path of arrays in GPU memory"
_OF_THREADS = Choice("staged", "these replicas are threads")


def device_path(ranks: Ranks, word: str, nbytes: int) -> DevicePath:
    """Return the path for `word`; the first time the ranks find out together, inside an agreed call.

    Args:
        ranks: who takes part.
        word: see `mpistrategy.options.path_word`.
        nbytes: of the largest buffer that follows; a path that is known has made room for it before the agreement.

    Raises:
        UnsupportedError: without a CuPy that works.
        MpiStrategyError: on every rank, when one cannot have the path.
    """
    paths = device_paths(ranks)
    known = paths.known.get(word)
    if known is not None:
        return known
    with Call(ranks.guard, _WHERE) as call:
        call.expect_more()  # a rank that fails from here on must tell the others
        mine = _abilities(ranks)
        call.agree("look for the path of arrays in GPU memory", options=f"{GPU_PATH}, or implementation=, says {word}")
        everyone = [Abilities.read(text) for text in ranks.allgather_text(mine.text())]
        call.expect_more()
        failed: dict[str, str] = {}
        while True:
            choice = _OF_THREADS if _are_threads(ranks) else choose(everyone, word, list(paths.by_name), failed)
            path = paths.by_name.get(choice.name) or _make(choice.name, ranks)
            if not isinstance(path, str):
                break
            failed[choice.name] = path
        paths.by_name[choice.name] = path  # the path exists, whether or not this call succeeds
        path.make_room(nbytes)
        if choice.is_second_best and ranks.rank == 0:  # before the agreement: warnings may be errors
            warn(f"{_WHERE} is {choice.name}: {choice.reason}", FallbackWarning)
        call.agree("use the path of arrays in GPU memory")
    paths.reasons[word] = choice.reason
    if (
        choice.name == "nccl"
        and ranks.nodes > 1
        and (network := cuda_trials.network_of_nccl(loaded_mpi.evidence().version))
    ):
        paths.reasons[word] += f"; {network}"
    paths.known[word] = path
    return path


def make_room_on_known(ranks: Ranks, nbytes: int) -> None:
    """Let the path of `any_path`, if there is one, take what buffers of so many bytes need; before the ranks agree."""
    for path in list(device_paths(ranks).known.values())[:1]:
        path.make_room(nbytes)


def any_path(ranks: Ranks, nbytes: int) -> DevicePath:
    """Return the path that these ranks have already, else `device_path` of the usual word.

    For calls that choose no path: broadcasts, gathers, assignments.
    """
    for path in device_paths(ranks).known.values():
        return path
    return device_path(ranks, path_word(CommunicationOptions()), nbytes)


def _make(name: PathName, ranks: Ranks) -> DevicePath | str:
    """Return the path, or why it cannot be, on all ranks alike."""
    if name == "alone":
        return Alone()
    if name == "nccl":
        return nccl.join(ranks)
    if name == "mpi":
        return DirectPath()
    return StagedPath()


def _are_threads(ranks: Ranks) -> bool:
    return ranks.is_simulated and ranks.size > 1


def _abilities(ranks: Ranks) -> Abilities:
    cupy = cupy_for(_WHERE)
    if ranks.size == 1 or ranks.is_simulated:
        return Abilities()
    answer = _takes_gpu_memory(ranks.nodes)
    return Abilities(
        gpu=inventory.identity(cupy.cuda.runtime.getDevice()),
        nccl=nccl.version(cupy),
        verdict=answer.verdict,
        reason=answer.reason,
    )


def _takes_gpu_memory(nodes: int) -> cuda_aware.Answer:
    word, evidence = cuda_aware.said(), loaded_mpi.evidence()
    return cuda_trials.verified(cuda_aware.decide(evidence, word), evidence.version, word, nodes)
