"""Writes the text of a job script: a pure function of the statement."""

from __future__ import annotations

import re
from pathlib import Path

from mpistrategy.cli.slurm import blocks
from mpistrategy.cli.slurm.batch import BATCHES
from mpistrategy.cli.slurm.keys import ON_PBS, TEMPLATES
from mpistrategy.cli.slurm.sites import names
from mpistrategy.cli.slurm.spec import JobSpec

FOLDER = Path(__file__).parent / "templates"
#: Files beside the scripts; the same for all statements.
COMPANIONS = ("example.py", "select_gpu.sh")
#: Text that two templates share.
_SIGNALLED_RUN = "{{signalled_run}}"
#: The profile for clusters with PBS of which nothing else is known.
_ANY_PBS = "pbs"
_MARK = re.compile(r"\{\{(\w+)\}\}")


def render(spec: JobSpec, file: str = "") -> str:
    """Return the text of the script for a statement; it speaks of itself as `file`, or by its name in slurm/.

    It comes from the template's file, in which a line ``{{name}}`` stands for lines that depend on the statement, and
    ``{{name}}`` inside of a line for one of its values.
    """
    values = blocks.values_of(spec) | {"file": file or file_name(spec)}
    batch = BATCHES[spec.site.batch].lines
    written: list[str] = []
    template = text_of(f"{spec.template}.sh").replace(_SIGNALLED_RUN, text_of("signalled_run.sh").rstrip())
    for line in template.splitlines():
        mark = _MARK.fullmatch(line)
        if mark and mark[1] in batch:
            written += batch[mark[1]]
        elif mark and mark[1] in blocks.BLOCKS:
            written += blocks.BLOCKS[mark[1]](spec)
        else:
            written.append(_MARK.sub(lambda found: values[found[1]], line))
    return "\n".join(written) + "\n"


def text_of(name: str) -> str:
    """Return the text of a file that comes with the package."""
    return (FOLDER / name).read_text(encoding="utf-8")


def file_name(spec: JobSpec) -> str:
    """Return the name of the script in the folder slurm/."""
    site = spec.site.name
    return f"{spec.template if site in ('', _ANY_PBS) else site}.{BATCHES[spec.site.batch].suffix}"


def all_files() -> dict[str, str]:
    """Return the texts of the files of the folder slurm/, by their paths in it."""
    files = {}
    for template in TEMPLATES:
        spec = JobSpec.of(template)
        files[file_name(spec)] = render(spec)
    for template in ON_PBS:
        spec = JobSpec.of(template, {"site": _ANY_PBS})
        files[f"pbs/{file_name(spec)}"] = render(spec)
    for site in names():
        if site != _ANY_PBS:
            spec = JobSpec.of("multi_node", {"site": site})
            files[f"sites/{file_name(spec)}"] = render(spec)
    return files | {name: text_of(name) for name in COMPANIONS}
