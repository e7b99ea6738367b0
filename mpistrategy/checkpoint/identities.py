"""What the names of a checkpoint stand for, in words that are the same on all ranks for the same thing.

Names alone say nothing of it: a rank that has two names the wrong way round would save one variable as the other.
Variables are known by the numbers that all ranks gave them when they were made together; optimizers by their variables;
what each rank makes for itself, by the order in which those of its kind in the checkpoint were made.

Arrays and plain values are known by what they are alone: what is not equal on all ranks is kept for each rank.  So are
random generators; but those of a rank that has the states of others' under other names are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.process_objects import Created
from mpistrategy.strategy.random_streams import Streams
from mpistrategy.training.optimizer import Optimizer
from mpistrategy.variables.variable import Variable

_IN_WORDS = 3


def identities(live: Mapping[str, Any]) -> dict[str, str]:
    """Return what stands at each path, as far as ranks can tell it apart from others.

    Args:
        live: the objects by path.
    """
    made = [(value.creation_order, path) for path, value in live.items() if isinstance(value, Created)]
    kinds: dict[type, list[str]] = {}
    for _, path in sorted(made):
        kinds.setdefault(type(live[path]), []).append(path)
    numbered = [(path, number, len(paths)) for paths in kinds.values() for number, path in enumerate(paths, 1)]
    places = {path: f"{number} of {count}" for path, number, count in numbered}
    return {path: text for path, value in live.items() if (text := _identity(value, places.get(path, "")))}


def _identity(value: Any, place: str) -> str:
    if isinstance(value, Variable):
        return "" if value.strategy.extended.is_local else value.key
    kind = type(value).__name__
    if isinstance(value, Optimizer):
        counter = [] if value.iterations is None else [value.iterations]
        keys = [key for var in (*value.slotted(), *counter) if (key := _identity(var, ""))]
        return f"{kind} of {_several(keys)}" if keys else f"{kind} {place}"
    if isinstance(value, Streams):
        return f"streams {place} of seed {value.seed}"
    if isinstance(value, Created):
        return f"{kind} {place}"
    has_state = callable(getattr(value, "load_state_dict", None)) or hasattr(value, "variables")
    return f"a {kind}" if has_state else ""


def _several(words: Sequence[str]) -> str:
    if len(words) <= _IN_WORDS:
        return ", ".join(words)
    import hashlib  # here, for the quick import

    digest = hashlib.blake2b("\n".join(words).encode(errors="replace"), digest_size=8).hexdigest()
    return f"{', '.join(words[:_IN_WORDS])} and {len(words) - _IN_WORDS} more ({digest})"


def check_generators(states: Mapping[str, int], communicator: Communicator, where: str) -> None:
    """Raise on every rank where a rank has rank 0's generators, under other names.  Collective, in an agreed call.

    Generators may differ between ranks.  But no rank comes by chance to the states that others have.

    Args:
        states: a number for the state of each generator, by its path.
        communicator: the ranks.
        where: the public name, for errors.

    Raises:
        CollectiveMismatchError: names the generators and the rank.
    """
    if communicator.size == 1 or len(states) < 2:
        return
    first, *others = map(json.loads, communicator.allgather_text(json.dumps(list(states.values()))))
    for rank, numbers in enumerate(others, 1):
        if numbers != first and sorted(numbers) == sorted(first):
            swapped = [
                f"{path!r} on rank {rank} is {list(states)[first.index(number)]!r} on rank 0"
                for path, number, there in zip(states, numbers, first, strict=True)
                if number != there
            ]
            raise CollectiveMismatchError.at(
                where,
                found=f"random generators under other names than on rank 0: {'; '.join(swapped[:_IN_WORDS])}",
                expected="the same objects under the same names on all ranks",
                fix="Where each rank has its own on purpose, keep generator.bit_generator.state.",
            )
