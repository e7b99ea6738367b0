"""A CuPy that is not there: device arrays and streams over host memory, for machines without a GPU.

It is as lazy as a GPU may be: what is put on a stream happens when somebody waits for the stream, and not before.
Memory that MPI or NumPy looks at too early still holds what was there before, and memory that is used again too early
spoils what was to be read: a missing order makes wrong numbers.  Like CuPy it does not become a NumPy array unasked.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, ClassVar, Self

import fused_double
import numpy as np

from mpistrategy.arrays.dtypes import span
from mpistrategy.mpi.gpu.transports import ordered_keys
from mpistrategy.reduction.routes import gpu as gpu_route
from mpistrategy.training import gpu_update

_ARENA_BYTES = 2**30
_ALIGNMENT = 512
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3


class _Work:
    """One thing on a stream: done, or still to do."""

    __slots__ = ("do", "memory", "ready")

    def __init__(
        self, do: Callable[[], Any], memory: Sequence[np.ndarray] = (), ready: Callable[[], bool] | None = None
    ) -> None:
        self.do: Callable[[], Any] | None = do
        self.ready = ready
        self.memory = [span(each) for each in memory if each.size]


_local = threading.local()
#: Held while a queue changes or is worked on: a thread of the library's may wait for a stream of the program's.
_lock = threading.RLock()


class Stream:
    """A queue of work."""

    null: Stream
    everything: ClassVar[list[weakref.ref[Stream]]] = []

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.queue: deque[_Work] = deque()
        self.non_blocking = non_blocking
        self.ptr = 0 if null else id(self)
        self.device_id = -1 if null else getattr(_local, "device", 0)
        Stream.everything.append(weakref.ref(self))

    def put(self, do: Callable[[], Any], *memory: np.ndarray, ready: Callable[[], bool] | None = None) -> _Work:
        """Add work, which may have to wait until it is `ready`; null and blocking streams wait for each other."""
        with _lock:
            return self._put(do, memory, ready)

    def _put(self, do: Callable[[], Any], memory: Sequence[np.ndarray], ready: Callable[[], bool] | None) -> _Work:
        if self is Stream.null:
            for other in _streams():
                if other is not self and not other.non_blocking and other.queue:
                    self._wait_for(other, other.queue[-1])
        elif not self.non_blocking and Stream.null.queue:
            self._wait_for(Stream.null, Stream.null.queue[-1])
        work = _Work(do, memory, ready)
        self.queue.append(work)
        counts["put"] += 1
        return work

    def _wait_for(self, other: Stream, work: _Work) -> None:
        with _lock:
            self.queue.append(_Work(lambda: None, ready=lambda: other._advance(work)))

    def run_until(self, last: _Work) -> None:
        while not self._advance(last):
            time.sleep(1e-4)

    def _advance(self, last: _Work) -> bool:
        """Do what can be done at once; return whether `last` is done."""
        with _lock:
            return self._advance_locked(last)

    def _advance_locked(self, last: _Work) -> bool:
        while last.do is not None:
            if self.queue[0].ready is not None and not self.queue[0].ready():
                return False
            work = self.queue.popleft()
            do, work.do = work.do, None
            assert do is not None
            do()
        return True

    def synchronize(self) -> None:
        counts["synchronize"] += 1
        if self.queue:
            self.run_until(self.queue[-1])

    def is_capturing(self) -> bool:
        return False

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        work, stream = event.work, event.stream
        if work is not None and stream is not None:
            self._wait_for(stream, work)

    def use(self) -> Self:
        _local.stream = self
        return self

    def __enter__(self) -> Self:
        _local.__dict__.setdefault("before", []).append(get_current_stream())
        return self.use()

    def __exit__(self, *error: object) -> None:
        _local.before.pop().use()

    @staticmethod
    def from_external(external: Any) -> Stream:
        """Return the stream of which another library tells the pointer."""
        _, pointer = external.__cuda_stream__()
        return next(each for each in _streams() if each.ptr == pointer)

    @property
    def done(self) -> bool:
        return not self.queue


class Event:
    """A place in a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.work: _Work | None = None
        self.stream: Stream | None = None
        self._device = getattr(_local, "device", 0)

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or get_current_stream()
        assert self.stream.device_id in (-1, self._device), "cudaErrorInvalidResourceHandle"
        self.work = self.stream.put(lambda: None)

    def synchronize(self) -> None:
        counts["event"] += 1
        if self.work is not None and self.stream is not None:
            self.stream.run_until(self.work)

    @property
    def done(self) -> bool:
        """Whether it has been reached; who asks again and again waits for it, too."""
        return self.work is None or self.stream is None or self.stream._advance(self.work)


counts = dict.fromkeys(("put", "synchronize", "event", "device", "kernels"), 0)
Stream.null = Stream(null=True)


def get_current_stream(device_id: int | None = None) -> Stream:
    return getattr(_local, "stream", Stream.null)


def _streams() -> list[Stream]:
    return [stream for each in Stream.everything if (stream := each()) is not None]


def pending(array: Any) -> bool:
    """Return whether work that touches this memory (an array of either kind) waits on some stream."""
    first, last = span(array._view if isinstance(array, ndarray) else array)
    return any(
        work.do is not None and any(start < last and first < stop for start, stop in work.memory)
        for stream in _streams()
        for work in stream.queue
    )


def device_synchronize() -> None:
    """Finish everything."""
    counts["device"] += 1
    for stream in _streams():
        if stream.queue:
            stream.run_until(stream.queue[-1])


def forget_all() -> None:
    """Drop what waits on any stream: after work that never ends."""
    for stream in _streams():
        stream.queue.clear()


class MemoryPointer:
    """Some memory of the device; free again when nobody holds it, even if work on it waits, as in CuPy."""

    def __init__(self, pool: MemoryPool, memory: np.ndarray, key: tuple[int, int]) -> None:
        self.memory = memory
        self.ptr: int = memory.ctypes.data
        weakref.finalize(self, pool._free.setdefault(key, []).append, memory)


class _Data(types.SimpleNamespace):
    """Where an array begins: `ptr`, in the memory `mem`, on the device `device_id`."""

    def __add__(self, nbytes: int) -> _Data:
        return _Data(ptr=self.ptr + nbytes, mem=self.mem, device_id=self.device_id)

    @property
    def memory(self) -> np.ndarray:
        return self.mem.memory[self.ptr - self.mem.ptr :]


class OutOfMemoryError(MemoryError):
    """What CuPy raises when there is no memory left."""


class MemoryPool:
    """Memory that is used again on the stream that it was taken for."""

    def __init__(self, allocator: object = None) -> None:
        self._free: dict[tuple[int, int], list[np.ndarray]] = {}

    def malloc(self, nbytes: int) -> MemoryPointer:
        size = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        key = (get_current_stream().ptr, size)
        free = self._free.setdefault(key, [])
        return MemoryPointer(self, free.pop() if free else _from_arena(size), key)

    def free_all_blocks(self) -> None:
        pass


_arena = np.empty(_ARENA_BYTES, np.uint8)  # the system gives pages when they are first written
_used = [0]


def _from_arena(size: int) -> np.ndarray:
    start, _used[0] = _used[0], _used[0] + size
    assert _used[0] <= _ARENA_BYTES, "the double's memory is full"
    _arena[start : _used[0]] = 0xA5
    return _arena[start : _used[0]]


_default_pool = MemoryPool()


class _Device:
    def __init__(self, index: int = 0) -> None:
        self.id = index

    def use(self) -> None:
        _local.device = self.id

    def synchronize(self) -> None:
        device_synchronize()

    def __enter__(self) -> Self:
        _local.__dict__.setdefault("devices", []).append(getattr(_local, "device", 0))
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        _local.device = _local.devices.pop()

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801  # CuPy's name
    """A device array."""

    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | _Data | None = None, *, _view: Any = None
    ) -> None:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if _view is None:
            memptr = memptr or _default_pool.malloc(prod(shape) * dtype.itemsize)
            _view = memptr.memory[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        self._view: np.ndarray = _view
        self._memory = memptr.mem if isinstance(memptr, _Data) else memptr
        self.device = _Device(getattr(_local, "device", 0))

    @property
    def data(self) -> Any:
        return _Data(ptr=self._view.ctypes.data, mem=self._memory, device_id=self.device.id)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self._view.dtype.str if self._view.dtype.name != "bfloat16" else "<V2",
            "data": (self._view.ctypes.data, False),
            "strides": None if self._view.flags.c_contiguous else self._view.strides,
            "version": 3,
            "stream": 1,
        }

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        outs = out if isinstance(out, tuple) else (out,)
        if method != "__call__" or any(_is_foreign(value) for value in inputs):
            return NotImplemented  # as CuPy's
        return _later(ufunc, inputs, kwargs, outs[0] if outs else None)

    def __array_function__(self, function: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        return _later(function, args, kwargs, kwargs.pop("out", None))

    def _put(self, do: Callable[..., Any], inputs: Sequence[Any], target: ndarray) -> None:
        views = [_strict(value) for value in inputs]

        def quietly() -> None:  # a GPU says nothing of an overflow
            with np.errstate(all="ignore"):
                do(*views)

        get_current_stream().put(quietly, target._view, *(v for v in views if isinstance(v, np.ndarray)))

    def _like(self, view: np.ndarray) -> ndarray:
        made = ndarray(view.shape, view.dtype, self._memory, _view=view)
        made.device = self.device
        return made

    def get(self, stream: Stream | None = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        (stream or get_current_stream()).synchronize()
        if out is None:
            return self._view.copy()
        out[...] = self._view
        return out

    def set(self, array: np.ndarray, stream: Stream | None = None) -> None:
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        copied = array.copy()
        (stream or get_current_stream()).put(lambda: np.copyto(self._view, copied), self._view)

    def __getitem__(self, key: Any) -> ndarray:
        if _has_arrays(key):
            return _later(lambda x, k: x[k], (self, key), {}, None)
        return self._like(self._view[key] if _is_view(self._view[key]) else self._view[key, ...])

    def __setitem__(self, key: Any, value: Any) -> None:
        view = self._view
        if _has_arrays(key):
            return self._put(lambda k, v: view.__setitem__(k, v), [key, value], self)
        return self._put(lambda v: view.__setitem__(key, v), [value], self)

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        view = self._view.reshape(*shape)
        return self._like(view) if np.shares_memory(view, self._view) or not view.size else self.copy().reshape(*shape)

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def view(self, dtype: Any = None) -> ndarray:
        return self._like(self._view.view(dtype) if dtype is not None else self._view.view())

    def transpose(self, *axes: Any) -> ndarray:
        return self._like(self._view.transpose(*axes))

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        return _later(lambda x: x.astype(dtype), (self,), {}, None)

    def copy(self, order: str = "C") -> ndarray:
        return _later(np.array, (self,), {"order": "C"}, None)

    def fill(self, value: Any) -> None:
        self[...] = value

    def item(self, *at: int) -> Any:
        return self.get().item(*at)

    def tolist(self) -> Any:
        return self.get().tolist()

    def __getattr__(self, name: str) -> Any:
        if name in (
            "sum",
            "min",
            "max",
            "mean",
            "prod",
            "any",
            "all",
            "argmax",
            "argmin",
            "std",
            "var",
            "round",
            "clip",
            "dot",
        ):
            return lambda *args, **kwargs: _later(getattr(np, name), (self, *args), kwargs, kwargs.pop("out", None))
        if name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags"):
            return getattr(self._view, name)
        raise AttributeError(name)

    @property
    def T(self) -> ndarray:  # noqa: N802
        return self.transpose()

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __index__(self) -> int:
        return self.get().__index__()

    def __repr__(self) -> str:
        return repr(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get()[()] if spec else self.get(), spec)

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()


def _is_foreign(value: Any) -> bool:
    return hasattr(type(value), "__array_ufunc__") and not isinstance(value, (ndarray, np.ndarray, np.generic))


def _has_arrays(key: Any) -> bool:
    return any(isinstance(each, (ndarray, np.ndarray, list)) for each in (key if isinstance(key, tuple) else (key,)))


def _is_view(found: Any) -> bool:
    return isinstance(found, np.ndarray)


def _strict(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._view
    if isinstance(value, np.ndarray) or _is_foreign(value):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_strict, value))
    return value


def _later(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Put ``function(*args)`` on the stream; what it will look like is found out with zeros."""
    views = [_strict(value) for value in args]
    options = {name: _strict(value) for name, value in kwargs.items()}

    def blank(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(blank, value))
        if not isinstance(value, np.ndarray):
            return value
        return np.zeros_like(value) if value.dtype.kind in "iu" else np.ones_like(value)  # integers may be indices

    def flat(value: Any) -> list[np.ndarray]:
        if isinstance(value, (list, tuple)):
            return [leaf for each in value for leaf in flat(each)]
        return [value] if isinstance(value, np.ndarray) else []

    with np.errstate(all="ignore"):
        like = function(*map(blank, views), **{name: blank(value) for name, value in options.items()})
    if isinstance(like, (list, tuple)):
        found = [ndarray(np.shape(each), np.asarray(each).dtype) for each in like]
        targets = [each._view for each in found]
    else:
        found = [out if out is not None else ndarray(np.shape(like), np.asarray(like).dtype)]
        targets = [found[0]._view]

    def do() -> None:
        with np.errstate(all="ignore"):
            results = function(*views, **options)
        for target, result in zip(targets, results if isinstance(results, (list, tuple)) else [results], strict=True):
            np.copyto(target, result, casting="unsafe")

    get_current_stream().put(do, *targets, *flat(views))
    return found if isinstance(like, (list, tuple)) else found[0]


def asarray(value: Any, dtype: Any = None, **_: Any) -> ndarray:
    if isinstance(value, ndarray):
        return value if dtype is None or value.dtype == dtype else value.astype(dtype)
    if hasattr(value, "__cuda_array_interface__"):
        found = value.__cuda_array_interface__
        described = types.SimpleNamespace(__array_interface__={**found, "version": 3})
        view = np.asarray(described)
        made = ndarray(view.shape, view.dtype, None, _view=view)
        made._memory = value
        return made
    array = np.ascontiguousarray(value, dtype).reshape(np.shape(value))
    made = ndarray(array.shape, array.dtype)
    made.set(array)
    return made


def array(value: Any, dtype: Any = None, copy: bool = True, **_: Any) -> ndarray:
    return asarray(value, dtype).copy() if isinstance(value, ndarray) else asarray(value, dtype)


def from_dlpack(value: Any, **_: Any) -> ndarray:
    found = value.__dlpack__(stream=get_current_stream().ptr)
    assert isinstance(found, ndarray), "a stand-in's capsule is the double's array itself"
    return found


def asnumpy(value: Any) -> np.ndarray:
    return value.get() if isinstance(value, ndarray) else np.asarray(value)


def empty(shape: Any, dtype: Any = float, **_: Any) -> ndarray:
    return ndarray(shape, dtype)


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    assert kind in (_TO_DEVICE, _TO_HOST, _ON_DEVICE)
    target, source = _at(dst, size), _at(src, size)
    queue = next(each for each in _streams() if each.ptr == stream)
    queue.put(lambda: np.copyto(target, source), target, source)


def _at(address: int, size: int) -> np.ndarray:
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


class RawModule:
    """Source that is not looked at: what its kernels do is in `KERNELS`, by their names."""

    def __init__(self, code: str | None = None, *, options: tuple[str, ...] = (), name_expressions: Any = None) -> None:
        self.code = code or ""

    def compile(self, log_stream: Any = None) -> None:
        pass

    def get_function(self, name: str) -> RawKernel:
        assert name in self.code
        return RawKernel(name, self.code)


class RawKernel:
    """A kernel, which starts when somebody waits for it; what it is given by value it has from then on."""

    def __init__(self, name: str, code: str) -> None:
        self.name, self.code = name, code

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        counts["kernels"] += 1
        for each in args:  # as CuPy: an ndarray of one element goes by value
            assert not isinstance(each, np.ndarray) or each.size == 1
        own = [each.copy() if isinstance(each, (np.ndarray, np.generic)) else each for each in args]
        if self.name == gpu_update.NAME:
            do, memory = fused_double.update(_at, self.code, tuple(grid), tuple(block), own)
        else:
            do, memory = KERNELS[self.name](tuple(grid), tuple(block), own)
        get_current_stream().put(do, *memory)


def _moves(grid: Any, block: Any, args: Sequence[Any]) -> tuple[Callable[[], None], list[np.ndarray]]:
    """Do what `mpistrategy.reduction.routes.gpu` says of its kernel."""
    moves, count = args[0].view(gpu_route.MOVES)[0], int(args[1])
    assert type(args[1]) is np.int32
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    blocks = 0
    for source, target, size, first in zip(*(moves[name][:count].tolist() for name in moves.dtype.names)):  # noqa: B905
        assert first == blocks
        blocks += -(-size // gpu_route.BLOCK_BYTES)
        pairs.append((_at(source, size), _at(target, size)))
    assert grid == (blocks,)
    assert block == (gpu_route.THREADS,)

    def do() -> None:
        for source, target in pairs:
            np.copyto(target, source)

    return do, [view for pair in pairs for view in pair]


def bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def _of_keys(to_keys: bool) -> Callable[[Any, Any, Sequence[Any]], tuple[Callable[[], None], list[np.ndarray]]]:
    """Do what `mpistrategy.mpi.gpu.transports.ordered_keys` says of its kernels."""

    def kernel(grid: Any, block: Any, args: Sequence[Any]) -> tuple[Callable[[], None], list[np.ndarray]]:
        keys, size, is_minimum = args[0]._view, int(args[1]), bool(args[2])
        assert keys.size == size
        floats = keys.view(f"f{keys.itemsize}")
        limit = np.iinfo(keys.dtype).min if is_minimum else np.iinfo(keys.dtype).max

        def do() -> None:
            is_nan = np.isnan(floats) if to_keys else keys == limit
            keys[...] = np.where(keys < 0, keys ^ np.iinfo(keys.dtype).max, keys)
            if to_keys:
                keys[is_nan] = limit
            else:
                floats[is_nan] = np.nan

        return do, [keys]

    return kernel


#: What each kernel does: from the grid, the block and the arguments to its work and the memory that this touches.
KERNELS: dict[str, Callable[[Any, Any, Sequence[Any]], tuple[Callable[[], None], list[np.ndarray]]]] = {
    gpu_route.NAME: _moves,
    **{name: _of_keys(name == both[0]) for both in ordered_keys.NAMES.values() for name in both},
}


def _empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    return np.full(shape, 0x5A, dtype)


def _made() -> types.ModuleType:
    """Return the module, which any NumPy function is part of."""
    cupy = types.ModuleType("cupy")
    for each in (ndarray, asarray, array, asnumpy, empty, from_dlpack):
        each.__module__ = "cupy"
        setattr(cupy, each.__name__, each)
    for name in ("zeros", "ones", "full", "arange", "eye", "linspace"):
        setattr(cupy, name, lambda *args, _name=name, **kwargs: asarray(getattr(np, _name)(*args, **kwargs)))
    cupy.empty_like = lambda like, dtype=None: ndarray(like.shape, dtype or like.dtype)
    cupy.__getattr__ = _numpys
    cupy.__version__, cupy.__spec__ = "14.0 (a double)", importlib.machinery.ModuleSpec("cupy", None)
    cuda = types.ModuleType("cupy.cuda")
    cuda.Stream, cuda.Event, cuda.Device = Stream, Event, _Device
    cupy.RawModule = RawModule
    cuda.MemoryPool, cuda.get_current_stream = MemoryPool, get_current_stream
    cuda.memory = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cupy.get_default_memory_pool = lambda: _default_pool
    cuda.get_elapsed_time = lambda start, stop: 1.0  # ms
    cuda.runtime = types.SimpleNamespace(
        memcpyAsync=_memcpy_async,
        getDevice=lambda: getattr(_local, "device", 0),
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda device: {"name": b"a double"},
        deviceSynchronize=device_synchronize,
        memcpyHostToDevice=_TO_DEVICE,
        memcpyDeviceToHost=_TO_HOST,
        memcpyDeviceToDevice=_ON_DEVICE,
    )
    cupy.cuda = cuda
    return cupy


def _numpys(name: str) -> Any:
    found = getattr(np, name)
    if not callable(found) or isinstance(found, type):
        return found
    return lambda *args, **kwargs: _later(found, args, kwargs, kwargs.pop("out", None))


cupy = _made()
cupyx = types.ModuleType("cupyx")
cupyx.empty_pinned = _empty_pinned


@contextlib.contextmanager
def installed(nccl: types.ModuleType | None = None) -> Iterator[types.ModuleType]:
    """Let ``import cupy`` find the double meanwhile; afterwards nothing waits on any stream."""
    names = {"cupy": cupy, "cupy.cuda": cupy.cuda, "cupyx": cupyx}
    if nccl is not None:
        names["cupy.cuda.nccl"] = cupy.cuda.nccl = nccl
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield cupy
    finally:
        device_synchronize()
        Stream.null.use()
        _local.device = 0
        vars(cupy.cuda).pop("nccl", None)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
