"""For mkdocstrings: public names between backticks in docstrings become links to their pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_HELD = Path(__file__).resolve().parents[2] / "tests" / "public_names.txt"
_CODE = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?!`)")


def _public() -> set[str]:
    """Return all public names, with their modules."""
    lines = _HELD.read_text(encoding="utf-8").splitlines()
    return {re.split(r"[(:= ]", line.removeprefix("class "))[0] for line in lines}


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
        obj.docstring.value = _CODE.sub(lambda match: _link(match, owner), obj.docstring.value)


def _link(match: re.Match[str], owner: str) -> str:
    name = match[1]
    kind = owner.rpartition(".")[2]
    module = owner.split(".")
    near = [kind, *module[1:-1]]
    places = [name, *(f"mpistrategy.{place}.{name}" for place in near), f"mpistrategy.{name}"]
    wanted = next((place for place in places if place in PUBLIC and place.startswith("mpistrategy.")), None)
    return match[0] if wanted is None else f"[`{name}`][{wanted}]"
