"""The site of the documentation: what scripts/docs refuses, without building it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages_of_the_site", SCRIPTS / "docs.d" / "gather.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_and_argument_has_words(pages: Any) -> None:
    assert list(pages.without_words()) == []


def test_a_name_an_argument_and_an_attribute_without_words_are_told(
    pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce_scatter(self: Any, reduce_op: Any, value: Any) -> None:
        """Reduce `value`."""

    def broadcast(self: Any) -> None: ...

    monkeypatch.setattr(ms.ReplicaContext, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(ms.Strategy, "broadcast", broadcast)
    monkeypatch.setattr(ms.Streams, "added", 1, raising=False)
    assert list(pages.without_words()) == [
        "mpistrategy.ReplicaContext.reduce_scatter: nothing about the argument reduce_op",
        "mpistrategy.Strategy.broadcast: no docstring",
        "mpistrategy.Streams: nothing about the attribute added",
    ]


def test_there_is_a_page_for_each_public_name_and_links_stay_in_the_site(pages: Any, tmp_path: Path) -> None:
    site = pages.Site(tmp_path)
    site.build()
    assert site.problems == []
    made = {path.name for path in (tmp_path / "pages" / "api").iterdir()}
    assert {"mpistrategy.ReplicaContext.md", "schedules.CosineDecay.md", "errors.ContextError.md"} <= made
    modules = {"errors", "gradients", "losses", "metrics", "optimizers", "schedules", "telemetry", "testing"}
    assert len(made) == 1 + sum(len(getattr(ms, name).__all__) for name in modules) + len({*ms.__all__} - modules)
    settings = json.loads((tmp_path / "mkdocs.yml").read_text())
    assert [next(iter(part)) for part in settings["nav"]] == ["mpistrategy", "Guide", "Notebooks", "Names"]


def test_a_link_to_no_file_and_one_to_a_name_are_told_and_one_to_the_source_is_text(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = tmp_path / "mpistrategy" / "cli" / "guide"
    guide.mkdir(parents=True)
    (guide / "one.md").write_text("# One\n[two](two.md#a) [gone](gone.md) [home](../../../README.md)\n")
    (guide / "three.md").write_text("# Three\nas [1] shows, and [1] [2]; `[3] [4]`\n```text\n[5] [6]\n```\n")
    (guide / "two.md").write_text("# Two\n[code](../../x.py) [there](https://example.org)\n```text\n[a](b)\n```\n")
    (tmp_path / "README.md").write_text("# Home\n[one](mpistrategy/cli/guide/one.md)\n")
    (tmp_path / "mpistrategy" / "x.py").touch()
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "GUIDE", guide)
    site = pages.Site(tmp_path / "built")
    site.build()
    assert site.problems == [
        "mpistrategy/cli/guide/one.md: no file gone.md",
        "mpistrategy/cli/guide/three.md: [1] [2] is a link to a name",
    ]
    built = tmp_path / "built" / "pages"
    assert (built / "index.md").read_text().splitlines()[1] == "[one](guide/one.md)"
    assert (built / "guide" / "one.md").read_text().splitlines()[1] == "[two](two.md#a) gone [home](../index.md)"
    assert (built / "guide" / "two.md").read_text().splitlines()[1:4] == [
        "code [there](https://example.org)",
        "```text",
        "[a](b)",
    ]


@pytest.mark.parametrize("notebook", sorted((SCRIPTS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/docs runs them in a kernel, and keeps the outputs; the file has none."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    for cell in code:
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), str(notebook), "exec"), names)
