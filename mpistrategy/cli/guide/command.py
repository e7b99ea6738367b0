"""`mpistrategy guide`: shows a page of the guide, or what an error means, lists the pages, and searches them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

_COULD_NOT = 2
_NEAREST = 4
_HITS = 3  # of a page


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy guide`."""
    parser.add_argument("page", nargs="?", metavar="PAGE", help="a page, an error or a warning (default: the list)")
    parser.add_argument("--list", action="store_true", help="list the pages")
    parser.add_argument("--search", metavar="WORD", help="show the lines of all pages that have it")


def run(options: argparse.Namespace) -> int:
    """Show what is asked for; return the exit status."""
    # What reads pages is imported in functions: `mpistrategy run` imports this file on every rank.
    if options.search is not None:
        return _search(options.search)
    if options.list or options.page is None:
        return _list()
    return _show(options.page)


def _list() -> int:
    from mpistrategy.cli.guide import pages

    every = pages.pages()
    width = max(map(len, every))
    for page in every.values():
        print(f"{page.name:{width}}  {page.title}")
    print("\nmpistrategy guide PAGE shows one, mpistrategy guide CollectiveMismatchError what an error means,")
    print("and mpistrategy guide --search WORD where a word is.")
    return 0


def _show(given: str) -> int:
    from mpistrategy.cli.guide import pages, terminal

    every, classes = pages.pages(), pages.classes()
    name = given.removesuffix(".md").rpartition(".")[2]  # mpistrategy.errors.ShapeError
    by_lower_case = {each.lower(): each for each in (*every, *classes)}
    known = by_lower_case.get(name.lower())
    if known is None:
        _refuse(f"there is no page {given!r}", name, by_lower_case.values(), "mpistrategy guide --list shows all pages")
        return _COULD_NOT
    terminal.show(every[known].text if known in every else _about(classes[known]))
    return 0


def _about(kind: type[BaseException]) -> str:
    """Return what an error's class says."""
    import inspect

    bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if base not in (Exception, BaseException, object))
    return f"# {kind.__name__}\n\nIs also: {bases}\n\n{inspect.getdoc(kind)}\n"


def _search(word: str) -> int:
    import itertools

    from mpistrategy.cli.guide import pages

    found = list(pages.search(word)) if word.strip() else []
    if not found:
        _refuse(f"no page has {word!r}", word, pages.words(), "mpistrategy guide --list shows all pages")
        return _COULD_NOT
    for page, of_page in itertools.groupby(found, key=lambda hit: hit[0]):
        hits = list(of_page)
        print(f"{page.name}: {page.title}")
        for _, section, line in hits[:_HITS]:
            print(f"  {section.heading}: {line}" if line != section.heading else f"  {line}")
        if len(hits) > _HITS:
            print(f"  and {len(hits) - _HITS} more")
    return 0


def _refuse(what: str, given: str, names: Iterable[str], else_say: str) -> None:
    import difflib

    known = {name.lower(): name for name in names}
    near = [known[each] for each in difflib.get_close_matches(given.lower(), known, _NEAREST, 0.6)]
    more = f"the nearest: {', '.join(near)}" if near else else_say
    sys.stderr.write(f"mpistrategy guide: {what}; {more}\n")
