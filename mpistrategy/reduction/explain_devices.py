"""What `Strategy.explain` says about arrays in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.options import CommunicationOptions
from mpistrategy.reduction.explain_ways import size_in_words
from mpistrategy.reduction.layout import packing

_WORDS = {
    "alone": "they stay where they are, on the only replica",
    "mpi": "MPI gets pointers to GPU memory",
    "staged": "through pinned memory of the host in chunks of 4 MiB, three of them under way",
    "nccl": "by NCCL, on the current stream",
    "ipc": "each GPU reads its peers' memory",
}


def lines_of(
    communicator: Communicator,
    arrays: Sequence[Any],
    word: str | None,
    options: CommunicationOptions,
    num_packs: float = 0,
) -> list[str]:
    """Return what happens to arrays in GPU memory.

    Args:
        communicator: the ranks.
        arrays: the arrays; CuPy's, or their stand-ins with dtype, shape and nbytes.
        word: the path that is asked for, None where they go by way of the host.
        options: hints.
        num_packs: the algorithm's.
    """
    if not arrays:
        return []
    count = f"{len(arrays)} array{'s' * (len(arrays) > 1)} on a GPU, {size_in_words(sum(a.nbytes for a in arrays))}"
    if word is None:
        return [f"{count}: copied to the host, reduced as other arrays are, and copied back"]
    packs = packing.plan(arrays, options.bytes_per_pack, num_packs)
    paths = device_paths(communicator)
    path, reason = paths.known.get(word), paths.reasons.get(word, "")
    if path is None:
        how = "on a path that the ranks choose at the first such call"
    else:
        how = f"{_WORDS[path.name]} ({path.name}: {reason})"
    return [f"{count}: packed on the GPU into {len(packs)} bucket{'s' * (len(packs) > 1)}; {how}"]
