"""How objects of this process and its ranks are copied and pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn, Self, SupportsIndex

from mpistrategy.errors import CopyError


class NotPickled:
    """Base of objects that are useless in another process, such as a child that multiprocessing has spawned.

    `copy.deepcopy` raises, too, unless the class defines `__deepcopy__`; `copy.copy` returns a shallow copy.
    """

    #: What to do instead.
    _instead_of_pickling: ClassVar[str] = ""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise CopyError.at(
            f"copying or pickling {kind}",
            found="an object that belongs to this process and its ranks",
            expected=f"another {kind}, made where it is used",
            fix=self._instead_of_pickling,
        )

    def __copy__(self) -> Self:
        result = type(self).__new__(type(self))
        result.__dict__.update(self.__dict__ | result.__dict__)  # attributes set by __new__ are the copy's own
        return result
