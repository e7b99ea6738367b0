"""Shows Markdown in a terminal: by rich where it is installed, else as it is written."""

from __future__ import annotations

import re
import sys

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_DETAILS = re.compile(r"</?details>|<summary>.*?</summary>")
_PICTURE = re.compile(r"!\[([^\]]*)\]\([^)\s]+\)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_WIDTH = 120


def show(markdown: str) -> None:
    """Print a page."""
    text = for_terminal(markdown)
    if not (sys.stdout.isatty() and _shown_by_rich(text)):
        print(text)


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


def _shown_by_rich(text: str) -> bool:
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:
        return False
    console = Console()
    console.print(Markdown(text), width=min(console.width, _WIDTH))
    return True
