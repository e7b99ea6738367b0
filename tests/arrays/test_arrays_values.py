"""What counts as an array, in which dtype it travels, and the containers that act as arrays."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import convert

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize(
    "value",
    [True, np.bool_(True), np.array([True]), "text", b"bytes", np.array(["a"]), np.datetime64("2020-01-01"),
     np.timedelta64(1, "s"), np.zeros(2, [("a", "f4")]), np.zeros(2, ml_dtypes.float8_e4m3fn)],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_summed_is_named_with_its_leaf(value: Any) -> None:
    with pytest.raises(errors.DTypeError) as refusal:
        convert.reducible(value, "ReplicaContext.all_reduce", "['w'][0]")
    text = str(refusal.value)
    assert text.startswith("ReplicaContext.all_reduce: found dtype ")
    assert "leaf ['w'][0]" in text
    assert isinstance(refusal.value, TypeError)


@pytest.mark.parametrize(
    "value",
    [None, object(), [1, None], [[1], [1, 2]], {1, 2}, {"a": 1}, np.array([None]), np.ma.masked_array([1.0], [True]),
     np.ma.masked, 2**70, lambda: 1, range],
)  # fmt: skip
def test_what_is_no_array_is_named_with_its_leaf(value: Any) -> None:
    for function in (convert.to_array, convert.reducible):
        with pytest.raises(errors.LeafError) as refusal:
            function(value, "Strategy.reduce", "[3]")
        text = str(refusal.value)
        assert text.startswith("Strategy.reduce: found ")
        assert "leaf [3]" in text
        assert len(text) < 400


def test_numbers_lists_and_foreign_byte_orders_become_arrays() -> None:
    assert convert.to_array(2, "here").dtype == np.int64
    assert convert.to_array(np.float32(2), "here").dtype == np.float32
    assert convert.to_array([1.0, 2.0], "here").shape == (2,)
    swapped = convert.to_array(np.arange(3, dtype=">f4"), "here")
    assert swapped.dtype.isnative
    np.testing.assert_array_equal(swapped, [0, 1, 2])


def test_an_array_in_gpu_memory_is_copied_to_the_host(cupy: Any) -> None:
    copied = convert.to_array(cupy.asarray(np.arange(3)) * 2, "here")
    assert isinstance(copied, np.ndarray)
    assert copied.tolist() == [0, 2, 4]


def test_an_array_in_gpu_memory_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    foreign = type("Tensor", (), {"__cuda_array_interface__": {}})()
    with pytest.raises(errors.UnsupportedError, match="cupy-cuda12x"):
        convert.to_array(foreign, "here")


@pytest.mark.parametrize(("dtype", "copy"), [(None, None), (np.float32, None), (None, True), (None, False)])
def test_a_container_is_shared_or_copied_as_numpy_asks(dtype: Any, copy: bool | None) -> None:
    held = np.arange(3.0)
    array = np.array(ms.Mirrored((held,)), dtype=dtype, copy=copy)
    assert array.dtype == (dtype or np.float64)
    assert np.shares_memory(array, held) is (dtype is None and not copy)
    with pytest.raises(ValueError, match="copy"):
        np.array(ms.Mirrored((held,)), dtype=np.float32, copy=False)


def test_a_mirrored_value_that_lives_elsewhere_says_where() -> None:
    elsewhere = ms.Mirrored((), "rank 2")
    for read in (np.asarray, float, len, bool, lambda value: value + 1, lambda value: value[0]):
        with pytest.raises(errors.PlacementError, match="rank 2"):
            read(elsewhere)
    assert "rank 2" in repr(elsewhere)
    assert ms.get_strategy().experimental_local_results(elsewhere) == ()
    assert repr(ms.PerReplica((1,))) == "PerReplica(1)"


def test_repeated_indices_of_slices_add_up() -> None:
    values = np.array([[1.0, 2.0], [10.0, 20.0], [3.0, 4.0]])
    for shape in ((3, 2), np.array([3, 2])):
        slices = ms.IndexedSlices(values, np.array([2, 0, 2]), shape)
        np.testing.assert_array_equal(slices.to_dense(), [[10, 20], [0, 0], [4, 6]])
    with pytest.raises(errors.UnsupportedError, match="dense_shape"):
        ms.IndexedSlices(np.ones((1, 2)), np.array([0])).to_dense()
