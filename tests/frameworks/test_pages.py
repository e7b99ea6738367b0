"""The programs for torch and JAX, of the README and of the guide's pages, print what is shown."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import launching
import pages
import pytest
from replicas import SIZE

pytestmark = pytest.mark.skipif(SIZE > 1, reason="starts jobs of its own: runs in the session on 1 rank")

#: Each program with the text behind it, in one job: ranks take longest to import torch and JAX.  README's comes last,
#: since it does not destroy its process group.
PROGRAMS = sorted(
    (
        (block, following.source)
        for block, following in itertools.pairwise(each for each in pages.BLOCKS if each.file or each.kind == "text")
        if block.file and (block.page in ("torch", "jax") or (block.page, block.file) == ("README", "ddp.py"))
    ),
    key=lambda program: program[0].page == "README",
)
ONE_AFTER_THE_OTHER = """
import runpy, sys

for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
"""


@pytest.mark.timeout(330)
def test_programs_print_what_is_shown(launch: Callable[..., launching.Finished], tmp_path: Path) -> None:
    needed = {name for block, _ in PROGRAMS for name in re.findall(r"(?m)^(?:import|from) (\w+)", block.source)}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    files = [tmp_path / f"{block.page}_{block.file}" for block, _ in PROGRAMS]
    for file, (block, _) in zip(files, PROGRAMS, strict=True):
        file.write_text(block.source, encoding="utf-8")
    job = launch(2, [launching.program(ONE_AFTER_THE_OTHER, tmp_path), *files], timeout=100).check()
    assert job.stdout == "".join(text for _, text in PROGRAMS), job
