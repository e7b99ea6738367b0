"""The check that the ranks iterate over the same global batches: it compares the first ones.

Each rank sends a digest of its batch's layout and one of its rows.  Only when the layouts differ do the ranks exchange
them as text, and every rank raises the same table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import to_array
from mpistrategy.arrays.digests import digest
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.errors import CollectiveMismatchError, DatasetWarning, MpiStrategyError, OptionError
from mpistrategy.input.datasets import common_length, to_rows
from mpistrategy.input.iterators import END
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.nearest import did_you_mean
from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.objects.text import encoded

WARN, RAISE, OFF = "warn", "raise", "off"
WHERE = "experimental_distribute_dataset"
#: The most bytes of a batch that are compared; at least one row at each end of every array.
MOST_BYTES = 2**20
_PER_RANK = "For different batches on each rank, use strategy.distribute_datasets_from_function."
_MOST_LEAVES, _MOST_TEXT = 4, 200


def checked_level(level: Any, where: str) -> str:
    """Return `level` in small letters if it is one of "warn", "raise" and "off".

    Raises:
        OptionError: for anything else.
    """
    if not isinstance(level, str) or level.lower() not in (WARN, RAISE, OFF):
        raise OptionError.at(
            where,
            found=f"check_batches={level!r}",
            expected='"warn", "raise" or "off"',
            fix=did_you_mean(level, (WARN, RAISE, OFF)),
        )
    return level.lower()


class FirstBatches:
    """Compares the ranks' first global batches.

    Args:
        communicator: the ranks.
        level: "warn" or "raise": what to do when the rows differ.
        number: the dataset's number in words, which the ranks compare.
        name: the name= that the program gave the dataset.
    """

    def __init__(self, communicator: Ranks, level: str, number: str, name: str | None = None) -> None:
        self._communicator = communicator
        self._level = level
        self._number = number
        self._name = name

    def next(self, batches: Iterator[Any], dataset: Any) -> Any:
        """Return the next global batch, END without one.  Collective.

        Args:
            batches: this rank's batches, at the first one.
            dataset: the dataset of the batches; its length is compared if it has one.

        Raises:
            CollectiveMismatchError: on every rank, for another structure, shape, dtype or length, or none on some rank.
            Exception: what `batches` raises; RemoteError on the other ranks.
        """
        guard = self._communicator.guard
        if guard.closed:  # there is not a rank to compare with
            return next(batches, END)
        where = "next(distributed dataset)"
        with Call(guard, where, name=self._number, called=self._name, anywhere=True) as call:
            with call.own_work():
                batch = next(batches, END)
                layout, rows = _layout_and_rows(batch, dataset)
            call.agree("compare the first batch")
            told = self._communicator.allgather_text(f"{_hashed(layout)} {rows}")
            layouts, digests = zip(*(text.split(" ") for text in told), strict=True)
            if len(set(layouts)) > 1:
                raise _other_layouts([text.split("\n") for text in self._communicator.allgather_text(layout)])
            if len(set(digests)) > 1:
                call.expect_more()  # the warning may be an error there
                self._tell(digests)
                call.agree("warn of the first batch")
        return batch

    def _tell(self, digests: tuple[str, ...]) -> None:
        found = f"first batches with other rows: {_in_words(digests)}"
        cure = f'{_PER_RANK} Shuffle with one seed on all ranks. To turn off this check: check_batches="{OFF}".'
        if self._level == RAISE:
            raise CollectiveMismatchError.at(WHERE, found=found, expected="the same global batches", fix=cure)
        if self._communicator.rank == 0:
            lost = "Each rank gets its part of its own batches, so the other rows are lost."
            warn(f"{WHERE}: found {found}. {lost} {cure}", DatasetWarning)


def _layout_and_rows(batch: Any, dataset: Any) -> tuple[str, str]:
    """Return the layout of a batch as lines (dataset length, structure, each array), and the digest of its rows."""
    try:
        length = f"{len(dataset)} batches"
    except Exception:  # a generator has none, and classes raise errors of many types
        length = "batches"
    if batch is END:
        return f"{length}\nno batch at all", ""
    leaves, structure = nest.flatten(batch)
    arrays = [to_rows(leaf) for leaf in leaves]
    common_length(arrays, WHERE)
    most = MOST_BYTES // len(arrays)
    lines, digests = [], []
    for path, array in zip(nest.leaf_paths(batch), arrays, strict=True):
        kind, ends = _ends(array, most)
        lines.append(f"{path} {kind}{list(array.shape)}".strip())
        digests += [f"{digest(end):016x}" for end in ends]
    return "\n".join([length, f"structure {structure.text}", *lines]), _hashed(" ".join(digests))


def _ends(array: Any, most: int) -> tuple[str, list[Array]]:
    """Return the dtype of an array, and its first and last rows, in all about `most` bytes; no rows for objects.

    Only these rows are read from a file.
    """
    length = int(array.shape[0])
    try:
        first = to_array(array[:1], WHERE)
    except MpiStrategyError:  # objects, sparse arrays
        return f"{type(array).__name__} of {getattr(array, 'dtype', '?')}", []
    kind = dtype_name(first.dtype)
    if not length:
        return kind, []
    rows = max(1, most // max(1, 2 * first.nbytes))
    parts = [slice(0, length)] if 2 * rows >= length else [slice(0, rows), slice(length - rows, length)]
    flat = [to_array(array[part], WHERE).reshape(-1) for part in parts]
    count = max(1, most // len(parts) // first.itemsize)  # a single row may be larger than `most`
    return kind, [np.ascontiguousarray(part[:count]) for part in flat]


def _hashed(text: str) -> str:
    return f"{digest(np.frombuffer(encoded(text), np.uint8)):016x}"


def _in_words(digests: tuple[str, ...]) -> str:
    """Return a text with the ranks that differ from the majority; without one, from the ranks equal to rank 0."""
    groups: dict[str, list[int]] = {}
    for rank, one in enumerate(digests):
        groups.setdefault(one, []).append(rank)
    if len(groups) == len(digests) > 2:
        return f"no two of {ranks_in_words(range(len(digests)))} have the same"
    most = max(groups.values(), key=len)
    usual = most if 2 * len(most) > len(digests) else groups[digests[0]]
    others = sorted(rank for ranks in groups.values() if ranks is not usual for rank in ranks)
    return f"{ranks_in_words(others)} differ{'s' if len(others) == 1 else ''} from {ranks_in_words(usual)}"


def _other_layouts(layouts: list[list[str]]) -> CollectiveMismatchError:
    """Return the error with a table of the layout lines that differ between ranks."""
    least = min(map(len, layouts))
    alike = [layout[1] == layouts[0][1] and len(layout) == least for layout in layouts]
    count = least if all(alike) else 2  # with different structures the arrays differ as well
    differ = [line for line in range(count) if len({layout[line] for layout in layouts}) > 1]
    groups: dict[str, list[int]] = {}
    for rank, layout in enumerate(layouts):
        text = ", ".join(layout[line] for line in differ[:_MOST_LEAVES])
        groups.setdefault(text, []).append(rank)
    rows = [
        f"  {ranks_in_words(ranks)}: {text if len(text) <= _MOST_TEXT else f'{text[:_MOST_TEXT]}...'}"
        for text, ranks in groups.items()
    ]
    return CollectiveMismatchError.at(
        WHERE,
        found="\n".join(["first batches that do not fit together", *rows]) + "\n",
        expected="the same global batches on every rank",
        fix=_PER_RANK,
    )
