"""Where a reduced value goes: the ranks that a device string, a value, a variable or a list of devices names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays import devices, nest
from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import is_python_number
from mpistrategy.arrays.foreign import is_foreign
from mpistrategy.arrays.values import ArrayLike, IndexedSlices, PerReplica, local_component
from mpistrategy.errors import DestinationError, DeviceError
from mpistrategy.mpi.interface.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Destination:
    """The ranks on which a result lives.

    Attributes:
        ranks: in rising order; None means every rank.
    """

    ranks: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The same words on every rank."""
        return "every rank" if self.ranks is None else f"rank {', '.join(map(str, self.ranks))}"

    @property
    def only_rank(self) -> int | None:
        """The single rank on which the result lives, or None when there are several."""
        return self.ranks[0] if self.ranks is not None and len(self.ranks) == 1 else None

    def includes(self, rank: int) -> bool:
        """Return whether the result lives on `rank`."""
        return self.ranks is None or rank in self.ranks


EVERY_RANK = Destination()


def for_value(value: Any, destinations: Any) -> Any:
    """Return `destinations`, or a value that means every rank if `destinations` is a number, or a nest, like `value`.

    A number alone says nothing: 0 might be meant as rank 0.
    """
    if destinations is None or not (nest.is_container(destinations) or _is_number(destinations)):
        return destinations
    (leaves_of_destinations, structure_of_destinations), (leaves_of_value, structure_of_value) = (
        nest.flatten(destinations),
        nest.flatten(value),
    )
    are_numbers = [*map(_is_number, leaves_of_destinations)] == [
        *map(_is_number, map(local_component, leaves_of_value))
    ]
    is_like = (
        structure_of_destinations.text == structure_of_value.text
        and are_numbers
        and not any(isinstance(leaf, str) for leaf in leaves_of_destinations)
    )
    return PerReplica((0,)) if is_like else destinations


def _is_number(value: Any) -> bool:
    return isinstance(value, bool) or is_python_number(value)


def resolve(destinations: Any, communicator: Ranks, where: str) -> Destination:
    """Return the ranks that `destinations` names.

    Args:
        destinations: a device string (``"task:1"``, ``"CPU:0"``, a full one), a list of these, or a value or variable,
            which stands for every rank and is never changed.

    Raises:
        DestinationError: for anything else, including None and the empty string.
        DeviceError: for a device that no rank of this communicator drives.
    """
    kinds = (ArrayLike, IndexedSlices, np.ndarray, np.generic)
    is_value = isinstance(destinations, kinds) or is_on_device(destinations) or is_foreign(destinations)
    if is_value and not isinstance(destinations, str):  # np.str_ is both
        return EVERY_RANK
    texts = [destinations] if isinstance(destinations, str) else destinations
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise DestinationError.at(
            where,
            found=f"destinations={destinations!r}",
            expected="a device string, a list of device strings, a value or a variable",
            fix="Pass the value itself to have the result on every rank, or 'task:0' to have it on rank 0.",
        )
    ranks = {rank for text in texts for rank in ranks_of(text, communicator, where)}
    return EVERY_RANK if len(ranks) == communicator.size else Destination(tuple(sorted(ranks)))


def ranks_of(text: str, communicator: Ranks, where: str) -> list[int]:
    """Return the ranks whose device matches a device string.

    Raises:
        DeviceError: when there are none, or the string cannot be read.
    """
    pattern = devices.parse(text, where, "destinations")
    ranks = [rank for rank, device in enumerate(communicator.devices) if pattern.matches(device)]
    if not ranks:
        names = sorted({str(device) for device in communicator.devices})
        text_of_names = ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
        raise DeviceError.at(where, found=f"device {text!r}", expected=f"one of {text_of_names}")
    return ranks
