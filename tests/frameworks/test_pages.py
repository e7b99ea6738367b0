"""The programs for torch and JAX, of the README and of the guide's pages, print what is shown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import launching
import pages
import pytest
from replicas import SIZE

pytestmark = pytest.mark.skipif(SIZE > 1, reason="starts jobs of its own: runs in the session on 1 rank")


PROGRAMS = [
    pytest.param(block, following, id=f"{block.page}-{block.file}")
    for block, following in itertools.pairwise(each for each in pages.BLOCKS if each.file or each.kind == "text")
    if block.file and (block.page in ("torch", "jax") or (block.page, block.file) == ("README", "ddp.py"))
]


@pytest.mark.timeout(220)  # two jobs, which import much
@pytest.mark.parametrize(("program", "shown"), PROGRAMS)
def test_a_program_prints_what_is_shown_each_time(
    launch: Callable[..., launching.Finished], tmp_path: Path, program: pages.Block, shown: pages.Block
) -> None:
    for library in re.findall(r"(?m)^(?:import|from) (\w+)", program.source):
        pytest.importorskip(library)
    (tmp_path / program.file).write_text(program.source, encoding="utf-8")
    for _ in range(2):
        job = launch(2, tmp_path / program.file, timeout=100).check()
        assert job.stdout.strip() == shown.source.strip()
