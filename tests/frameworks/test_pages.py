"""The programs of the guide's pages for torch and JAX print what the pages show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import launching
import pages
import pytest
from replicas import SIZE

pytestmark = pytest.mark.skipif(SIZE > 1, reason="starts jobs of its own: runs in the session on 1 rank")


PROGRAMS = [block for block in pages.BLOCKS if block.page in ("torch", "jax") and block.file]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda block: f"{block.page}-{block.file}")
def test_a_program_prints_what_is_shown(
    launch: Callable[..., launching.Finished], tmp_path: Path, program: pages.Block
) -> None:
    pytest.importorskip(program.page)
    after = pages.BLOCKS[pages.BLOCKS.index(program) + 1 :]
    shown = next(block for block in after if block.kind == "text")
    (tmp_path / program.file).write_text(program.source, encoding="utf-8")
    job = launch(2, tmp_path / program.file, timeout=100).check()
    assert job.stdout.strip() == shown.source.strip()
