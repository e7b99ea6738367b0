"""What is public: a module's `__all__` names it, and `dir()` shows it and no more."""

from __future__ import annotations

import importlib
import inspect

import pytest

import mpistrategy as ms

MODULES = [ms.errors, ms.gradients, ms.metrics, ms.optimizers, ms.telemetry, ms.testing]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_public_module_shows_its_public_names_and_no_more(module: object) -> None:
    names = list(module.__all__)  # type: ignore[attr-defined]
    assert dir(module) == sorted(set(names))
    assert len(names) == len(set(names))
    starred: dict[str, object] = {}
    exec(f"from {module.__name__} import *", starred)  # type: ignore[attr-defined]
    assert starred.keys() - {"__builtins__"} == set(names)
    for name in names:
        found = getattr(module, name)
        assert (inspect.getdoc(found) or "").strip() or isinstance(found, (str, int, tuple)), name


def test_errors_and_warnings_are_all_of_the_tree() -> None:
    for name in ms.errors.__all__:
        kind = getattr(ms.errors, name)
        assert name == "RankCall" or issubclass(kind, (ms.errors.MpiStrategyError, Warning)), name
    module = importlib.import_module("mpistrategy.errors")
    own = {name for name, kind in vars(module).items() if inspect.isclass(kind) and kind.__module__ == module.__name__}
    assert own == set(ms.errors.__all__)
