"""`mpistrategy guide`: shows a page of the guide or the meaning of an error, lists the pages, and searches them."""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys

from mpistrategy.cli.guide import pages, reference
from mpistrategy.cli.guide.terminal import for_terminal

_COULD_NOT = 2
_HITS = 3  # of a page


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy guide`."""
    parser.add_argument("page", nargs="?", metavar="PAGE", help="a page, an error or a warning (default: the list)")
    parser.add_argument("--list", action="store_true", help="list the pages")
    parser.add_argument("--search", metavar="WORD", help="show the lines of all pages that have it")


def run(options: argparse.Namespace) -> int:
    """Show a page, the list or the hits of a search; return the exit status."""
    if options.search is not None:
        return _search(options.search)
    if options.page is not None and not options.list:
        return _show(options.page)
    by_name = pages.pages()
    width = max(map(len, by_name))
    for part, names in pages.PARTS.items():
        print(part)
        for name in names:
            if name in by_name:
                print(f"  {name:{width}}  {by_name[name].title}")
    print("\nmpistrategy guide PAGE shows one, mpistrategy guide CollectiveMismatchError what an error means,")
    print("and mpistrategy guide --search WORD where a word is.")
    return 0


def _show(query: str) -> int:
    by_name, classes = pages.pages(), reference.classes()
    name = query.removesuffix(".md").rpartition(".")[2]  # mpistrategy.errors.ShapeError
    by_lower_case = {entry.lower(): entry for entry in (*by_name, *classes)}
    match = by_lower_case.get(name.lower())
    if match is None:
        near = [by_lower_case[entry] for entry in difflib.get_close_matches(name.lower(), by_lower_case, 4, 0.6)]
        return _refuse(f"there is no page {query!r}", *([f"the nearest: {', '.join(near)}"] if near else []))
    print(for_terminal(by_name[match].text if match in by_name else _about(classes[match])))
    return 0


def _about(kind: type[BaseException]) -> str:
    """Return the docstring of an error's class, as a page."""
    bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if base not in (Exception, BaseException, object))
    return f"# {kind.__name__}\n\nIs also: {bases}\n\n{inspect.getdoc(kind)}\n"


def _search(word: str) -> int:
    """Show the lines that have a word, in any letter case, each with the heading above it."""
    hits = 0
    for page in pages.pages().values() if word.strip() else ():
        heading, lines = "", list[str]()
        for line in page.text.splitlines():
            heading = line.lstrip("# ") if line.startswith("#") else heading
            if word.casefold() in line.casefold():
                lines.append(line.strip() if line.startswith("#") else f"{heading}: {line.strip()}")
        if lines:
            print(f"{page.name}: {page.title}", *lines[:_HITS], sep="\n  ")
        if len(lines) > _HITS:
            print(f"  and {len(lines) - _HITS} more")
        hits += len(lines)
    return 0 if hits else _refuse(f"no page has {word!r}")


def _refuse(problem: str, more: str = "mpistrategy guide --list shows all pages") -> int:
    sys.stderr.write(f"mpistrategy guide: {problem}; {more}\n")
    return _COULD_NOT
