"""Random streams: one shared by all replicas, one of each replica, and one for anything that has a number.

All come from one seed through NumPy's SeedSequence (https://numpy.org/doc/stable/reference/random/parallel.html), so
that different streams are independent and equal seeds give equal numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np

from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.kept import Kept, Leaf, ObjectAt, PathOf
from mpistrategy.objects.settings import checked_count

_SHARED, _REPLICA, _NUMBERED = range(3)
_WORD = 2**32


class Streams(Kept):
    """The random generators of one replica; made by `Strategy.rng(seed)`.

    Make it once, outside the step function: each one made starts its streams from the beginning.

    Args:
        seed: an int from 0 on, equal on every replica.
        replica_id: this replica's number.

    Raises:
        OptionTypeError, OptionError: for a seed that is not an int, or negative.
        ContextError: for every use in a function that JAX traces, where numbers are drawn once for many calls.

    >>> import mpistrategy as ms
    >>> streams = ms.OneDeviceStrategy().rng(7)
    >>> bool(streams.at(3, 5).random() == streams.at(3, 5).random())
    True
    """

    _kept_as = "streams"

    def __init__(self, seed: SupportsIndex, replica_id: int) -> None:
        self._seed = checked_count("Strategy.rng", "seed", seed, least=0)
        self._shared = self._generator(_SHARED)
        self._replica = self._generator(_REPLICA, replica_id)

    @property
    def shared(self) -> np.random.Generator:
        """A numpy.random.Generator that gives the same numbers on every replica, whatever their number.

        All replicas must draw alike from it: initial values, shuffling.
        """
        refuse_in_jax_trace("Streams.shared")
        return self._shared

    @property
    def replica(self) -> np.random.Generator:
        """A Generator with this replica's own numbers; replica 2's are the same whether there are 3 or 300."""
        refuse_in_jax_trace("Streams.replica")
        return self._replica

    @property
    def seed(self) -> int:
        """The seed that it was made with."""
        return self._seed

    def _state(self, path_of: PathOf) -> dict[Any, Any]:
        return {"seed": self._seed, "shared": self._shared, "replica": Leaf(self._replica, "own")}

    def _check(self, saved: Mapping[Any, Any], at: ObjectAt) -> str:
        there = saved["seed"]
        return "" if there == self._seed else f"seed {there} in the checkpoint, {self._seed} here"

    def _load(self, saved: Mapping[Any, Any]) -> None:
        """Do nothing: the generators have their states."""

    def __repr__(self) -> str:
        return f"<Streams of seed {self._seed}>"

    def at(self, *numbers: SupportsIndex) -> np.random.Generator:
        """Return a new Generator for these numbers, e.g. ``at(epoch, row)``; the same on whatever replica asks.

        Noise drawn for each row of the global batch this way does not depend on how many replicas share the batch.

        Raises:
            OptionTypeError, OptionError: for numbers that are no ints, or negative.
        """
        # SeedSequence strings all numbers together in words of 32 bits: two each keep (2**32,) from being (0, 1).
        checked = [checked_count("Streams.at", "number", number, least=0) for number in numbers]
        return self._generator(_NUMBERED, *(word for number in checked for word in divmod(number, _WORD)))

    def _generator(self, *key: int) -> np.random.Generator:
        refuse_in_jax_trace("Strategy.rng")
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=key))
