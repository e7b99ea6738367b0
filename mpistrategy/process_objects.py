"""How objects of this process and its ranks are copied and pickled, and how public objects show themselves."""

from __future__ import annotations

import enum
import inspect
import itertools
import sys
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex, get_type_hints

from mpistrategy.errors import CopyError

_numbers = itertools.count()


class Created:
    """Base of objects that each rank creates for itself, and that mean the same on all ranks.

    Attributes:
        _creation_order: greater for objects created later in this process.  Ranks may have created other objects in
            between, so only the order means something.  It is a tuple because it is no setting of the object.
    """

    _creation_order: tuple[int]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._creation_order = (next(_numbers),)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the number: a copy is created when it is copied."""
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_creation_order"}


def in_words(made: object) -> str:
    """Return ``SGD(learning_rate=0.1, momentum=0.9)``: the arguments of the constructor that are not its defaults."""
    kind, words = type(made), []
    for name, parameter in inspect.signature(kind).parameters.items():
        if not hasattr(made, name):
            continue
        value = getattr(made, name)
        is_member = isinstance(value, enum.Enum)
        if (value.name if is_member else value) != parameter.default:
            words.append(f"{name}={value.name if is_member else repr(value)}")
    return f"{kind.__name__}({', '.join(words)})"


def show_as(module: str, names: Iterable[str]) -> None:
    """Let classes and functions of a public module appear, and be pickled, under its name instead of their files'."""
    for name in names:
        shown = vars(sys.modules[module])[name]
        if inspect.isclass(shown) and "__annotations__" in vars(shown):
            shown.__annotations__ = get_type_hints(shown)  # as long as the names in them are found
        if inspect.isclass(shown) or inspect.isfunction(shown):
            shown.__module__ = module


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
