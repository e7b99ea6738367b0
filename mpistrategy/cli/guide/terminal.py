"""Markdown as a terminal shows it."""

from __future__ import annotations

import re

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_DETAILS = re.compile(r"</?details>|<summary>.*?</summary>")
_PICTURE = re.compile(r"!\[([^\]]*)\]\([^)\s]+\)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


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
