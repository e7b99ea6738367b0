"""Which GPU each rank drives: a function of what all ranks see, which every rank computes alike.

In rank order, those that see fewer first, each takes the GPU that is nearest to its cores of those that are free.
Where the system does not tell the distances, or all are as near, that is the first in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mpistrategy.errors import DeviceError
from mpistrategy.mpi.gpu.inventory import Gpu, Sight
from mpistrategy.objects.shown import ranks_in_words

_WHERE = "MirroredStrategy"
_NO_GPUS = 'for CPUs leave devices out, or give devices="cpu"'
_SHARED = 'to share on purpose give devices="shared"'
_FAR = 255


@dataclass(frozen=True)
class _Choice:
    """A GPU that a rank may take.

    Attributes:
        identity: the same for all ranks that see this GPU.
        gpu: as the rank sees it.
        distance: from the rank's cores.
    """

    identity: str
    gpu: Gpu
    distance: int


def bind(
    sights: Sequence[Sight], node_of: Sequence[int], *, sharing: bool = False, named: Sequence[int | None] = ()
) -> tuple[Gpu, ...]:
    """Return the GPU of each rank.

    Args:
        sights: what each rank sees.
        node_of: the node of each rank.
        sharing: whether ranks may share a GPU where there are not enough; as evenly as can be, then.
        named: the index that each rank was told to take, if any.

    Raises:
        DeviceError: when a rank sees no GPU or not the one that it was told, or when ranks would have to share one.
    """
    _refuse_blind(sights)
    choices = [_choices(sight, node) for sight, node in zip(sights, node_of, strict=True)]
    for rank, index in enumerate(named):
        if index is not None:
            choices[rank] = [_named(choices[rank], index, rank)]
    holders, bound = Counter[str](), dict[int, Gpu]()
    for rank in sorted(range(len(choices)), key=lambda rank: len(choices[rank])):
        taken = min(choices[rank], key=lambda each: (holders[each.identity], each.distance))
        if holders[taken.identity] and not sharing:
            raise _shortage(choices, rank, sights[rank].host, is_named=any(index is not None for index in named))
        holders[taken.identity] += 1
        bound[rank] = taken.gpu
    return tuple(bound[rank] for rank in range(len(sights)))


def bind_if_possible(sights: Sequence[Sight], node_of: Sequence[int]) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPU of each rank, or none at all and why not.

    The reason is "" where no GPUs were expected: no rank sees one, and nothing is broken.
    """
    try:
        return bind(sights, node_of), ""
    except DeviceError as error:
        expected = any(sight.gpus or sight.is_strange for sight in sights)
        return (), str(error) if expected else ""


def _refuse_blind(sights: Sequence[Sight]) -> None:
    blind = [rank for rank, sight in enumerate(sights) if not sight.gpus]
    if not blind:
        return
    reasons: dict[str, list[int]] = {}
    for rank in blind:
        reasons.setdefault(sights[rank].reason, []).append(rank)
    shown = "; ".join(f"{reason} on {_on_hosts(sights, ranks)}" for reason, ranks in reasons.items())
    raise DeviceError.at(
        _WHERE, found=shown, expected="a GPU for each rank", fix=f"{sights[blind[0]].fix}; {_NO_GPUS}."
    )


def _on_hosts(sights: Sequence[Sight], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(sights[rank].host for rank in ranks))
    more = f" and {len(hosts) - 1} more nodes" if len(hosts) > 1 else ""
    return f"{ranks_in_words(ranks)} ({hosts[0]}{more})"


def _choices(sight: Sight, node: int) -> list[_Choice]:
    """Return the GPUs that a rank sees, in its order; one without a name is identified by place or number."""
    distances = dict(sight.distances)
    made = []
    for gpu in sight.gpus:
        identity = gpu.uuid or f"{gpu.pci_bus_id or gpu.index} on node {node}"
        known = gpu.numa_node is not None and bool(distances)
        made.append(_Choice(identity, gpu, distances.get(gpu.numa_node or 0, _FAR) if known else 0))
    return made


def _named(choices: Sequence[_Choice], index: int, rank: int) -> _Choice:
    found = next((choice for choice in choices if choice.gpu.index == index), None)
    if found is None:
        raise DeviceError.at(
            _WHERE,
            found=f"GPU:{index} for rank {rank}, which sees {', '.join(str(choice.gpu) for choice in choices)}",
            expected="a GPU that the rank sees",
            fix='devices="gpu" takes those that are there, whatever their numbers.',
        )
    return found


def _shortage(choices: Sequence[Sequence[_Choice]], rank: int, host: str, *, is_named: bool) -> DeviceError:
    """Return the error of ranks that have too few GPUs between them: those that see no others than this rank."""
    wanted = {choice.identity for choice in choices[rank]}
    ranks = [other for other, seen in enumerate(choices) if {choice.identity for choice in seen} <= wanted]
    shown = [choice.gpu for choice in choices[rank]]
    if is_named:
        fix = "Name another GPU for each rank of the node"
    elif len(shown) == 1:
        fix = (
            f"If {host} has more, let each rank see one of its own or all of them (srun --gpus-per-task=1, or no "
            "CUDA_VISIBLE_DEVICES); if not, start one rank there"
        )
    else:
        fix = f"Start at most {len(wanted)} ranks there, or let all ranks of the node see all its GPUs"
    return DeviceError.at(
        _WHERE,
        found=f"{ranks_in_words(ranks)} on {host} with {len(wanted)} GPU{'s' * (len(wanted) > 1)} between them: "
        f"{', '.join(sorted(wanted))}",
        expected="a GPU for each rank",
        fix=f"{fix}; {_SHARED}.",
    )
