"""How objects of this process and its ranks are copied and pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from mpistrategy.errors import CopyError


class NotPickled:
    """Base of objects that are useless in another process, such as a child that multiprocessing has spawned.

    `copy.copy` raises, too, and `copy.deepcopy`, unless the class defines `__deepcopy__`.
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

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)
