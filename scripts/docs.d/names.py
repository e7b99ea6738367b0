"""For mkdocstrings: public names in docstrings become links to their pages, and examples are shown as such."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

_HELD = Path(__file__).resolve().parents[2] / "tests" / "public_names.txt"
_EXAMPLES = "Examples:\n"
_CODE = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?!`)")


def _public() -> dict[str, str]:
    """Return for each public name what has a place in a page: itself, or for an attribute of a class that class."""
    found: dict[str, str] = {}
    for line in _HELD.read_text(encoding="utf-8").splitlines():
        name = re.split(r"[(:= ]", line.removeprefix("class "))[0]
        if not line.endswith(": a module"):
            has_place = "(" in line.partition(":")[0] or line.endswith("(property)") or line.startswith("class ")
            found.setdefault(name, name if has_place else name.rpartition(".")[0])
    return found


PUBLIC = _public()


class Names(griffe.Extension):
    """Puts the links in."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give the class that only type checkers see the words of the one that it stands for."""
        pkg["strategy.current.ReplicaContext"].docstring = pkg["strategy.replica_context.ReplicaContext"].docstring

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is None:
            return
        owner = obj.path if obj.is_class else obj.parent.path if obj.parent is not None else ""
        paragraphs = obj.docstring.value.split("\n\n")
        obj.docstring.value = "\n\n".join(
            _EXAMPLES + textwrap.indent(paragraph, "    ")
            if paragraph.startswith(">>> ")
            else _CODE.sub(lambda match: _link(match, owner), paragraph)
            for paragraph in paragraphs
        )


def _link(match: re.Match[str], owner: str) -> str:
    name = match[1]
    kind = owner.rpartition(".")[2]
    module = owner.split(".")
    near = [kind, *module[1:-1]]
    places = [name, *(f"mpistrategy.{place}.{name}" for place in near), f"mpistrategy.{name}"]
    wanted = next((PUBLIC[place] for place in places if place in PUBLIC and place.startswith("mpistrategy.")), None)
    return match[0] if wanted is None or PUBLIC.get(wanted) != wanted else f"[`{name}`][{wanted}]"
