"""The methods of NumPy's arrays on Variable, PerReplica and Mirrored, and what counts as an array."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pages
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from replicas import RANK, SIZE, new_variable

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import convert

pytestmark = pytest.mark.mpi


def variable(array: Any) -> ms.Variable:
    return new_variable(ms.OneDeviceStrategy(), array)  # of this rank alone


KINDS = {
    "Variable": variable,
    "PerReplica": lambda array: ms.PerReplica((array,)),
    "Mirrored": lambda array: ms.Mirrored((array,)),
}
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4)
ARRAYS = st.one_of(
    arrays.arrays(dtype, SHAPES, elements=elements)
    for dtype, elements in (
        ("float64", st.floats(-8, 8, width=16)),
        ("float32", st.floats(-8, 8, width=16)),
        ("int16", st.integers(-8, 8)),
        ("complex128", st.complex_numbers(max_magnitude=8, width=64)),
        ("bool", st.booleans()),
    )
)
WITHOUT_ARGUMENTS = (
    "transpose ravel flatten squeeze view copy byteswap tolist tobytes sum prod mean std var max min all any argmax"
    " argmin cumsum cumprod conj conjugate round nonzero argsort"
)
ATTRIBUTES = "T real imag shape ndim size dtype itemsize nbytes strides"
#: Each takes an array, and is called on NumPy's and on ours.
READS: dict[str, Callable[[Any], Any]] = {
    **{name: operator.methodcaller(name) for name in WITHOUT_ARGUMENTS.split()},
    **{name: operator.attrgetter(name) for name in ATTRIBUTES.split()},
    "sum along an axis": lambda a: a.sum(axis=-1, keepdims=True),
    "mean, positional": lambda a: a.mean(0, np.complex128),
    "max with a start": lambda a: a.max(initial=3),
    "sum where": lambda a: a.sum(where=a > 0),
    "std of a sample": lambda a: a.std(ddof=1),
    "out": lambda a: a.sum(out=np.zeros((), np.complex128)),
    "argsort of all": lambda a: a.argsort(axis=None, kind="stable"),
    "argpartition": lambda a: a.argpartition(0),
    "reshape to one axis": lambda a: a.reshape(-1),
    "reshape, order": lambda a: a.reshape((a.size, 1), order="F"),
    "reshape, two numbers": lambda a: a.reshape(1, a.size),
    "transpose, axes": lambda a: a.transpose(*range(a.ndim)[::-1]),
    "swapaxes": lambda a: a.swapaxes(0, -1),
    "squeeze of an axis": lambda a: a.squeeze(axis=0),
    "diagonal": lambda a: a.diagonal(offset=1),
    "trace": lambda a: a.trace(),
    "dot": lambda a: a.dot(a.T),
    "dot of a number": lambda a: a.dot(2),
    "clip": lambda a: a.clip(-1, 1),
    "clip from below": lambda a: a.clip(min=0),
    "clip by itself": lambda a: a.clip(a, a),
    "round to tenths": lambda a: a.round(1),
    "take": lambda a: a.take([0, -1], axis=0),
    "take, wrapped": lambda a: a.take(a.argsort(None) + 7, mode="wrap"),
    "compress": lambda a: a.compress([True], axis=0),
    "choose": lambda a: a.astype(bool).astype(int).choose([1, 2]),
    "repeat": lambda a: a.repeat(2, axis=0),
    "searchsorted": lambda a: a.ravel().searchsorted(a, side="right"),
    "item": lambda a: a.item(0),
    "astype": lambda a: a.astype("complex64"),
    "astype without a copy": lambda a: a.astype(a.dtype, copy=False),
    "bytes": lambda a: a.view("uint8"),
    "flat": lambda a: list(a.flat),
    "contiguous": lambda a: a.flags.c_contiguous,
    "rows": list,
    "+": lambda a: 1 + a,
    "-": lambda a: a - 1,
    "*": lambda a: a * a,
    "/": lambda a: a / 2,
    "**": lambda a: 2.0**a,
    "abs": abs,
    "@": lambda a: a.ravel() @ np.ones(a.size),
    "==": lambda a: a == 1,
    ">": lambda a: a > 0,
    "a part": lambda a: a[1:],
    "where true": lambda a: a[a > 0],
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "index": operator.index,
    "format": "{:.2f}".format,
    "np.add": lambda a: np.add(1, a),
    "np.concatenate": lambda a: np.concatenate([a.ravel(), a.ravel()]),
    "np.where": lambda a: np.where(a > 0, a, 0),
    "np.zeros_like": np.zeros_like,
    "np.add.reduce": lambda a: np.add.reduce(a, axis=None),
    "in": lambda a: a.ravel()[0] in a,
    "len": len,
    "np.sum": lambda a: np.sum(a, axis=0),
    "np.mean": lambda a: np.mean(a, keepdims=True),
    "np.std": lambda a: np.std(a, ddof=1),
    "np.transpose": np.transpose,
    "np.reshape": lambda a: np.reshape(a, -1),
    "np.clip": lambda a: np.clip(a, -1, 1),
    "np.round": np.round,
    "np.argsort": np.argsort,
    "np.dot": lambda a: np.dot(a, 3),
    "np.take": lambda a: np.take(a, [0]),
    "np.sort": np.sort,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "fill": lambda a: a.fill(0),
    "sort": lambda a: a.sort(),
    "partition": lambda a: a.partition(1),
    "put": lambda a: a.put(0, 1),
    "np.put": lambda a: np.put(a, 0, 1),
    "setfield": lambda a: a.setfield(0, a.dtype),
    "setflags": lambda a: a.setflags(write=True),
    "resize": lambda a: a.resize(1),
    "itemset": lambda a: a.itemset(0, 1),
    "[]": lambda a: operator.setitem(a, 0, 1),
    "+=": lambda a: operator.iadd(a, 1),
    "-=": lambda a: operator.isub(a, 1),
    "*=": lambda a: operator.imul(a, 2),
    "@=": lambda a: operator.imatmul(a, np.eye(3)),
    "ufunc out": lambda a: np.exp(a, out=a),
    "ufunc at": lambda a: np.add.at(a, 0, 1),
    "method out": lambda a: np.ones((3, 3)).sum(0, out=a),
    "our method out": lambda a: ms.Mirrored((np.ones((3, 3)),)).sum(0, out=a),
}


def what(call: Callable[[], Any]) -> tuple[Any, ...]:
    """Return what a call gives, in a form that can be compared, or the type of its error."""
    try:
        found = call()
    except Exception as error:
        return (type(error),)
    parts = found if isinstance(found, (tuple, list)) else (found,)
    return type(found), *((type(part), np.shape(part), np.asarray(part).tobytes()) for part in parts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::numpy.exceptions.ComplexWarning")
@given(array=ARRAYS)
def test_reading_methods_give_what_numpys_give(array: np.ndarray) -> None:
    before = array.copy()
    for kind, make in KINDS.items():
        ours = make(array)
        for name, read in READS.items():
            assert what(lambda: read(ours)) == what(lambda: read(array)), f"{name} of a {kind}"  # noqa: B023
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_what_would_write_says_what_to_write_instead(kind: str, write: str) -> None:
    value = KINDS[kind](np.array([3.0, 1.0, 2.0]))
    with pytest.raises(errors.UnsupportedError) as refusal:
        WRITES[write](value)
    assert value.tolist() == [3, 1, 2]
    assert ("v.assign(x), v.assign_add(x)" if kind == "Variable" else "v = v + x") in refusal.value.fix


def test_every_public_name_of_an_array_is_there_but_those_that_the_guide_names() -> None:
    text = pages.TEXTS["recipes"].partition("the attributes that are not there: ")[2].partition(".\n")[0]
    absent = {name.strip("` \n") for name in text.split(",")}
    public = {name for name in dir(np.ndarray) if not name.startswith("_")}
    for make in KINDS.values():
        assert {name for name in public if hasattr(make(np.ones(2)), name)} == public - absent


def test_views_of_a_variable_follow_it_and_cannot_be_written(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.arange(6.0).reshape(2, 3))
    views = [
        np.asarray(variable),
        variable[0],
        variable[:, 1],
        variable.T,
        variable.transpose(1, 0),
        variable.reshape(3, 2),
        variable.ravel(),
        variable.squeeze(),
        variable.swapaxes(0, 1),
        variable.diagonal(),
        variable.view(),
        variable.real,
        variable.conj(),
        variable.astype("float64", copy=False),
        next(iter(variable)),
        np.transpose(variable),
    ]
    copies = [variable.copy(), variable.flatten(), variable.clip(0, 9), variable.astype("float64"), variable.repeat(1)]
    copies += [np.array(variable), variable.read_value(), variable.numpy(), variable.local_copy()]
    variable.assign(np.full((2, 3), 7.0))
    for view in views:
        assert (view == 7).all()
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    for copy in copies:
        assert not (copy == 7).any()
        copy[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        variable.flat[0] = 0
    assert variable.tolist() == [[7.0] * 3] * 2


def test_an_on_read_variable_has_the_methods_in_steps_and_names_read_value_outside(strategy: ms.Strategy) -> None:
    seen = new_variable(strategy, np.zeros(2), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: seen.assign(np.arange(2.0) + RANK))
    assert strategy.run(lambda: seen.sum()) == 1 + 2 * RANK
    assert strategy.run(lambda: seen.transpose().tolist()) == [RANK, RANK + 1]
    if RANK == 0:  # nobody waits: the others do not call it
        for read in (seen.sum, seen.copy, seen.transpose, lambda: seen.T, lambda: np.sum(seen)):
            with pytest.raises(errors.ContextError, match=r"read_value\(\)"):
                read()
        assert (seen.nbytes, seen.itemsize, len(seen)) == (16, 8, 2)
    assert seen.read_value().sum() == SIZE**2


def test_a_value_that_is_no_array_or_not_here_is_named() -> None:
    with pytest.raises(errors.LeafError, match=r"PerReplica\.sum"):
        ms.PerReplica(({"a": 1},)).sum()
    elsewhere = ms.Mirrored((), "rank 2")
    for read in (np.asarray, float, len, bool, np.transpose, lambda value: value + 1, lambda value: value[0]):
        with pytest.raises(errors.PlacementError, match="rank 2"):
            read(elsewhere)
    assert ms.get_strategy().experimental_local_results(elsewhere) == ()
    assert (repr(elsewhere), repr(ms.PerReplica((1,)))) == ("Mirrored(<lives on rank 2>)", "PerReplica(1)")


# ------------------------------------------------------------------------------------------------- what is an array


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, errors.DTypeError) for value in (
            True, np.bool_(True), np.array([True]), "text", b"bytes", np.array(["a"]), np.datetime64("2020-01-01"),
            np.timedelta64(1, "s"), np.zeros(2, [("a", "f4")]), np.zeros(2, ml_dtypes.float8_e4m3fn))),
        *((value, errors.LeafError) for value in (
            None, object(), [1, None], [[1], [1, 2]], {1, 2}, {"a": 1}, np.array([None]),
            np.ma.masked_array([1.0], [True]), np.ma.masked, 2**70, lambda: 1, range)),
    ],
)  # fmt: skip
def test_what_cannot_be_summed_is_named_with_its_leaf(value: Any, error: type[Exception]) -> None:
    for function in (convert.reducible, convert.to_array)[: 1 + (error is errors.LeafError)]:
        with pytest.raises(error, match=r"^ReplicaContext\.all_reduce: found (?s:.{,300})leaf \['w'\]\[3\]"):
            function(value, "ReplicaContext.all_reduce", "['w'][3]")


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


def test_repeated_indices_of_slices_add_up() -> None:
    values = np.array([[1.0, 2.0], [10.0, 20.0], [3.0, 4.0]])
    for shape in ((3, 2), np.array([3, 2])):
        slices = ms.IndexedSlices(values, np.array([2, 0, 2]), shape)
        np.testing.assert_array_equal(slices.to_dense(), [[10, 20], [0, 0], [4, 6]])
    with pytest.raises(errors.UnsupportedError, match="dense_shape"):
        ms.IndexedSlices(np.ones((1, 2)), np.array([0])).to_dense()
