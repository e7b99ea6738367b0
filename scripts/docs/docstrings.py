"""For mkdocstrings: links to public names, examples shown as such, and public bases only."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import griffe

from mpistrategy.cli.guide import pages

PUBLIC = {f"{module}.{name}": value for module, names in pages.public().items() for name, value in names.items()}
CLASSES = {value: name for name, value in PUBLIC.items() if inspect.isclass(value)}
#: What a page has a place for: public names, methods and properties.
PLACES = {*PUBLIC, *(f"{name}.{member}" for kind, name in CLASSES.items() for member in dir(kind))}
_CODE = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?!`)")


class Docstrings(griffe.Extension):  # type: ignore[misc]  # griffe is where the site is built
    """Changes what was read from the source."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Find the nearest public classes that the class derives from; leave a private constructor out."""
        kind = next((kind for kind in CLASSES if kind.__name__ == cls.name), object)
        above = [base for base in kind.__mro__[1:-1] if base in CLASSES or base.__module__ == "builtins"]
        nearest = [base for base in above if not any(issubclass(other, base) for other in above if other is not base)]
        cls.extra["mpistrategy"]["bases"] = [CLASSES.get(base, base.__name__) for base in nearest]
        if cls.docstring is not None and "Args:" not in cls.docstring.value and "dataclass" not in cls.labels:
            cls.members.pop("__init__", None)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put links into a docstring, and a title above its examples."""
        if obj.name == "__init__":
            obj.docstring = None
        if obj.docstring is None or obj.parent is None:
            return
        owner = obj if obj.is_class else obj.parent
        near = ("", *(f"{place}." for place in (owner.name, *owner.path.split(".")[1:-1])))

        def linked(match: re.Match[str]) -> str:
            names = [name for place in near if (name := f"mpistrategy.{place}{match[1]}") in PLACES]
            link = '<autoref optional identifier="{}"><code>{}</code></autoref>'
            return link.format(names[0], match[1]) if names else match[0]

        paragraphs = obj.docstring.value.replace("\nCure:", "\n\nCure:").split("\n\n")
        for number, text in enumerate(paragraphs):
            if text.startswith(">>> "):
                paragraphs[number] = "Examples:\n" + textwrap.indent(text, "    ")
            else:
                paragraphs[number] = _CODE.sub(linked, text)
        obj.docstring.value = "\n\n".join(paragraphs)
