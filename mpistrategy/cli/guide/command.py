"""`mpistrategy guide`: shows a page of the guide or the meaning of an error, lists the pages, and searches them."""

from __future__ import annotations

import argparse
import inspect
import re

from mpistrategy.cli.guide import pages
from mpistrategy.errors import OptionError
from mpistrategy.objects.shown import did_you_mean

_WHERE = "mpistrategy guide"
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_DETAILS = re.compile(r"</?details>|<summary>.*?</summary>")
_PICTURE = re.compile(r"!\[([^\]]*)\]\([^)\s]+\)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


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
    by_name = pages.pages()
    width = max(map(len, by_name))
    for part, names in pages.PARTS.items():
        print(part)
        for name in names:
            print(f"  {name:{width}}  {pages.title(by_name[name])}")
    print("\nmpistrategy guide PAGE shows one, mpistrategy guide CollectiveMismatchError what an error means,")
    print("and mpistrategy guide --search WORD where a word is.")


def _show(query: str) -> None:
    by_name, classes = pages.pages(), pages.classes()
    name = query.removesuffix(".md").rpartition(".")[2]  # mpistrategy.errors.ShapeError
    by_lower_case = {entry.lower(): entry for entry in (*by_name, *classes)}
    match = by_lower_case.get(name.lower())
    if match is None:
        fix = did_you_mean(name, by_lower_case.values())
        expected = "a page of mpistrategy guide --list, an error or a warning"
        raise OptionError.at(_WHERE, found=f"the page {query!r}", expected=expected, fix=fix)
    print(for_terminal(by_name[match] if match in by_name else _about(classes[match])))


def for_terminal(markdown: str) -> str:
    """Return the text without HTML, and with commands in place of links.  Blocks of code stay as they are."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for number in range(0, len(parts), 2):
        text = _PICTURE.sub(r"(Picture: \1)", _DETAILS.sub("", _COMMENT.sub("", parts[number])))
        parts[number] = re.sub(r"\n{3,}", "\n\n", _LINK.sub(_typed, text))
    return "".join(parts).strip()


def _typed(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    page, _, _ = target.partition("#")
    if re.fullmatch(r"[\w-]+\.md", page):
        return f"{text} (`mpistrategy guide {page[:-3]}`)"
    return text if target.startswith("#") else f"{text} ({target})"


def _about(kind: type[BaseException]) -> str:
    """Return the docstring of an error's class, as a page."""
    bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if base not in (Exception, BaseException, object))
    return f"# {kind.__name__}\n\nIs also: {bases}\n\n{inspect.getdoc(kind)}\n"


def _search(word: str) -> None:
    """Show the lines that have a word, in any letter case, each with its page."""
    lines = [f"{name}: {line.strip()}" for name, text in pages.pages().items() for line in text.splitlines()]
    hits = [line for line in lines if word.strip() and word.casefold() in line.casefold()]
    if not hits:
        raise OptionError.at(_WHERE, found=f"the word {word!r}", expected="a word of some page")
    print(*hits, sep="\n")
