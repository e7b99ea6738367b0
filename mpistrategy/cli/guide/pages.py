"""`mpistrategy guide`: shows a page of the guide or the meaning of an error, lists the pages, and searches them.

Pages are files of the package, or made from the package itself: names, errors, the command line.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.resources
import inspect
import re
from typing import Any

import mpistrategy
from mpistrategy import errors
from mpistrategy.cli import main
from mpistrategy.objects.shown import did_you_mean

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
#: So many lines of a page are shown.
_HITS = 3
_WHERE = "mpistrategy guide"
#: What only the site needs.
_FOR_THE_SITE = re.compile(r"<!--.*?-->\n?|</?details>\n?|<summary>.*?</summary>\n?", re.DOTALL)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy guide`."""
    parser.add_argument("page", nargs="?", metavar="PAGE", help="a page, an error or a warning (default: the list)")
    parser.add_argument("--list", action="store_true", help="list the pages")
    parser.add_argument("--search", metavar="WORD", help="show the lines of all pages that have it")


def run(options: argparse.Namespace) -> int:
    """Show a page, the list or the hits of a search; return the exit status."""
    if options.search is not None:
        _search(options.search)
    elif options.page is not None and not options.list:
        _show(options.page)
    else:
        _list()
    return 0


def _list() -> None:
    by_name = pages()
    width = max(map(len, by_name))
    for part, names in PARTS.items():
        print(part)
        for name in names:
            print(f"  {name:{width}}  {title(by_name[name])}")
    print("\nmpistrategy guide PAGE shows one, mpistrategy guide CollectiveMismatchError what an error means,")
    print("and mpistrategy guide --search WORD where a word is.")


def _show(query: str) -> None:
    texts = pages() | {name: _about(kind) for name, kind in classes().items()}
    name = query.removesuffix(".md").rpartition(".")[2]  # mpistrategy.errors.ShapeError
    by_lower_case = {entry.lower(): entry for entry in texts}
    match = by_lower_case.get(name.lower())
    if match is None:
        fix = did_you_mean(name, by_lower_case.values())
        expected = "a page of mpistrategy guide --list, an error or a warning"
        raise errors.OptionError.at(_WHERE, found=f"the page {query!r}", expected=expected, fix=fix)
    print(_FOR_THE_SITE.sub("", texts[match]).strip())


def _about(kind: type[BaseException]) -> str:
    """Return the docstring of an error's class, as a page."""
    bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if base not in (Exception, BaseException, object))
    return f"# {kind.__name__}\n\nIs also: {bases}\n\n{inspect.getdoc(kind)}\n"


def _search(word: str) -> None:
    """Show the lines that have a word, in any letter case, each with the heading above it."""
    hits = 0
    for name, text in pages().items() if word.strip() else ():
        heading, lines = "", list[str]()
        for line in text.splitlines():
            heading = line.lstrip("# ") if line.startswith("#") else heading
            if word.casefold() in line.casefold():
                lines.append(line.strip() if line.startswith("#") else f"{heading}: {line.strip()}")
        if lines:
            print(f"{name}: {title(text)}", *lines[:_HITS], sep="\n  ")
        if len(lines) > _HITS:
            print(f"  and {len(lines) - _HITS} more")
        hits += len(lines)
    if not hits:
        raise errors.OptionError.at(_WHERE, found=f"the word {word!r}", expected="a word of some page")


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
    for name, (summary, _) in main.COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"mpistrategy {name}", description=summary)
        parser.color = False  # type: ignore[attr-defined, unused-ignore]  # from Python 3.14 on
        main.load(name).add_options(parser)
        entries.append(f"## mpistrategy {name}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(entries)
