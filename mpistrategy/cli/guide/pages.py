"""The pages of the guide: files of the package, and pages made from the package: names, errors, the command line."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.resources
import inspect
from typing import Any

import mpistrategy
from mpistrategy import errors
from mpistrategy.cli import main

#: The parts of the guide, and the pages of each in the order in which people read them.  The site has the same parts.
PARTS = {
    "Start": ("quickstart", "tutorial", "concepts"),
    "How to": (
        *("torch", "jax", "horovod", "tensorflow", "recipes", "domain", "checkpoints"),
        *("slurm", "mpi", "gpus", "many-nodes", "diagnose", "tracing", "testing"),
    ),
    "Explain": ("disagreement", "numerics", "performance"),
    "Reference": ("names", "errors", "environment", "command-line"),
    "For developers": ("developers", "changes"),
}
#: Where the names of modules are that need another library.
_ELSEWHERE = "Names of `mpistrategy.torch` and `mpistrategy.jax` are in [torch](torch.md) and [JAX](jax.md)."


@functools.cache
def pages() -> dict[str, str]:
    """Return the Markdown of all pages by name (the file's without `.md`), in the order of the list."""
    files = [file for file in importlib.resources.files(__package__).iterdir() if file.name.endswith(".md")]
    texts = {file.name.removesuffix(".md"): file.read_text(encoding="utf-8") for file in files}
    texts |= {"names": _names(), "errors": _errors(), "command-line": _command_line()}
    return {name: texts[name] for names in PARTS.values() for name in names}


def title(text: str) -> str:
    """Return what the first line of a page says."""
    return text.partition("\n")[0].removeprefix("# ")


def classes() -> dict[str, type[BaseException]]:
    """Return every error and warning of this package by name."""
    values = {name: getattr(errors, name) for name in errors.__all__}
    return {
        name: value for name, value in values.items() if isinstance(value, type) and issubclass(value, BaseException)
    }


def public() -> dict[str, dict[str, Any]]:
    """Return the public names of each public module, with their values."""
    inner = [f"mpistrategy.{name}" for name in mpistrategy.__all__ if inspect.ismodule(getattr(mpistrategy, name))]
    public_names: dict[str, dict[str, Any]] = {}
    for path in ("mpistrategy", *inner):
        module = importlib.import_module(path)
        public_names[path] = {
            name: getattr(module, name) for name in sorted(module.__all__) if f"{path}.{name}" not in inner
        }
    return public_names


def _names() -> str:
    """Return a table for each public module: a name, and the first paragraph of its docstring."""
    lines = ["# Public names", "", f"Other names are private and change without notice. {_ELSEWHERE}"]
    for path, values in public().items():
        lines += ["", f"## {path}", "", "| name | what it is |", "|---|---|"]
        lines.extend(f"| `{name}` | {_summary(value)} |" for name, value in values.items())
    return "\n".join(lines)


def _summary(value: Any) -> str:
    """Return the first paragraph of a docstring."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return "A constant, or a type for annotations."
    first = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def _errors() -> str:
    """Return the docstrings of all errors and warnings, as a page."""
    entries = [
        f"## {name}\n\n{inspect.getdoc(kind)}\n".replace("\nCure:", "\n\nCure:") for name, kind in classes().items()
    ]
    return "\n".join(["# Errors and warnings\n", *entries])


def _command_line() -> str:
    """Return the help of every command."""
    entries = ["# Command line\n"]
    for name, command in main.COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"mpistrategy {name}", description=command.summary)
        parser.color = False  # type: ignore[attr-defined, unused-ignore]  # from Python 3.14 on
        command.load().add_options(parser)
        entries.append(f"## mpistrategy {name}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(entries)
