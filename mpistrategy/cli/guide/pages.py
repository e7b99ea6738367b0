"""The pages of the guide, which are files of the package: parts and titles."""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import dataclass

from mpistrategy.cli.guide import reference

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


@functools.cache
def pages() -> dict[str, Page]:
    """Return all pages by name, in the order of the list."""
    files = [file for file in importlib.resources.files(__package__).iterdir() if file.name.endswith(".md")]
    texts = {file.name.removesuffix(".md"): file.read_text(encoding="utf-8") for file in files} | reference.written()
    return {name: Page(name, texts[name]) for names in PARTS.values() for name in names}
