"""What belongs to a process and its ranks is not pickled, so not sent to another process: an error says what to do."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import RANK, context, in_scope

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


def built(strategy: ms.Strategy) -> tuple[ms.Variable, ms.optimizers.SGD]:
    with strategy.scope():
        variable, optimizer = ms.Variable(np.ones(2), name="w"), ms.optimizers.SGD(0.5, momentum=0.5)
        optimizer.build([variable])
    return variable, optimizer


def iterator(strategy: ms.Strategy) -> Any:
    found = iter(strategy.experimental_distribute_dataset([np.arange(4)] * 2))
    next(found)
    return found


def saving(strategy: ms.Strategy) -> ms.Saving:
    with tempfile.TemporaryDirectory() as folder, strategy.scope():
        return ms.Checkpoint(x=1).save(f"{strategy.extended.communicator.allgather_text(folder)[0]}/x")


#: What is made, and what the error says in its place.
THINGS: dict[str, tuple[Callable[[ms.Strategy], Any], str]] = {
    "strategy": (lambda s: s, r"np\.asarray\(variable\)"),
    "extended": (lambda s: s.extended, "Make a strategy there"),
    "default strategy": (lambda s: ms.get_strategy(), r"np\.asarray\(variable\)"),
    "variable": (lambda s: built(s)[0], r"'w'.*read_value\(\).*Checkpoint"),
    "variable of this rank": (
        lambda s: in_scope(ms.OneDeviceStrategy(), lambda: ms.Variable(1.0)),
        r"read_value\(\).*Checkpoint",
    ),
    "in a dict": (lambda s: {"weights": [built(s)[0]]}, r"'w'.*read_value\(\).*Checkpoint"),
    "built optimizer": (lambda s: built(s)[1], "Checkpoint.*same arguments"),
    "fresh optimizer": (lambda s: ms.optimizers.Adam(0.1), "Checkpoint.*same arguments"),
    "metric": (lambda s: in_scope(s, ms.metrics.Mean), r"mean/total.*read_value\(\)"),
    "arena": (lambda s: s.arena(np.ones(2)), r"arena\.values"),
    "iterator": (iterator, "Send the batches.*Checkpoint"),
    "old iterator": (lambda s: s.make_dataset_iterator([np.ones(4)]), "Send the batches.*Checkpoint"),
    "per-rank dataset": (lambda s: s.distribute_datasets_from_function(lambda c: [np.ones(2)]), "Send the batches"),
    "context": (lambda s: s.run(context), r"get_replica_context\(\)"),
    "default context": (lambda s: context(), r"get_replica_context\(\)"),
    "saving": (saving, "Send its path"),
    "handle": (lambda s: s.run(lambda: context().all_reduce_async("SUM", 1.0)), r"wait\(\)"),
}


@pytest.mark.parametrize("what", THINGS)
def test_pickling_says_what_to_send_instead(strategy: ms.MirroredStrategy, what: str) -> None:
    make, words = THINGS[what]
    thing = make(strategy)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(errors.CopyError, match=rf"^copying or pickling .*{words}"):
            pickle.dumps(thing, protocol)
    if what != "strategy":
        with pytest.raises(errors.CopyError):
            copy.deepcopy(thing)
    if what not in ("in a dict", "metric"):  # a shallow copy would share variables, a position or slots
        with pytest.raises(errors.CopyError):
            copy.copy(thing)
    if what == "handle":
        thing.wait()


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_what_is_plain_data_is_pickled(strategy: ms.MirroredStrategy, copied: Callable[[Any], Any]) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda c: np.arange(2))
    assert copied(value).numpy().tolist() == [0, 1]
    assert copied(ms.Mirrored((np.arange(2),))).numpy().tolist() == [0, 1]
    batches = strategy.experimental_distribute_dataset([np.arange(4)])
    if RANK == 0:  # a copy compares nothing: the other ranks may not have one
        assert [len(part) for part in copied(batches)] == [-(-4 // strategy.num_replicas_in_sync)]
    data = copied(ms.Dataset.from_arrays(np.arange(4), 2, shuffle_seed=1))
    assert [len(batch) for batch in data] == [2, 2]
