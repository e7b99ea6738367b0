"""Job scripts with other values, as the command writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpistrategy.cli.slurm.scripts import FOLDER, checked, written

#: The scripts as they stand, by their paths in the folder.
FILES = {
    str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in (".sbatch", ".pbs", ".sh", ".py")
}
ON_PBS = ("single_node", "multi_node", "requeue", "chain", "array")


def script(template: str, statement: Mapping[str, Any] | None = None, file: str = "") -> str:
    """Return the text of a script for a statement."""
    site, given = checked(template, statement or {})
    return written(template, site, given, file)


def executable(path: Path, text: str) -> None:
    """Write a shell script that stands in for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
