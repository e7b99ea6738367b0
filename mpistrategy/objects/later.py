"""Names of modules that are loaded when they are used: thousands of ranks that start at once read fewer files.

A module writes the import for the type checker, and `later` for the run::

    if TYPE_CHECKING:
        from mpistrategy.reduction.gather import gather
    else:
        later(globals(), "mpistrategy.reduction.gather", "gather")

The first use loads the module and puts what was named in place of the stand-in, so later uses cost nothing more.  What
has been put elsewhere before (in an attribute, in a partial) stays a stand-in, which passes every call on.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any


class _Later:
    """Stands for a module, or for a function or a class in it; not for what is caught, subclassed or compared."""

    #: It would be another key than what it stands for.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, names: dict[str, Any], name: str, module: str, attribute: str) -> None:
        self._names, self._name, self._module, self._attribute = names, name, module, attribute
        self._loaded: Any = None

    def _load(self) -> Any:
        if self._loaded is None:
            module = importlib.import_module(self._module)
            self._loaded = getattr(module, self._attribute) if self._attribute else module
            if self._names.get(self._name) is self:  # a test may have put something else there
                self._names[self._name] = self._loaded
        return self._loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all names of a module
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __instancecheck__(self, value: object) -> bool:
        """Return whether `value` is of the class; there are no objects of a class that is not loaded."""
        return self._module in sys.modules and isinstance(value, self._load())


def later(names: dict[str, Any], module: str, *attributes: str) -> None:
    """Put stand-ins for attributes of a module, or for the module itself, into the globals of another module.

    Args:
        names: these globals.
        module: the whole name of the module.
        attributes: functions and classes of it; without any, the module, under the last part of its name.
    """
    for attribute in attributes or ("",):
        name = attribute or module.rpartition(".")[2]
        names[name] = _Later(names, name, module, attribute)


class _LaterMethod:
    """Stands for a method of a base class that is not loaded."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: object, kind: type | None = None) -> Any:
        loaded = getattr(importlib.import_module(self._module), self._owner.__name__)
        users: list[type] = self._owner.__subclasses__()
        for each in users:
            each.__bases__ = tuple(loaded if base is self._owner else base for base in each.__bases__)
        return inspect.getattr_static(loaded, self._name).__get__(instance, kind)


def later_base(place: str, methods: str) -> Any:
    """Return a base class that another class replaces when one of its methods is first used.

    Args:
        place: the whole name of that class; it has no attributes that are set by `__init__`.
        methods: the names of its methods, with spaces between them.
    """
    module, _, name = place.rpartition(".")
    return type(name, (), {each: _LaterMethod(module) for each in methods.split()} | {"__module__": module})
