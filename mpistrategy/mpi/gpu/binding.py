"""Which GPU each rank drives: a function of what all ranks see, which every rank computes alike.

Ranks that see a GPU in common share a node, or a part of one.  Among them each gets a GPU of its own, the one that is
nearest to its cores where the system tells; where it does not, or all are as near, they go round in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    bound: dict[int, Gpu] = {}
    for ranks in _groups(choices):
        offers = {rank: choices[rank] for rank in ranks}
        most = len(ranks) if sharing else 1
        for capacity in range(1, most + 1):
            taken, rivals = _distribute(offers, capacity)
            if not rivals:
                break
        if rivals:
            raise _shortage(offers, rivals, sights[ranks[0]].host, is_named=any(index is not None for index in named))
        bound |= taken
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


def _groups(choices: Sequence[Sequence[_Choice]]) -> list[list[int]]:
    """Return the ranks in groups: two that see a GPU in common are in one."""
    leader = list(range(len(choices)))

    def led_by(rank: int) -> int:
        while leader[rank] != rank:
            rank = leader[rank] = leader[leader[rank]]
        return rank

    first: dict[str, int] = {}
    for rank, seen in enumerate(choices):
        for choice in seen:
            one, other = led_by(rank), led_by(first.setdefault(choice.identity, rank))
            leader[max(one, other)] = min(one, other)
    groups: dict[int, list[int]] = {}
    for rank in range(len(choices)):
        groups.setdefault(led_by(rank), []).append(rank)
    return list(groups.values())


def _distribute(offers: Mapping[int, Sequence[_Choice]], capacity: int) -> tuple[dict[int, Gpu], set[str]]:
    """Give each rank one of its choices, the nearest first, and each GPU to at most `capacity` ranks.

    Returns:
        What each rank takes; and the GPUs that too many ranks want, none when all ranks have one.
    """
    holder: dict[tuple[str, int], int] = {}  # of each rank's share of a GPU
    taken: dict[int, Gpu] = {}

    def take(rank: int, reach: int, tried: set[tuple[str, int]]) -> bool:
        """Give `rank` a free place, or one whose holder can move to another."""
        near = sorted((choice for choice in offers[rank] if choice.distance <= reach), key=lambda each: each.distance)
        places = [(choice, (choice.identity, place)) for place in range(capacity) for choice in near]
        free = [each for each in places if each[1] not in holder]
        for choice, place in free[:1] or places:
            if place in holder:
                if place in tried:
                    continue
                tried.add(place)
                if not take(holder[place], reach, tried):
                    continue
            holder[place], taken[rank] = rank, choice.gpu
            return True
        return False

    # Near GPUs are given out first; ranks that got none take those further away.
    reaches = sorted({choice.distance for seen in offers.values() for choice in seen})
    for reach in reaches:
        for rank in offers:
            tried: set[tuple[str, int]] = set()
            if rank not in taken and not take(rank, reach, tried) and reach == reaches[-1]:
                return {}, {identity for identity, _ in tried}
    return taken, set()


def _shortage(offers: Mapping[int, Sequence[_Choice]], wanted: set[str], host: str, *, is_named: bool) -> DeviceError:
    """Return the error of ranks that have too few GPUs between them."""
    ranks = [rank for rank, seen in offers.items() if {choice.identity for choice in seen} <= wanted]
    shown = [choice.gpu for choice in offers[ranks[0]]]
    if is_named:
        fix = "Name another GPU for each rank of the node"
    elif len(shown) == 1:
        fix = (
            f"If {host} has more, let each rank see one of its own or all of them (srun --gpus-per-task=1, or no "
            "CUDA_VISIBLE_DEVICES); if not, start one rank there"
        )
    else:
        fix = f"Start at most {len(wanted)} ranks there"
    return DeviceError.at(
        _WHERE,
        found=f"{ranks_in_words(ranks)} on {host} with {len(wanted)} GPU{'s' * (len(wanted) > 1)} between them: "
        f"{', '.join(sorted(wanted))}",
        expected="a GPU for each rank",
        fix=f"{fix}; {_SHARED}.",
    )
