"""For mkdocs: pages that are no files of the guide, and the navigation, which has the parts of `mpistrategy guide`."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import mpistrategy
from mpistrategy.cli.guide import pages

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "mpistrategy/cli/guide/"
#: A link of README to what the site does not have.
_ELSEWHERE = re.compile(rf"\[([^][]*)\]\((?!https?:|#|{GUIDE})[^)]*\)")
#: They need torch and JAX: a page for each, of what is written in the source.
_OF_LIBRARIES = ("mpistrategy.torch", "mpistrategy.jax")
_CONSOLE = re.compile(r'<div class="language-(?:console|pycon) highlight">(.*?)</div>', re.DOTALL)
_COMMAND = re.compile(r"^(?:\$|>>>|\.\.\.) (.*)", re.MULTILINE)
#: The pages of the API reference, by module.
_API = {module: [f"{module}.{name}" for name in names] for module, names in pages.public().items()}


def on_config(config: MkDocsConfig) -> None:
    """Say the version in the header, and order the pages."""
    config.site_name = f"mpistrategy {mpistrategy.__version__}"
    known = pages.pages()
    nav: list[Any] = [{"Overview": "index.md"}]
    for part, names in pages.PARTS.items():
        listed: list[Any] = [{pages.title(known[name]): f"{name}.md"} for name in names if name in known]
        if part == "Reference":
            api = [
                {module: [{name.rpartition(".")[2]: f"api/{name}.md"} for name in names]}
                for module, names in _API.items()
            ]
            listed.append({"API reference": [*api, *({name: f"api/{name}.md"} for name in _OF_LIBRARIES)]})
        nav.append({part: listed})
    config.nav = nav


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are no files of the guide."""
    readme = _ELSEWHERE.sub(r"\1", (ROOT / "README.md").read_text(encoding="utf-8"))
    texts = {"index.md": readme.replace(f"]({GUIDE}", "](")}
    texts |= {f"{name}.md": text for name, text in pages.pages().items()}
    for documented in (*_API.values(), _OF_LIBRARIES):
        texts |= {f"api/{name}.md": f"::: {name}\n" for name in documented}
    for name, text in texts.items():
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make links of public names, and of commands that show a page; the search lists the guide before single names."""
    page.meta["search"] = {"boost": 1 if page.file.src_uri.startswith("api/") else 4}
    if page.file.src_uri == "names.md":
        first, *tables = markdown.split("\n## ")
        linked = (re.sub(r"(?m)^\| `(.*?)`", rf"| [`\1`][{each.partition(chr(10))[0]}.\1]", each) for each in tables)
        return "\n## ".join([first, *linked])
    return re.sub(r"\((`mpistrategy guide\s+([\w-]+)`)\)", r"([\1](\2.md))", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Have copy buttons copy commands, without prompts and output."""
    return _CONSOLE.sub(_with_commands, content)


def _with_commands(block: re.Match[str]) -> str:
    lines = html.unescape(re.sub("<.*?>", "", block[1]))
    return block[0].replace("<div", f'<div data-copy="{html.escape(chr(10).join(_COMMAND.findall(lines)))}"', 1)
