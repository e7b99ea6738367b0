"""What a loop replaces by new objects is saved as it is, through a function; without one a warning says so."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from replicas import RANK, SIZE, outcomes

import mpistrategy as ms
from mpistrategy import errors


class AdamState(NamedTuple):
    """As optax has it."""

    count: Any
    mu: Any


def with_jax(number: float) -> Any:
    jax_numpy = pytest.importorskip("jax.numpy")
    return AdamState(jax_numpy.int32(number), {"w": jax_numpy.full(3, number, "float32")})


def a_tree(number: float) -> Any:
    jax_numpy = pytest.importorskip("jax.numpy")
    import mpistrategy.jax as msj

    return msj.Tree({"w": jax_numpy.full(3, number, "float32")})


#: What a loop makes anew, by a number.
MADE: dict[str, Callable[[float], Any]] = {
    "a number": lambda number: number,
    "a NumPy scalar": np.float64,
    "a string": str,
    "a tuple": lambda number: AdamState(int(number), (None, 0.5)),
    "a dict": lambda number: {"epoch": number, "name": "x"},
    "an array": lambda number: np.full(3, number),
    "JAX's arrays": with_jax,
    "a tree of JAX's": a_tree,
}


def told() -> contextlib.AbstractContextManager[Any]:
    """Expect the warning, on rank 0."""
    return pytest.warns(errors.StaleStateWarning, match="lambda: x") if RANK == 0 else contextlib.nullcontext()


@contextlib.contextmanager
def untold() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("what", MADE)
def test_a_new_object_that_a_checkpoint_does_not_know(strategy: ms.MirroredStrategy, folder: Path, what: str) -> None:
    x = MADE[what](1.0)
    with strategy.scope():
        checkpoint = ms.Checkpoint(x=x, weights=ms.Variable(1.0), lasting=lambda: 5)
        through = ms.Checkpoint(x=lambda: x)
    for number in (1, 2, 3):
        x = MADE[what](float(number))
        with told() if number == 2 else untold():
            checkpoint.save(folder / f"{number}")
        with untold():
            through.save(folder / f"through {number}")
    last = repr(x)
    x = MADE[what](0.0)
    restored = through.restore(folder / "through 3").objects["x"]
    assert repr(restored) == last
    assert callable(through.objects["x"])
    checkpoint.restore(folder / "1")
    assert checkpoint.objects["lasting"]() == 5
    with strategy.scope(), ms.CheckpointManager(through, folder / "m") as manager:
        x = MADE[what](4.0)
        manager.save(4)
        assert manager.restore() == 4
    assert manager.restored is not None
    assert repr(manager.restored.objects["x"]) == repr(x)


def test_what_changes_in_place_is_nothing_to_warn_of(strategy: ms.MirroredStrategy, folder: Path) -> None:
    with strategy.scope():
        weights, optimizer, mean = ms.Variable(np.ones(2)), ms.optimizers.SGD(0.1), ms.metrics.Mean()
        array, progress, rows = np.zeros(2), {"step": 0}, ms.Rows(np.zeros(RANK))
        checkpoint = ms.Checkpoint(
            weights=weights, optimizer=optimizer, mean=mean, array=array, progress=progress, rows=rows,
            streams=strategy.rng(1), generator=np.random.default_rng(1), empty=np.zeros(0), nothing=[],
        )  # fmt: skip
        with untold():
            for step in range(3):
                if RANK == SIZE - 1:
                    array += 1
                    rows.value = rows.value + 1
                progress["step"] = step
                checkpoint.save(folder / f"{step}")
                if SIZE == 1:
                    rows.value = np.full(step + 1, 1.0)


def test_a_donated_array(strategy: ms.MirroredStrategy, folder: Path) -> None:
    x = pytest.importorskip("jax.numpy").ones(3)
    with strategy.scope():
        checkpoint = ms.Checkpoint(nest={"x": x})
    x.delete()  # as a jitted function does with what is donated to it
    found = outcomes(checkpoint.save, folder / "c")
    assert {each.error for each in found} == {errors.LeafError}
    assert "nest/x that was donated" in found[0].text
    assert "Pass what the function returned" in found[0].text


def test_functions_that_fail(strategy: ms.MirroredStrategy, folder: Path) -> None:

    def failing() -> Any:
        if RANK == SIZE - 1:
            raise KeyError("state")
        return 1

    with strategy.scope():
        for given in (failing, lambda: failing, lambda: object(), len):
            found = outcomes(ms.Checkpoint(x=given).save, folder / "c")
            assert None not in {each.error for each in found}
            assert {each.error for each in found} - {errors.RemoteError, errors.OptionTypeError, Exception} == set()
    strategy.barrier("all failed")
    assert not list(folder.iterdir())
