"""What is public, with signatures, as text: `python tests/public_names.py` writes it to public_names.txt."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mpistrategy as ms

FILE = Path(__file__).with_suffix(".txt")
#: An annotation in a signature, which is a text.
ANNOTATION = re.compile(r"(: |-> )'([^']*)'")
MODULES = [
    ms, ms.errors, ms.gradients, ms.losses, ms.metrics, ms.optimizers, ms.schedules, ms.telemetry, ms.testing,
]  # fmt: skip


def public_name(module: Any) -> str:
    """Return the name under which users import a module."""
    return "mpistrategy" if module is ms else f"mpistrategy.{module.__name__.rpartition('.')[2]}"


def everything() -> Iterator[str]:
    """Yield one line for each public name, attribute, and overload."""
    for module in MODULES:
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.isclass(value):
                yield from of_class(f"{public_name(module)}.{name}", value)
            elif inspect.ismodule(value):
                yield f"{public_name(module)}.{name}: a module"
            elif inspect.isroutine(value):
                yield from of_function(f"{public_name(module)}.{name}", value)
            else:
                yield f"{public_name(module)}.{name} = {value!r}"


def of_class(name: str, kind: type) -> Iterator[str]:
    """Yield the lines of a class: its constructor, then its members, also those of bases that are not public."""
    bases = [base.__name__ for base in kind.__mro__[1:] if is_public(base) or base is Warning]
    if issubclass(kind, BaseException):
        bases += [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins" and base is not object][:1]
    yield f"class {name}({', '.join(bases)})"
    if issubclass(kind, enum.Enum):
        yield from (f"{name}.{member} = {kind[member].value!r}" for member in kind.__members__)
    elif "__init__" in vars(kind) and not getattr(kind, "_is_protocol", False):
        yield from of_function(name, kind)
    for member in sorted(members(kind) - (set(kind.__members__) if issubclass(kind, enum.Enum) else set())):
        value = inspect.getattr_static(kind, member, None)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            words = "" if value.fset is None else ", may be set"
            annotation = typing.cast(Any, value.fget).__annotations__.get("return") or attributes(kind).get(member)
            yield f"{name}.{member}: {annotation}  (property{words})"
        elif inspect.isfunction(value):
            yield from of_function(f"{name}.{member}", value)
        else:
            yield f"{name}.{member}: {attributes(kind).get(member, '')}".rstrip(": ")


def of_function(name: str, value: Any) -> Iterator[str]:
    """Yield one line for each overload, else one."""
    overloads = typing.get_overloads(value) if inspect.isfunction(value) else []
    for each in overloads or [value]:
        yield name + ANNOTATION.sub(r"\1\2", str(inspect.signature(each)))


def is_public(kind: type) -> bool:
    """Return whether a module names the class in its `__all__`."""
    return any(getattr(module, kind.__name__, None) is kind and kind.__name__ in module.__all__ for module in MODULES)


def members(kind: type) -> set[str]:
    """Return the public members of a class that no public base has."""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "mpistrategy"]
    inherited = {each for base in own[1:] if is_public(base) for other in base.__mro__ for each in names_in(other)}
    return {each for base in own for each in names_in(base)} - inherited


def names_in(kind: type) -> set[str]:
    """Return the public names in the body of a class, and of the attributes that its methods set."""
    if kind.__module__.partition(".")[0] != "mpistrategy":
        return set()
    return {name for name in (*vars(kind), *of_source(kind)) if not name.startswith("_")}


def attributes(kind: type) -> dict[str, str]:
    """Return the annotations of the attributes that a class and its bases set."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "mpistrategy":
            found.update(of_source(base))
    return found


@cache
def of_source(kind: type) -> dict[str, str]:
    """Return the attributes that the source of a class sets, with their annotations."""
    files = (inspect.unwrap(value).__code__.co_filename for value in vars(kind).values() if inspect.isfunction(value))
    # Dataclasses generate functions without a file of this package.
    file = next((file for file in files if Path(ms.__file__).parent in Path(file).parents), inspect.getfile(kind))
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.ClassDef) and node.name == kind.__name__):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.AnnAssign):
                targets, text = [part.target], ast.unparse(part.annotation)
            elif isinstance(part, ast.Assign):
                targets, text = part.targets, ""
            else:
                continue
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.setdefault(target.attr, text)
                elif part in node.body and isinstance(target, ast.Name):
                    found.setdefault(target.id, text)
    return found


if __name__ == "__main__":
    FILE.write_text("\n".join(everything()) + "\n", encoding="utf-8")
    sys.stdout.write(f"{FILE}: {len(FILE.read_text(encoding='utf-8').splitlines())} lines\n")
