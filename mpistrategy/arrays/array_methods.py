"""The methods of NumPy's arrays on values that act as arrays: those that read, and refusals of those that write.

The guide's page on variables has the same table, and a test compares both with `numpy.ndarray`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import UnsupportedError

Method: TypeAlias = Callable[..., Any]
#: What NumPy's methods return, as far as it is one type.
ArrayMethod: TypeAlias = Callable[..., Array]
Refused: TypeAlias = Callable[..., NoReturn]

#: Arguments of NumPy's methods that may be None, which says nothing.
_NONE_BY_DEFAULT = {"dtype", "out", "kind", "order", "mode", "side", "sorter", "min", "max", "stable"}


def _reads(name: str, gives: str, out: int | None = None) -> Callable[..., Any]:
    """Return a method that this rank's array does, and which takes what NumPy's takes.

    Args:
        name: its name.
        gives: what it returns, for help().
        out: which of its arguments `out` is, where it has one.
    """

    def method(self: ArrayMethods, *args: Any, **named: Any) -> Any:
        result = args[out] if out is not None and len(args) > out else named.get("out")
        if isinstance(result, ArrayMethods):
            result._refuse(f" as {name}(out=...)", f"a.{name}(...)")
        plain = [each._read() if isinstance(each, ArrayMethods) else each for each in args]
        # None is the default of these arguments, and CuPy's methods lack some of them.
        given = {key: value for key, value in named.items() if value is not None or key not in _NONE_BY_DEFAULT}
        return getattr(self._array(name), name)(*plain, **given)

    method.__name__, method.__qualname__ = name, f"ArrayMethods.{name}"
    method.__doc__ = f"Return {gives}.  Takes what `numpy.ndarray.{name}` takes."
    return method


def _refused(name: str, new: str = "", change: str = "") -> Callable[..., NoReturn]:
    """Return a method that is refused, since it would write.

    Args:
        name: its name.
        new: the text that makes the new value.
        change: the text that changes a copy ``x``, for a method that changes parts of the array.
    """

    def method(self: ArrayMethods, *args: Any, **named: Any) -> NoReturn:
        if change:
            self._refuse_part(f".{name}", change)
        self._refuse(f".{name}", new)

    method.__name__, method.__qualname__ = name, f"ArrayMethods.{name}"
    method.__doc__ = f"Refused: it would write.  Takes what `numpy.ndarray.{name}` takes."
    return method


class ArrayMethods:
    """The methods and attributes of `numpy.ndarray` that only read, each done by this rank's array.

    They take what NumPy's take and return what NumPy's return: an array, often a view, or a scalar.  For a value in GPU
    memory they are CuPy's.  A view of a variable on the host is read-only, and shows later writes.  The methods that
    write are refused, and say what to write instead; so is a result in this object's memory (``out=``).
    """

    def _array(self, asked: str) -> Any:
        """Return this rank's value as a NumPy or CuPy array, for the method or attribute that is asked for."""
        raise NotImplementedError

    def _read(self) -> Any:
        raise NotImplementedError

    def _assigned(self, new: str, operator: str = "") -> str:
        """Return what a program writes to give this object, its `v`, a new value; for ``v += x``, operator is "add"."""
        return f"v = {new}"

    def _refuse(self, what: str, new: str, operator: str = "") -> NoReturn:
        """Raise UnsupportedError: `what` would write into this object.  `new` is the text that makes the new value."""
        raise UnsupportedError.at(
            f"{type(self).__name__}{what}",
            found="a write into the memory of the array",
            expected="a new value",
            fix=f"Write {self._assigned(new, operator)}.",
        )

    def _refuse_part(self, what: str, change: str) -> NoReturn:
        """Refuse `what` as above; `change` changes parts of a copy ``x``."""
        raise UnsupportedError.at(
            f"{type(self).__name__}{what}",
            found="a write into the memory of the array",
            expected="a new value",
            fix=f"Write x = v.copy(); {change}; {self._assigned('x')}.",
        )

    # ------------------------------------------------------------------------------------------ attributes

    @property
    def T(self) -> Array:  # noqa: N802  # NumPy's name
        """The array with its axes reversed."""
        return self._array("T").T  # type: ignore[no-any-return]

    @property
    def real(self) -> Array:
        """The real parts."""
        return self._array("real").real  # type: ignore[no-any-return]

    @property
    def imag(self) -> Array:
        """The imaginary parts."""
        return self._array("imag").imag  # type: ignore[no-any-return]

    @property
    def flat(self) -> Any:
        """An iterator over the elements; it cannot write on the host."""
        array = self._array("flat")
        if isinstance(array, np.ndarray):
            array = array.view()
            array.flags.writeable = False
        return array.flat

    @property
    def flags(self) -> Any:
        """How the array lies in memory."""
        return self._array("flags").flags

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes from one element to the next, for each axis."""
        return self._array("strides").strides  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------- the methods that read

    transpose: ArrayMethod = _reads("transpose", "the array with its axes permuted")
    reshape: ArrayMethod = _reads("reshape", "the array in another shape")
    ravel: ArrayMethod = _reads("ravel", "the elements in one axis, a view where that is possible")
    flatten: ArrayMethod = _reads("flatten", "a copy of the elements in one axis")
    squeeze: ArrayMethod = _reads("squeeze", "the array without axes of length 1")
    swapaxes: ArrayMethod = _reads("swapaxes", "the array with two axes exchanged")
    diagonal: ArrayMethod = _reads("diagonal", "a diagonal")
    view: Method = _reads("view", "a view, of another dtype or type where one is given")
    copy: ArrayMethod = _reads("copy", "a copy, which may be written to")
    astype: ArrayMethod = _reads("astype", "the array in another dtype; a copy unless ``copy=False``")
    item: Method = _reads("item", "one element as a Python number")
    tolist: Method = _reads("tolist", "the elements as nested lists of Python numbers")
    tobytes: Callable[..., bytes] = _reads("tobytes", "the bytes of the elements")
    sum: Method = _reads("sum", "the sum of this rank's elements, over all axes or those given", out=2)
    prod: Method = _reads("prod", "the product, over all axes or those given", out=2)
    mean: Method = _reads("mean", "the mean of this rank's elements, over all axes or those given", out=2)
    std: Method = _reads("std", "the standard deviation, over all axes or those given", out=2)
    var: Method = _reads("var", "the variance, over all axes or those given", out=2)
    max: Method = _reads("max", "the greatest element, over all axes or those given", out=1)
    min: Method = _reads("min", "the least element, over all axes or those given", out=1)
    all: Method = _reads("all", "whether all elements are true, over all axes or those given", out=1)
    any: Method = _reads("any", "whether an element is true, over all axes or those given", out=1)
    argmax: Method = _reads("argmax", "where the greatest element is", out=1)
    argmin: Method = _reads("argmin", "where the least element is", out=1)
    cumsum: ArrayMethod = _reads("cumsum", "the sums of the elements up to each", out=2)
    cumprod: ArrayMethod = _reads("cumprod", "the products of the elements up to each", out=2)
    trace: Method = _reads("trace", "the sum of a diagonal", out=4)
    dot: Method = _reads("dot", "the matrix product with `b`, as ``numpy.dot``", out=1)
    clip: Method = _reads("clip", "the elements, those outside the limits replaced by the limits", out=2)
    round: Method = _reads("round", "the elements rounded", out=1)
    conj: Method = _reads("conj", "the complex conjugates")
    conjugate: Method = _reads("conjugate", "the complex conjugates")
    take: Method = _reads("take", "the elements at `indices`", out=2)
    choose: Method = _reads(
        "choose", "elements of `choices`, each from the array that this array's element names", out=1
    )
    compress: ArrayMethod = _reads("compress", "the parts along an axis where `condition` is true", out=2)
    repeat: ArrayMethod = _reads("repeat", "the elements, each repeated")
    nonzero: Callable[..., tuple[Array, ...]] = _reads(
        "nonzero", "where the elements are not zero, an array for each axis"
    )
    searchsorted: Method = _reads("searchsorted", "where `v` would be inserted into this sorted array")
    argsort: ArrayMethod = _reads("argsort", "the indices that would sort the array")
    argpartition: ArrayMethod = _reads("argpartition", "the indices that would partition the array")

    def byteswap(self, inplace: bool = False) -> Array:
        """Return a copy with the bytes of each element in the other order; ``inplace=True`` is refused.

        Takes what `numpy.ndarray.byteswap` takes.
        """
        if inplace:
            self._refuse(".byteswap(inplace=True)", "v.byteswap()")
        return self._array("byteswap").byteswap()  # type: ignore[no-any-return]

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:  # NumPy's name
        """Write the elements into a file.  Every rank that calls it writes: give each its own.

        Takes what `numpy.ndarray.tofile` takes.
        """
        self._array("tofile").tofile(fid, sep, format)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __contains__(self, element: object) -> bool:
        return element in self._read()

    # -------------------------------------------------------------------------------------- what would write

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse_part("[...] = value", "x[...] = value")

    fill: Refused = _refused("fill", "np.full_like(v, value)")
    sort: Refused = _refused("sort", "np.sort(v)")
    partition: Refused = _refused("partition", "np.partition(v, kth)")
    put: Refused = _refused("put", change="x.put(indices, values)")
    itemset: Refused = _refused("itemset", change="x[...] = value")
    setfield: Refused = _refused("setfield", change="x.setfield(value, dtype)")
    setflags: Refused = _refused("setflags", change="x[...] = value")

    def resize(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would change the shape.  Takes what `numpy.ndarray.resize` takes."""
        raise UnsupportedError.at(
            f"{type(self).__name__}.resize",
            found="a change of the array's own shape",
            expected="a new array",
            fix="Write x = np.resize(v, shape).",
        )
