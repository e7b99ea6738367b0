"""MIN and MAX of floats whose bits do not depend on who combines what first.

-0.0 is less than +0.0.  NaN wins, and there is one NaN: the positive quiet one of the dtype, as `np.nan` is.  So both
are commutative and associative in every bit, which `np.minimum` and `np.maximum` are not: of two zeros and of two NaNs
each takes either, depending on the processor and on the place in the array.

What they leave open is the sign of a zero.  For numbers of any size, that of a minimum is set where one of the signs is
set, and that of a maximum where both are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = "npt.NDArray[Any]"

#: So many bytes at a time: they are looked at several times, and stay in the cache.
_CHUNK_BYTES = 256 * 2**10
#: The bit of the sign, by the size of a float; long double has no integers of its size.
_SIGNS = {size: np.dtype(f"u{size}").type(1 << (8 * size - 1)) for size in (2, 4, 8)}


class Extreme:
    """MIN or MAX of two arrays of one dtype and shape; called as a ufunc is.

    Args:
        ufunc: `np.minimum` or `np.maximum`.
    """

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc
        self._is_minimum = ufunc is np.minimum
        self._join = np.logical_or if self._is_minimum else np.logical_and

    def __call__(self, one: Array, other: Array, out: Array | None = None) -> Array:
        """Return the combination in `out`, which may be one of the two, or in new memory."""
        if one.dtype.kind != "f":
            return self._ufunc(one, other, out=out)  # type: ignore[no-any-return]
        step = _CHUNK_BYTES // one.itemsize
        if one.ndim != 1 or one.size <= step:
            found = self._combined(one, other)
            if out is None:
                return found
            out[...] = found
            return out
        target = np.empty(one.shape, one.dtype) if out is None else out
        for start in range(0, one.size, step):
            part = slice(start, start + step)
            target[part] = self._combined(one[part], other[part])
        return target

    def reduce(self, array: Array, axes: tuple[int, ...], initial: Any) -> Array:
        """Return the combination of an array along some axes; `initial` where there is nothing along them."""
        found = np.asarray(self._ufunc.reduce(array, axis=axes, initial=initial))
        if array.dtype.kind == "f":
            _settle(found, self._join.reduce(np.signbit(array), axis=axes))
        return found

    def _combined(self, one: Array, other: Array) -> Array:
        found: Array = self._ufunc(one, other, out=np.empty(one.shape, one.dtype))
        if found.size == 0:
            return found
        least = abs(found.item()) if found.size == 1 else np.minimum.reduce(np.abs(found), axis=None)
        if least > 0:  # there is neither a zero nor a NaN
            return found
        sign = _SIGNS.get(found.itemsize)
        if sign is None:
            _settle(found, self._join(np.signbit(one), np.signbit(other)))
            return found
        these, those, whole = (array.view(sign.dtype) for array in (one, other, found))
        if self._is_minimum:
            whole |= (these | those) & sign
        else:
            whole &= (these & those) | ~sign
        _settle_nan(found)
        return found


def _settle(found: Array, negative: Any) -> None:
    """Give zeros the signs that are said, and NaN its one pattern."""
    zero = found == 0
    np.copyto(found, found.dtype.type(0), where=zero)
    np.copyto(found, -found.dtype.type(0), where=zero & negative)
    _settle_nan(found)


def _settle_nan(found: Array) -> None:
    is_nan = found != found
    if np.any(is_nan):
        np.copyto(found, found.dtype.type(np.nan), where=is_nan)


minimum = Extreme(np.minimum)
maximum = Extreme(np.maximum)
