"""Finds the name to write for a name that does not exist: misspelt, or of TensorFlow (`other_names`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mpistrategy.errors import OptionTypeError

P = ParamSpec("P")
T = TypeVar("T")


def did_you_mean(word: object, names: Iterable[str], least: float = 0.6) -> str:
    """Return ``Did you mean 'MEAN'?`` for a name that is nearly one of `names`, in any letter case; else "".

    Args:
        word: the name that somebody wrote.
        names: the names that exist.
        least: how alike they must be, from 0 to 1: twice the letters in common over all letters.
    """
    if not isinstance(word, str):
        return ""
    import difflib  # here, for the quick import

    names_by_lower_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), names_by_lower_case, 1, least)
    return f"Did you mean {names_by_lower_case[near[0]]!r}?" if near else ""


class NamesOurs:
    """Base of classes whose AttributeError says what to write for an attribute of TensorFlow's: `other_names`.

    Not of `ReplicaContext`: a class with a `__getattr__` reads each of its attributes more slowly, 5 % of a small sum.
    """

    #: The key in `other_names.OF_CLASS`.
    _words_of: str = ""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from mpistrategy.objects.other_names import OF_CLASS  # here, for the quick import

            hint = OF_CLASS.get(self._words_of, {}).get(name)
            if hint is None:
                return object.__getattribute__(self, name)  # raises the error again, Python's or that of a property
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. {hint}.")


def refuses(**words: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function that is given a keyword of TensorFlow's say what to write: OptionTypeError.

    Args:
        words: the keywords that it does not have, and what to do instead.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if kwargs and not words.keys().isdisjoint(kwargs):
                name = next(name for name in words if name in kwargs)
                where = function.__qualname__.removesuffix(".__init__")
                raise OptionTypeError.at(
                    where, found=f"{name}={kwargs[name]!r}", expected="a keyword that it has", fix=words[name]
                )
            return function(*args, **kwargs)

        return checked

    return decorate
