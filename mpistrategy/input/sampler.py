"""Sampler: which rows this rank reads, for loaders of torch and others that take numbers of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import numpy as np

from mpistrategy.context import Strategy, check_strategy
from mpistrategy.errors import OptionError
from mpistrategy.objects.settings import checked_count, checked_switch

_WHERE = "Sampler"

T = TypeVar("T")


class Sampler:
    """The rows of this rank, for a DataLoader: ``DataLoader(data, batch_size=32, sampler=sampler)``.

    The ranks' k-th batches together are the k-th global batch, the same rows on any number of ranks.  Each epoch has
    an order of its own.  Checkpoints keep the epoch and the position, if the loop goes over ``sampler.over(loader)``;
    on another number of ranks the epoch continues with the rows that are left.

    Args:
        data: a dataset, or its number of rows; the same on all ranks.
        strategy: whose ranks.
        shuffle: whether the rows are in another order in each epoch, drawn from `seed`.
        seed: the same on all ranks.
        pad: let all ranks have equally many rows: some rows come twice at the end.  Without it each row comes once,
            some ranks have one row less, and perhaps one batch less: for evaluation.

    Raises:
        OptionTypeError, OptionError: for a negative number of rows, a negative seed, and a switch that is not a bool.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        strategy: Strategy,
        shuffle: bool = True,
        seed: int = 0,
        pad: bool = True,
    ) -> None:
        check_strategy(strategy, _WHERE)
        self._rank, self._ranks = strategy.extended.communicator.rank, strategy.extended.communicator.size
        self._rows = checked_count(_WHERE, "data", len(data) if hasattr(data, "__len__") else data, least=0)
        self._seed = checked_count(_WHERE, "seed", seed, least=0)
        self._shuffle, self._pad = checked_switch(_WHERE, "shuffle", shuffle), checked_switch(_WHERE, "pad", pad)
        self._epoch = self._done = 0
        #: How many rows had been done when this rank began to read.
        self._start = 0

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0 on."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch; keep the position if it is the present epoch."""
        if checked_count("Sampler.set_epoch", "epoch", epoch, least=0) != self._epoch:
            self._epoch, self._done, self._start = epoch, 0, 0

    def __len__(self) -> int:
        """Return how many rows this rank reads in this epoch; after a restore, of the remaining rows."""
        return len(self._rows_from(self._start))

    def __iter__(self) -> Iterator[int]:
        self._start = self._done
        return iter(self._rows_from(self._start).tolist())

    def _rows_from(self, done: int) -> Any:
        order = np.arange(self._rows)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self._epoch]).permutation(self._rows)
        remaining = order[done:]
        missing = -len(remaining) % self._ranks
        if self._pad and missing:
            remaining = np.concatenate([remaining, np.resize(order, missing)])
        return remaining[self._rank :: self._ranks]

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader that this sampler is in, and count their rows; then go to the next epoch.

        While a batch is used it counts as done: save checkpoints at the end of the loop's body.
        """
        size = getattr(loader, "batch_size", None)
        if size is None:
            raise OptionError.at("Sampler.over", found="a loader without batch_size", expected="a DataLoader with one")
        epoch = self._epoch
        for batch in loader:
            if self._epoch != epoch:
                return
            self._done = min(self._rows, self._done + size * self._ranks)
            yield batch
        if self._epoch == epoch:
            self.set_epoch(epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the seed, the order, the epoch, and how many rows of it all ranks together have done."""
        return {
            "seed": self._seed,
            "rows": self._rows,
            "shuffle": int(self._shuffle),
            "epoch": self._epoch,
            "done": self._done,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where another sampler was.

        Raises:
            OptionError: for the state of a sampler with another seed or another order, or of other data.
        """
        own, saved = (self._seed, self._rows, self._shuffle), (state["seed"], state["rows"], state["shuffle"])
        if own != saved:
            raise OptionError.at(
                "Sampler.load_state_dict",
                found=f"seed, rows and shuffle {saved}",
                expected=f"those of this sampler, {own}",
            )
        self._epoch, self._done = state["epoch"], state["done"]
        self._start = self._done
