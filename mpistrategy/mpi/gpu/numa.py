"""How far the cores of this process are from the memory and the GPUs of its node, as far as the system tells."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def distances(cores: Iterable[int], nodes: Path = _NODES) -> dict[int, int]:
    """Return the distance of each NUMA node from the nearest of `cores`: 10 is its own, more is further away.

    Args:
        cores: the numbers of the cores that this process may use.
        nodes: where the system describes its NUMA nodes.

    Returns:
        By the number of the node; empty where the system does not tell.
    """
    mine, nearest = set(cores), dict[int, int]()
    with suppress(OSError, ValueError):
        folders = {int(folder.name.removeprefix("node")): folder for folder in nodes.glob("node[0-9]*")}
        for number in sorted(folders):
            if mine.isdisjoint(_numbers((folders[number] / "cpulist").read_text())):
                continue
            row = map(int, (folders[number] / "distance").read_text().split())
            for other, distance in zip(sorted(folders), row, strict=True):
                nearest[other] = min(distance, nearest.get(other, distance))
        return nearest
    return {}


def node_of_pci(bus_id: str, devices: Path = _PCI) -> int | None:
    """Return the NUMA node of a PCI device such as ``0000:3b:00.0``; None where the system does not tell."""
    with suppress(OSError, ValueError):
        number = int((devices / bus_id.lower() / "numa_node").read_text())
        return number if number >= 0 else None
    return None


def _numbers(text: str) -> set[int]:
    """Return the numbers in ``0-3,8``."""
    numbers = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
