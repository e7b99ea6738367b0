"""Public objects: attributes that are checked whenever they are set, and objects that cannot be copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, SupportsIndex, TypeVar

import numpy as np

from mpistrategy.errors import CopyError, OptionError, OptionTypeError
from mpistrategy.objects.shown import did_you_mean, in_words

T = TypeVar("T")
#: Returns the value of a setting to keep, given the class, the setting's name and the new value.
Check = Callable[[str, str, Any], T]


class Setting(Generic[T]):
    """An attribute that is checked when it is set; reading it costs what a plain attribute costs.

    Args:
        check: returns the value to keep, or raises; without one any value is kept.
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> T: ...

    def __init__(self, check: Check[T] = lambda where, name, value: value) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: object, value: Any) -> None:
        # Without __get__ the value is read from the instance's own dictionary.
        instance.__dict__[self._name] = self._check(type(instance).__name__, self._name, value)


class Fixed(Setting[T]):
    """An attribute that only the constructor sets."""

    def __set__(self, instance: object, value: Any) -> None:
        if self._name in instance.__dict__:
            kind = type(instance).__name__
            raise OptionError.at(
                f"{kind}.{self._name}",
                found="an assignment",
                expected="none after the constructor",
                fix=f"Make another {kind}.",
            )
        super().__set__(instance, value)


class Settable:
    """Base of objects with settings, which `repr` shows.  Setting a misspelt one raises.

    A program may set attributes of its own.  If the name is nearly a setting's name, the class must have a default.
    """

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self)
        if name not in self.__dict__ and not name.startswith("_") and not hasattr(kind, name):
            members = [member for base in kind.__mro__ for member in vars(base).items()]
            fix = did_you_mean(name, [known for known, member in members if _is_settable(member)], least=0.8)
            if fix:
                raise OptionError.at(
                    f"{kind.__name__}.{name}",
                    found="an attribute that does not exist",
                    expected="an existing one",
                    fix=f"{fix}  Give an attribute of your own a default in your class.",
                )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return in_words(self)


def _is_settable(member: object) -> bool:
    return isinstance(member, Setting) or (isinstance(member, property) and member.fset is not None)


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


def checked_type(
    where: str, name: str, value: Any, kind: type[T] | tuple[type[T], ...], expected: str, fix: str = ""
) -> T:
    """Return `value`; raise OptionTypeError if it is not of a type, or of one of several."""
    if not isinstance(value, kind):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected=expected, fix=fix)
    return value


def checked_number(
    where: str,
    name: str,
    value: Any,
    expected: str = "a number from 0 on",
    fits: Callable[[float], bool] = lambda number: number >= 0,
) -> float:
    """Return `value` as a float; raise OptionTypeError if it is not a number, OptionError if it does not fit."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected=expected)
    number = float(value)
    if not (np.isfinite(number) and fits(number)):
        raise OptionError.at(where, found=f"{name}={value!r}", expected=expected)
    return number


def one_of(where: str, name: str, value: Any, words: Sequence[str]) -> str:
    """Return `value` in small letters if it is one of `words`; raise OptionError else."""
    if isinstance(value, str) and value.lower() in words:
        return value.lower()
    expected = " or ".join(f'"{word}"' for word in words)
    raise OptionError.at(where, found=f"{name}={value!r}", expected=expected, fix=did_you_mean(value, words))


def checked_count(where: str, name: str, value: Any, least: int | None = 1) -> int:
    """Return `value` as an int; raise OptionTypeError for another type, OptionError below `least`, if there is one."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected="an int")
    if least is not None and value < least:
        raise OptionError.at(where, found=f"{name}={value}", expected=f"{least} or more")
    return int(value)


def checked_switch(where: str, name: str, value: Any) -> bool:
    """Return `value` as a bool; raise OptionTypeError if it is not a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected="True or False")
    return bool(value)


def positive(number: float) -> bool:
    """Return whether a number is above 0."""
    return number > 0


def number(*limits: Any) -> Setting[float]:
    """Return a setting that is a finite number, from 0 on or as the last two arguments of `checked_number` say."""
    return Setting(lambda where, name, value: checked_number(where, name, value, *limits))


def or_none(check: Check[T]) -> Setting[T | None]:
    """Return a setting that may be None."""
    return Setting(lambda where, name, value: None if value is None else check(where, name, value))
