"""The README and the pages of the guide as the tests see them: their blocks of code, and what marks say of them.

A comment on the line before a block says what a test cannot do with it:
``<!-- not run: needs Slurm -->`` it is only shown; ``<!-- numbers vary -->`` any number stands for those shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "mpistrategy" / "cli" / "guide"
FILES = {"README": ROOT / "README.md", **{path.stem: path for path in sorted(GUIDE.glob("*.md"))}}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}

_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PROGRAM = re.compile(r"# (\S+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: its page; "README" for that.
        kind: the language that it is of.
        source: what is in it.
        mark: the comment before it; "" for none.
    """

    page: str
    kind: str
    source: str
    mark: str

    @property
    def file(self) -> str:
        """The file that a program names in its first line; "" for an example."""
        found = _PROGRAM.match(self.source)
        return found[1] if found else ""

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run: ")


def blocks() -> Iterator[Block]:
    for page, text in TEXTS.items():
        for mark, kind, source in _BLOCK.findall(text):
            yield Block(page, kind, source, mark)


def pattern(line: str, numbers_vary: bool) -> re.Pattern[str]:
    """Return what finds a line that a page shows; `...` in it stands for anything."""
    text = ".*".join(map(re.escape, line.split("...")))
    return re.compile(re.sub(r"\d+(?:\\\.\d+)?", r"[\\d.]+", text) if numbers_vary else text)
