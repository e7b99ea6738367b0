"""The methods of NumPy's arrays on values that act as arrays: those that read, and refusals of those that write.

The guide's page on variables has the same table, and a test compares both with `numpy.ndarray`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import UnsupportedError

Axis: TypeAlias = "SupportsIndex | Sequence[SupportsIndex] | None"


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

    def _call(self, method: str, *operands: Any, out: Any = None, **named: Any) -> Any:
        """Call a method of the array.  None among the named arguments stands for the method's own default."""
        if isinstance(out, ArrayMethods):
            out._refuse(f" as {method}(out=...)", f"a.{method}(...)")
        array = self._array(method)
        plain = [each._read() if isinstance(each, ArrayMethods) else each for each in operands]
        given = {name: value for name, value in {**named, "out": out}.items() if value is not None}
        return getattr(array, method)(*plain, **given)

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

    # ------------------------------------------------------------------------------- another form of the same

    def transpose(self, *axes: Any) -> Array:
        """Return the array with its axes permuted.  Takes what `numpy.ndarray.transpose` takes."""
        return self._call("transpose", *axes)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any, order: str | None = None, **more: Any) -> Array:
        """Return the array in another shape.  Takes what `numpy.ndarray.reshape` takes."""
        return self._call("reshape", *shape, order=order, **more)  # type: ignore[no-any-return]

    def ravel(self, order: str = "C") -> Array:
        """Return the elements in one axis, a view where that is possible.  Takes what `numpy.ndarray.ravel` takes."""
        return self._call("ravel", order)  # type: ignore[no-any-return]

    def flatten(self, order: str = "C") -> Array:
        """Return a copy of the elements in one axis.  Takes what `numpy.ndarray.flatten` takes."""
        return self._call("flatten", order)  # type: ignore[no-any-return]

    def squeeze(self, axis: Axis = None) -> Array:
        """Return the array without axes of length 1.  Takes what `numpy.ndarray.squeeze` takes."""
        return self._call("squeeze", axis=axis)  # type: ignore[no-any-return]

    def swapaxes(self, axis1: SupportsIndex, axis2: SupportsIndex, /) -> Array:
        """Return the array with two axes exchanged.  Takes what `numpy.ndarray.swapaxes` takes."""
        return self._call("swapaxes", axis1, axis2)  # type: ignore[no-any-return]

    def diagonal(self, offset: SupportsIndex = 0, axis1: SupportsIndex = 0, axis2: SupportsIndex = 1) -> Array:
        """Return a diagonal.  Takes what `numpy.ndarray.diagonal` takes."""
        return self._call("diagonal", offset, axis1, axis2)  # type: ignore[no-any-return]

    def view(self, *args: Any, **named: Any) -> Any:
        """Return a view, of another dtype or type where one is given.  Takes what `numpy.ndarray.view` takes."""
        return self._call("view", *args, **named)

    def copy(self, order: str = "C") -> Array:
        """Return a copy, which may be written to.  Takes what `numpy.ndarray.copy` takes."""
        return self._call("copy", order)  # type: ignore[no-any-return]

    def astype(self, dtype: Any, *args: Any, **named: Any) -> Array:
        """Return the array in another dtype; a copy unless ``copy=False``.  Takes what `numpy.ndarray.astype` takes."""
        return self._call("astype", dtype, *args, **named)  # type: ignore[no-any-return]

    def byteswap(self, inplace: bool = False) -> Array:
        """Return a copy with the bytes of each element in the other order; ``inplace=True`` is refused.

        Takes what `numpy.ndarray.byteswap` takes.
        """
        if inplace:
            self._refuse(".byteswap(inplace=True)", "v.byteswap()")
        return self._call("byteswap")  # type: ignore[no-any-return]

    def item(self, *args: Any) -> Any:
        """Return one element as a Python number.  Takes what `numpy.ndarray.item` takes."""
        return self._call("item", *args)

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers."""
        return self._call("tolist")

    def tobytes(self, order: str = "C") -> bytes:
        """Return the bytes of the elements.  Takes what `numpy.ndarray.tobytes` takes."""
        return self._call("tobytes", order)  # type: ignore[no-any-return]

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:  # NumPy's name
        """Write the elements into a file.  Every rank that calls it writes: give each its own.

        Takes what `numpy.ndarray.tofile` takes.
        """
        self._call("tofile", fid, sep, format)

    # ------------------------------------------------------------------------------------------- reductions

    def sum(self, axis: Axis = None, dtype: Any = None, out: Any = None, **more: Any) -> Any:
        """Return the sum of this rank's elements, over all axes or those given.

        Takes what `numpy.ndarray.sum` takes.
        """
        return self._call("sum", axis=axis, dtype=dtype, out=out, **more)

    def prod(self, axis: Axis = None, dtype: Any = None, out: Any = None, **more: Any) -> Any:
        """Return the product, over all axes or those given.  Takes what `numpy.ndarray.prod` takes."""
        return self._call("prod", axis=axis, dtype=dtype, out=out, **more)

    def mean(self, axis: Axis = None, dtype: Any = None, out: Any = None, **more: Any) -> Any:
        """Return the mean of this rank's elements, over all axes or those given.

        Takes what `numpy.ndarray.mean` takes.
        """
        return self._call("mean", axis=axis, dtype=dtype, out=out, **more)

    def std(self, axis: Axis = None, dtype: Any = None, out: Any = None, ddof: float = 0, **more: Any) -> Any:
        """Return the standard deviation, over all axes or those given.  Takes what `numpy.ndarray.std` takes."""
        return self._call("std", axis=axis, dtype=dtype, out=out, ddof=ddof, **more)

    def var(self, axis: Axis = None, dtype: Any = None, out: Any = None, ddof: float = 0, **more: Any) -> Any:
        """Return the variance, over all axes or those given.  Takes what `numpy.ndarray.var` takes."""
        return self._call("var", axis=axis, dtype=dtype, out=out, ddof=ddof, **more)

    def max(self, axis: Axis = None, out: Any = None, **more: Any) -> Any:
        """Return the greatest element, over all axes or those given.  Takes what `numpy.ndarray.max` takes."""
        return self._call("max", axis=axis, out=out, **more)

    def min(self, axis: Axis = None, out: Any = None, **more: Any) -> Any:
        """Return the least element, over all axes or those given.  Takes what `numpy.ndarray.min` takes."""
        return self._call("min", axis=axis, out=out, **more)

    def all(self, axis: Axis = None, out: Any = None, **more: Any) -> Any:
        """Return whether all elements are true, over all axes or those given.  Takes what `numpy.ndarray.all` takes."""
        return self._call("all", axis=axis, out=out, **more)

    def any(self, axis: Axis = None, out: Any = None, **more: Any) -> Any:
        """Return whether an element is true, over all axes or those given.  Takes what `numpy.ndarray.any` takes."""
        return self._call("any", axis=axis, out=out, **more)

    def argmax(self, axis: SupportsIndex | None = None, out: Any = None, **more: Any) -> Any:
        """Return where the greatest element is.  Takes what `numpy.ndarray.argmax` takes."""
        return self._call("argmax", axis=axis, out=out, **more)

    def argmin(self, axis: SupportsIndex | None = None, out: Any = None, **more: Any) -> Any:
        """Return where the least element is.  Takes what `numpy.ndarray.argmin` takes."""
        return self._call("argmin", axis=axis, out=out, **more)

    def cumsum(self, axis: SupportsIndex | None = None, dtype: Any = None, out: Any = None) -> Array:
        """Return the sums of the elements up to each.  Takes what `numpy.ndarray.cumsum` takes."""
        return self._call("cumsum", axis=axis, dtype=dtype, out=out)  # type: ignore[no-any-return]

    def cumprod(self, axis: SupportsIndex | None = None, dtype: Any = None, out: Any = None) -> Array:
        """Return the products of the elements up to each.  Takes what `numpy.ndarray.cumprod` takes."""
        return self._call("cumprod", axis=axis, dtype=dtype, out=out)  # type: ignore[no-any-return]

    def trace(
        self,
        offset: SupportsIndex = 0,
        axis1: SupportsIndex = 0,
        axis2: SupportsIndex = 1,
        dtype: Any = None,
        out: Any = None,
    ) -> Any:
        """Return the sum of a diagonal.  Takes what `numpy.ndarray.trace` takes."""
        return self._call("trace", offset, axis1, axis2, dtype=dtype, out=out)

    # --------------------------------------------------------------------------- elements, products, and order

    def dot(self, b: Any, out: Any = None) -> Any:
        """Return the matrix product with `b`, as ``numpy.dot``.  Takes what `numpy.ndarray.dot` takes."""
        return self._call("dot", b, out=out)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **more: Any) -> Any:
        """Return the elements, those outside the limits replaced by the limits.

        Takes what `numpy.ndarray.clip` takes.
        """
        return self._call("clip", min, max, out=out, **more)

    def round(self, decimals: SupportsIndex = 0, out: Any = None) -> Any:
        """Return the elements rounded.  Takes what `numpy.ndarray.round` takes."""
        return self._call("round", decimals, out=out)

    def conj(self) -> Any:
        """Return the complex conjugates."""
        return self._call("conj")

    def conjugate(self) -> Any:
        """Return the complex conjugates."""
        return self._call("conjugate")

    def take(self, indices: Any, axis: SupportsIndex | None = None, out: Any = None, mode: str | None = None) -> Any:
        """Return the elements at `indices`.  Takes what `numpy.ndarray.take` takes."""
        return self._call("take", indices, axis=axis, out=out, mode=mode)

    def choose(self, choices: Any, out: Any = None, mode: str | None = None) -> Any:
        """Return elements of `choices`, each from the array that this array's element names.

        Takes what `numpy.ndarray.choose` takes.
        """
        return self._call("choose", choices, out=out, mode=mode)

    def compress(self, condition: Any, axis: SupportsIndex | None = None, out: Any = None) -> Array:
        """Return the parts along an axis where `condition` is true.  Takes what `numpy.ndarray.compress` takes."""
        return self._call("compress", condition, axis=axis, out=out)  # type: ignore[no-any-return]

    def repeat(self, repeats: Any, axis: SupportsIndex | None = None) -> Array:
        """Return the elements, each repeated.  Takes what `numpy.ndarray.repeat` takes."""
        return self._call("repeat", repeats, axis=axis)  # type: ignore[no-any-return]

    def nonzero(self) -> tuple[Array, ...]:
        """Return where the elements are not zero, an array for each axis."""
        return self._call("nonzero")  # type: ignore[no-any-return]

    def searchsorted(self, v: Any, side: str | None = None, sorter: Any = None) -> Any:
        """Return where `v` would be inserted into this sorted array.  Takes what `numpy.ndarray.searchsorted` takes."""
        return self._call("searchsorted", v, side=side, sorter=sorter)

    def argsort(self, axis: SupportsIndex | None = -1, kind: Any = None, order: Any = None, **more: Any) -> Array:
        """Return the indices that would sort the array.  Takes what `numpy.ndarray.argsort` takes."""
        return self._call("argsort", axis, kind=kind, order=order, **more)  # type: ignore[no-any-return]

    def argpartition(self, kth: Any, axis: SupportsIndex | None = -1, kind: Any = None, order: Any = None) -> Array:
        """Return the indices that would partition the array.  Takes what `numpy.ndarray.argpartition` takes."""
        return self._call("argpartition", kth, axis, kind=kind, order=order)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __contains__(self, element: object) -> bool:
        return element in self._read()

    # -------------------------------------------------------------------------------------- what would write

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse_part("[...] = value", "x[...] = value")

    def fill(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would write.  Takes what `numpy.ndarray.fill` takes."""
        self._refuse(".fill", "np.full_like(v, value)")

    def sort(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would write.  Takes what `numpy.ndarray.sort` takes."""
        self._refuse(".sort", "np.sort(v)")

    def partition(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would write.  Takes what `numpy.ndarray.partition` takes."""
        self._refuse(".partition", "np.partition(v, kth)")

    def put(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would write.  Takes what `numpy.ndarray.put` takes."""
        self._refuse_part(".put", "x.put(indices, values)")

    def itemset(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would write.  Takes what `numpy.ndarray.itemset` takes."""
        self._refuse_part(".itemset", "x[...] = value")

    def setfield(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would write.  Takes what `numpy.ndarray.setfield` takes."""
        self._refuse_part(".setfield", "x.setfield(value, dtype)")

    def setflags(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would make the memory writable.  Takes what `numpy.ndarray.setflags` takes."""
        self._refuse_part(".setflags", "x[...] = value")

    def resize(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: it would change the shape.  Takes what `numpy.ndarray.resize` takes."""
        raise UnsupportedError.at(
            f"{type(self).__name__}.resize",
            found="a change of the array's own shape",
            expected="a new array",
            fix="Write x = np.resize(v, shape).",
        )
