"""Names of modules that `import mpistrategy` does not load.

A module writes the import for the type checker, and `later` for the run::

    if TYPE_CHECKING:
        from mpistrategy.reduction.gather import gather
    else:
        later(globals(), "mpistrategy.reduction.gather", "gather")

The first use loads the module and puts what was named in place of the stand-in, so later uses cost nothing more.  What
has been put elsewhere before (in an attribute, in a partial) stays a stand-in, which passes every call on.

A strategy of MPI ranks loads them all when it is made (`load_all`): a call must not fail on one rank because a file
cannot be opened.
"""

from __future__ import annotations

import importlib
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


#: All stand-ins whose modules have not been loaded by `load_all`.
_unloaded: list[_Later] = []


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
        _unloaded.append(names[name])


def load_all() -> None:
    """Load what all stand-ins stand for, those in the modules that are loaded by this too."""
    while _unloaded:
        _unloaded[-1]._load()
        _unloaded.pop()
