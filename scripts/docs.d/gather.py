"""Gathers the pages of the site: README, the guide, one page for each public name, and the notebooks.

    python scripts/docs.d/gather.py FOLDER

FOLDER gets the pages and mkdocs.yml. Fails, with a list, when a public name or one of its arguments has no words, or
when a link names a file that is not there.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "mpistrategy" / "cli" / "guide"
NOTEBOOKS = ROOT / "scripts" / "notebooks"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from public_names import MODULES, members, public_name  # noqa: E402

#: What only the library makes: its constructor's arguments are nobody's business.
MADE_BY_THE_LIBRARY = ("AllReduceHandle", "Dataset", "DistributedIterator")
#: Attributes that only raise, or warn, and name another one; what Python's own base class takes.
NOT_TOLD = {"lr", "clipnorm", *("fmt", "datefmt", "style", "validate", "defaults")}
_NO_PARAMETER = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
#: A docstring that leaves the arguments to that of another function.
_REFERS = re.compile(r"\b(?:as|as by|Do|what|Return) `[\w.]+`|Return `\w+\(")
_LINK = re.compile(r"(!?)\[([^][]*)\]\(([^()\s]+)\)")
#: `[a] [b]` outside of code: the site takes it for a link to the public name b.
_LINK_TO_A_NAME = re.compile(r"\[[^][\n]+\] ?\[[^][\n]*\]")
_CODE = re.compile(r"`[^`\n]*`")
_REPOSITORY = ("http://", "https://", "mailto:", "#")


# ---------------------------------------------------------------------------------------- what has no words


def without_words() -> Iterator[str]:
    """Yield what is public and says nothing of itself, of an argument, or of an attribute."""
    for module in MODULES:
        for name in module.__all__:
            value, full = getattr(module, name), f"{public_name(module)}.{name}"
            if inspect.isclass(value):
                yield from _of_class(full, value)
            elif inspect.isroutine(value):
                yield from _of_function(full, value)


def _of_class(full: str, kind: type) -> Iterator[str]:
    if not kind.__doc__:
        yield f"{full}: no docstring"
        return
    told = {each for base in kind.__mro__ for each in _entries(inspect.getdoc(base) or "", "Args", "Attributes")}
    is_plain = not issubclass(kind, (BaseException, enum.Enum)) and not getattr(kind, "_is_protocol", False)
    if is_plain and kind.__name__ not in MADE_BY_THE_LIBRARY:
        yield from (f"{full}: nothing about the argument {each}" for each in _parameters(kind) if each not in told)
    for member in sorted(members(kind)):
        found = inspect.getattr_static(kind, member, None)
        function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
        if isinstance(found, property):
            if not found.__doc__:
                yield f"{full}.{member}: no docstring"
        elif inspect.isfunction(inspect.unwrap(function)) if function is not None else False:
            yield from _of_function(f"{full}.{member}", getattr(kind, member))
        elif not issubclass(kind, enum.Enum) and member not in told | NOT_TOLD:
            yield f"{full}: nothing about the attribute {member}"


def _of_function(full: str, function: Any) -> Iterator[str]:
    words = inspect.getdoc(function) or ""
    if not words:
        yield f"{full}: no docstring"
    elif not _REFERS.search(words):
        told = _entries(words, "Args")
        for each in _parameters(function):
            if each not in told and not re.search(rf"[`(*\s,]{each}\b", words):
                yield f"{full}: nothing about the argument {each}"


def _parameters(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind not in _NO_PARAMETER and not each.name.startswith("_")]
    return [name for name in names if name != "self" and name not in NOT_TOLD]


def _entries(words: str, *titles: str) -> set[str]:
    """Return the names that a docstring's sections list."""
    found: set[str] = set()
    for title in titles:
        section = re.search(rf"^{title}:\n((?:[ ]+.*\n?|\n)*)", words, re.MULTILINE)
        for line in section[1].splitlines() if section else ():
            if entry := re.match(r"    ([\w*, ]+):", line):
                found |= {each.strip().lstrip("*") for each in entry[1].split(",")}
    return found


# ------------------------------------------------------------------------------------------------- the pages


class Site:
    """The folder of the pages.

    Args:
        folder: where they go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages = folder / "pages"
        shutil.rmtree(self._pages, ignore_errors=True)
        self._pages.mkdir(parents=True)
        self.problems: list[str] = []

    def build(self) -> None:
        """Write all pages, and mkdocs.yml."""
        self.problems += without_words()
        nav: list[Any] = [{"mpistrategy": self._copy(ROOT / "README.md", "index.md")}]
        nav.append({"Guide": [{_title(page): self._copy(page, f"guide/{page.name}")} for page in _guide()]})
        notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
        if notebooks:
            shown = [{each.stem.replace("_", " "): f"notebooks/{each.stem}.md"} for each in notebooks]
            nav.append({"Notebooks": shown})
        nav.append({"Names": [{"all names": "api/index.md"}, *self._api()]})
        settings: dict[str, Any] = {
            "INHERIT": os.path.relpath(ROOT / "scripts" / "docs.d" / "mkdocs.yml", self._folder)
        }
        python = {"paths": [str(ROOT)], "options": {"extensions": [str(ROOT / "scripts" / "docs.d" / "names.py")]}}
        settings |= {"docs_dir": "pages", "site_dir": "site", "nav": nav}
        settings["plugins"] = {"mkdocstrings": {"handlers": {"python": python}}}
        (self._folder / "mkdocs.yml").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    def _copy(self, page: Path, target: str) -> str:
        """Write a page of the repository; links to what the site does not have become plain text."""

        def linked(match: re.Match[str]) -> str:
            mark, text, link = match.groups()
            if link.startswith(_REPOSITORY):
                return match[0]
            path, _, anchor = link.partition("#")
            wanted = (page.parent / path).resolve()
            if not wanted.exists():
                self.problems.append(f"{page.relative_to(ROOT)}: no file {link}")
                return text
            if mark:
                self._write(f"images/{wanted.name}", wanted.read_bytes())
                there = f"images/{wanted.name}"
            elif wanted == ROOT / "README.md":
                there = "index.md"
            elif wanted.parent == GUIDE and wanted.suffix == ".md":
                there = f"guide/{wanted.name}"
            else:
                return text
            relative = os.path.relpath(there, Path(target).parent)
            return f"{mark}[{text}]({relative}{'#' if anchor else ''}{anchor})"

        parts = re.split(r"(^```.*?^```$)", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        outside = (_CODE.sub("", part) for part in parts if not part.startswith("```"))
        self.problems += [
            f"{page.relative_to(ROOT)}: {found} is a link to a name"
            for part in outside
            for found in _LINK_TO_A_NAME.findall(part)
        ]
        text = "".join(part if part.startswith("```") else _LINK.sub(linked, part) for part in parts)
        self._write(target, text.encode())
        return target

    def _api(self) -> list[Any]:
        """Write a page for each public name and one with all of them; return them in order, by module."""
        nav: list[Any] = []
        table = ["# All public names", "", "What is not here is private, and changes without notice.", ""]
        for module in MODULES:
            title = public_name(module)
            about = (inspect.getdoc(module) or "").partition("\n")[0]
            table += [f"## {title}", "", about, "", "| name | |", "|---|---|"]
            pages: list[Any] = []
            for name in sorted(module.__all__):
                value = getattr(module, name)
                if isinstance(value, ModuleType):
                    continue
                page = f"api/{title.removeprefix('mpistrategy').strip('.') or 'mpistrategy'}.{name}.md"
                self._write(page, f"::: {title}.{name}\n".encode())
                pages.append({name: page})
                first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()).replace("|", "\\|")
                table.append(f"| [{name}]({Path(page).name}) | {first} |")
            table.append("")
            nav.append({title: pages})
        self._write("api/index.md", "\n".join(table).encode())
        return nav

    def _write(self, target: str, content: bytes) -> None:
        path = self._pages / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _guide() -> list[Path]:
    try:
        order = importlib.import_module("mpistrategy.cli.guide.pages").ORDER
    except ImportError:
        order = ()
    rank = {name: number for number, name in enumerate(order)}
    return sorted(GUIDE.glob("*.md"), key=lambda page: (rank.get(page.stem, len(rank)), page.stem))


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


if __name__ == "__main__":
    site = Site(Path(sys.argv[1]))
    site.build()
    if site.problems:
        sys.exit("\n".join(site.problems))
