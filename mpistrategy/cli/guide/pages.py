"""Reads the pages of the guide, which are files of the package: titles, sections, words; and errors as a page."""

from __future__ import annotations

import functools
import importlib.resources
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpistrategy import errors

#: In which order the pages are listed; a page that is not named here comes after them.
ORDER = (
    *("quickstart", "tutorial", "concepts", "recipes", "domain", "checkpoints"),
    *("disagreement", "errors"),
    *("environment", "mpi", "slurm", "diagnose", "gpus", "performance", "many-nodes", "numerics"),
    *("tracing", "testing"),
    *("torch", "jax", "horovod", "tensorflow"),
    *("developers", "changes"),
)
_HEADING = re.compile(r"(#{1,6}) (.+)")


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, up to the next one."""

    heading: str
    text: str


@dataclass(frozen=True)
class Page:
    """A page of the guide.

    Attributes:
        name: what `mpistrategy guide` takes, the file's name without `.md`.
        text: its Markdown.
    """

    name: str
    text: str

    @property
    def title(self) -> str:
        """What its first line says."""
        return self.text.partition("\n")[0].removeprefix("# ")

    def sections(self) -> Iterator[Section]:
        """Yield its sections, the title's first; lines of code that look like headings are none."""
        heading, lines, is_code = "", list[str](), False
        for line in self.text.splitlines():
            is_code ^= line.lstrip().startswith("```")
            if not is_code and (found := _HEADING.fullmatch(line)):
                if heading:
                    yield Section(heading, "\n".join(lines).strip())
                heading, lines = found[2], []
            else:
                lines.append(line)
        yield Section(heading, "\n".join(lines).strip())


@functools.cache
def pages() -> dict[str, Page]:
    """Return all pages by name, in the order in which they are listed."""
    files = [file for file in importlib.resources.files(__package__).iterdir() if file.name.endswith(".md")]
    found = {name: Page(name, file.read_text(encoding="utf-8")) for file in files for name in [file.name[:-3]]}
    entries = [f"## {name}\n\n{inspect.getdoc(kind)}\n" for name, kind in classes().items()]
    found["errors"] = Page("errors", "\n".join(["# Errors and warnings\n", *entries]))
    known = {name: place for place, name in enumerate(ORDER)}
    return {name: found[name] for name in sorted(found, key=lambda name: (known.get(name, len(known)), name))}


def classes() -> dict[str, type[BaseException]]:
    """Return every error and warning of this package by name."""
    named = {name: getattr(errors, name) for name in errors.__all__}
    return {name: each for name, each in named.items() if isinstance(each, type) and issubclass(each, BaseException)}


def search(word: str) -> Iterator[tuple[Page, Section, str]]:
    """Yield the lines that have a word, in any letter case; of a heading, the heading."""
    wanted = word.casefold()
    for page in pages().values():
        for section in page.sections():
            for line in (section.heading, *section.text.splitlines()):
                if wanted in line.casefold():
                    yield page, section, line.strip()


def words() -> set[str]:
    """Return the words and names in all pages that are long enough to be misspelt."""
    return {word for page in pages().values() for word in re.findall(r"[A-Za-z_][\w-]{3,}", page.text)}
