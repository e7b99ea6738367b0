"""Arrays of other libraries at all entry points: accepted where they are, given back as the same kind.

The libraries are stand-ins with the parts of torch and of DLPack that matter; see `Tensor`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import gpu_here
import ml_dtypes
import numpy as np
import pytest
from gpu_here import Spoken
from replicas import RANK, SIZE, context, in_step, new_variable

import mpistrategy as ms
from mpistrategy.arrays.convert import library_of


class Tensor:
    """What torch does: no NumPy array of one with a gradient or a sign to come, none of bfloat16 or a GPU."""

    def __init__(self, array: Any, *, grad: bool = False, conj: bool = False) -> None:
        self.array, self.grad, self._conj = array, grad, conj
        self.dtype = "torch.bfloat16" if array.dtype.name == "bfloat16" else str(array.dtype)
        self.is_cuda = not isinstance(array, np.ndarray)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def detach(self) -> Tensor:
        return Tensor(self.array, conj=self._conj)

    def is_conj(self) -> bool:
        return self._conj

    is_neg = is_conj

    def resolve_conj(self) -> Tensor:
        return Tensor(self.array.conj()) if self._conj else self

    def resolve_neg(self) -> Tensor:
        return self

    def view(self, dtype: str) -> Tensor:
        return Tensor(self.array.view(ml_dtypes.bfloat16 if dtype == "torch.bfloat16" else dtype))

    def numpy(self) -> np.ndarray:
        if self.grad or self._conj:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self.is_cuda or self.dtype == "torch.bfloat16":
            raise TypeError("can't convert")
        return self.array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype) if copy else np.asarray(self.numpy(), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        if self.grad or self._conj:
            raise BufferError("Can't export tensors that require gradient")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0) if self.is_cuda else (1, 0)

    @property
    def __cuda_array_interface__(self) -> Any:
        if not self.is_cuda:
            raise AttributeError("not on a GPU")
        if self.grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")
        return self.array.__cuda_array_interface__


class Parameter(Tensor):
    """A class that a user derived."""


Tensor.__module__ = "torch"


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("torch")
    module.bfloat16, module.int16 = "torch.bfloat16", "int16"
    module.autograd = types.SimpleNamespace(graph=types.SimpleNamespace(increment_version=lambda tensor: None))
    module.Tensor, module.from_numpy, module.from_dlpack = Tensor, Tensor, Tensor
    own_stream = types.SimpleNamespace(cuda_stream=-1)  # another one than CuPy's
    module.cuda = types.SimpleNamespace(current_stream=lambda: own_stream)
    monkeypatch.setitem(__import__("sys").modules, "torch", module)
    return module


class Place:
    """Where tensors are: on the host, or on a GPU where there is one."""

    def __init__(self, strategy: ms.MirroredStrategy, cupy: Any = None) -> None:
        self.strategy, self.cupy = strategy, cupy

    def array(self, values: Any) -> Any:
        return values if self.cupy is None else self.cupy.asarray(values)

    def tensor(self, values: Any, **options: Any) -> Tensor:
        return Tensor(self.array(values), **options)

    def is_here(self, found: Tensor) -> bool:
        return type(found) is Tensor and found.is_cuda is (self.cupy is not None)


@pytest.fixture(params=["host", pytest.param("gpu", marks=gpu_here.needs_gpu)])
def place(request: pytest.FixtureRequest, strategy: ms.MirroredStrategy) -> Iterator[Place]:
    if request.param == "host":
        yield Place(strategy)
        return
    cupy = gpu_here.cupy_or_skip()
    with gpu_here.strategy() as shared:
        yield Place(shared, cupy)
    cupy.cuda.runtime.deviceSynchronize()


def numbers(value: Any) -> list[Any]:
    array = value.array if isinstance(value, (Tensor, Spoken)) else value
    return (
        (np.asarray(array) if isinstance(array, (np.ndarray, np.generic, float)) else array.get())
        .astype(float)
        .tolist()
    )


TOTAL = SIZE * (SIZE + 1) / 2
ROWS = [rank + 1.0 for rank in range(SIZE) for _ in "ab"]
ENTRY_POINTS: dict[str, tuple[Callable[[ms.Strategy, Any], Any], list[float]]] = {
    "all_reduce": (lambda s, x: in_step(s, lambda c: c.all_reduce("SUM", x)), [TOTAL] * 2),
    "of a nest": (lambda s, x: in_step(s, lambda c: c.all_reduce("SUM", {"a": [x, 1]}))["a"][0], [TOTAL] * 2),
    "with a weight": (lambda s, x: in_step(s, lambda c: c.all_reduce("MEAN", x, weight=1)), [TOTAL / SIZE] * 2),
    "all_reduce_async": (lambda s, x: in_step(s, lambda c: c.all_reduce_async("SUM", x).wait()), [TOTAL] * 2),
    "all_gather": (lambda s, x: in_step(s, lambda c: c.all_gather(x, 0)), ROWS),
    "reduce": (lambda s, x: s.reduce("SUM", x, axis=None), [TOTAL] * 2),
    "gather": (lambda s, x: s.gather(x, axis=0), ROWS),
    "reduce_to": (lambda s, x: s.extended.reduce_to("SUM", x, x).values[0], [TOTAL] * 2),
    "broadcast_to": (lambda s, x: s.extended.broadcast_to(x, x).values[0], [1.0] * 2),
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_tensor_comes_back_as_one_where_it_was(place: Place, name: str) -> None:
    call, expected = ENTRY_POINTS[name]
    for kind, grad in ((Tensor, False), (Parameter, True)) * 2:
        found = call(place.strategy, kind(place.array(np.full(2, RANK + 1.0, np.float32)), grad=grad))
        assert place.is_here(found)
        assert numbers(found) == expected


def test_whatever_speaks_dlpack_is_accepted(place: Place) -> None:
    given = place.array(np.full(2, RANK + 1.0))
    found = in_step(place.strategy, lambda c: c.all_reduce("SUM", Spoken(given)))
    assert type(found) is type(given)
    assert numbers(found) == [TOTAL] * 2


def test_bfloat16_and_signs_to_come(strategy: ms.MirroredStrategy) -> None:
    half = Tensor(np.full(3, 1.5, ml_dtypes.bfloat16))
    found = strategy.run(lambda: context().all_reduce("SUM", half))
    assert found.dtype == "torch.bfloat16"
    assert numbers(found) == [1.5 * SIZE] * 3
    signed = Tensor(np.array([1 + 2j]), conj=True)
    assert strategy.run(lambda: context().all_reduce("SUM", signed)).array.tolist() == [(1 - 2j) * SIZE]


def test_results_are_written_into_tensors(place: Place, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch may work on another stream than CuPy; DLPack's hand-over is what orders the two."""
    handed_over: list[Any] = []

    def from_dlpack(array: Any) -> Tensor:
        handed_over.append(array)
        return Tensor(array)

    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    given, out = place.tensor(np.full(2, RANK + 1.0)), place.tensor(np.zeros(2))
    assert in_step(place.strategy, lambda c: c.all_reduce("SUM", given, out=out)) is out
    assert numbers(out) == [TOTAL] * 2
    assert place.cupy is None or any(array.data.ptr == out.array.data.ptr for array in handed_over)


def test_variables_take_tensors(place: Place) -> None:
    v = new_variable(place.strategy, place.tensor(np.arange(2.0) + 1), aggregation="SUM")
    for make in (Tensor, place.tensor):
        v.assign(make(np.arange(2.0)))
        assert numbers(v.read_value()) == [0, 1]
        place.strategy.run(lambda make=make: v.assign_add(make(np.ones(2), grad=True)))
        assert numbers(v.read_value()) == [SIZE, SIZE + 1]
    with pytest.raises(ms.errors.DTypeError, match="float32"):
        v.assign(Tensor(np.ones(2, np.float32)))


def test_what_numpy_cannot_look_into_is_refused_by_name(strategy: ms.MirroredStrategy) -> None:
    class Sparse(Tensor):
        def detach(self) -> Tensor:
            raise TypeError("can't convert Sparse layout tensor\nto numpy")

    with pytest.raises(ms.errors.LeafError, match=r"Sparse at leaf \['a'\] that NumPy cannot read \(can't convert"):
        strategy.run(lambda: context().all_reduce("SUM", {"a": Sparse(np.ones(2))}))


def test_jax_arrays_are_never_written() -> None:
    class Array(Spoken):
        pass

    Array.__module__ = "jaxlib._jax"
    assert library_of(Array(np.ones(2))) == "jax"
    with ms.OneDeviceStrategy().scope(), pytest.raises(ms.errors.ShapeError, match="a writeable ndarray"):
        ms.get_strategy().run(lambda: context().all_reduce("SUM", np.ones(2), out=Array(np.ones(2))))
