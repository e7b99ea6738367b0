"""`mpistrategy slurm --learn NAME`: a profile of this cluster from what its commands say, for the user to review."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpistrategy.cli.slurm import values
from mpistrategy.cli.slurm.asking import Answers

_MOST_LINES = 12
_HALF_AN_HOUR = 1800
_MODULE = re.compile(r"(?i)(cray-python|python|anaconda|miniforge|conda|[\w-]*mpi[\w-]*|cuda|nccl)(/|$)")


@dataclass(frozen=True)
class Shape:
    """Nodes of one shape in a partition.

    Attributes:
        partition: its name.
        is_default: whether jobs go there that name none.
        limit: the time limit as `sinfo` says it.
        nodes: how many there are.
        cpus: of each, as Slurm counts them.
        threads: how many of them are one core.
        gpus: of each.
    """

    partition: str
    is_default: bool
    limit: str
    nodes: int
    cpus: int
    threads: int
    gpus: int


def shapes(text: str) -> list[Shape]:
    """Return what `asking.SHAPES` said; lines that are not as they should be are left out."""
    found = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 7 or parts[1] != "up":
            continue
        name, _, limit, nodes, cpus, layout, gres = parts
        numbers = [re.match(r"\d+", part) for part in (nodes, cpus, layout.rpartition(":")[2])]
        if re.fullmatch(r"[\w.@+-]+\*?", name) and all(numbers):
            many, each, threads = (int(number[0]) for number in numbers if number)
            gpus = sum(map(int, re.findall(r"(?:^|,)gpu(?::[\w.-]+)?:(\d+)", gres)))
            found.append(Shape(name.rstrip("*"), name.endswith("*"), limit, many, each, max(threads, 1), gpus))
    return found


def usual(found: list[Shape]) -> Shape:
    """Return the shape that most nodes of the default partition have; without a default one, of the first partition."""
    name = next((shape.partition for shape in found if shape.is_default), found[0].partition)
    return max((shape for shape in found if shape.partition == name), key=lambda shape: shape.nodes)


def settings(text: str) -> dict[str, str]:
    """Return what `scontrol show config` said."""
    return dict(re.findall(r"^(\w+) *= (.*?) *$", text, flags=re.MULTILINE))


def kinds(text: str) -> list[str]:
    """Return what `srun --mpi=list` said."""
    words = re.findall(r"\b(?:none|pmi|cray|openmpi|mpich)\w*", text)
    return list(dict.fromkeys(words))


def profile(name: str, answers: Answers, day: str) -> str:
    """Return the text of a profile, which `sites.load` takes.

    Args:
        name: of the cluster.
        answers: what its commands said; there is at least one partition.
        day: today.
    """
    found = shapes(answers.sinfo.text)
    mine, config = usual(found), settings(answers.config.text)
    gpu_option = "gpus-per-node" if config.get("SelectType", "").endswith("cons_tres") else "gres"
    slurm = f"Slurm {config['SLURM_VERSION']}" if "SLURM_VERSION" in config else "Slurm"
    summary = f"{name}: {mine.gpus} GPUs and {mine.cpus} CPUs a node; {slurm}"
    ranks = mine.gpus or 2
    lines = [
        f"# The cluster {name}, learned on {day} by `mpistrategy slurm --learn`. Review each line marked REVIEW, then:",
        f"#     mpistrategy slurm multi_node site=./{name}.toml",
        *(f"# No answer from {_comment(problem)}" for problem in answers.problems),
        f"summary = {json.dumps(summary)}",
        "# REVIEW: a node of the partition below. The partitions that are up:",
        *(f"#   {line}" for line in _table(found)),
        f"gpus = {mine.gpus}",
        f"cpus = {mine.cpus}",
        f"threads_per_core = {mine.threads}",
        f'gpu_option = "{gpu_option if mine.gpus else ""}"',
        *_account(config),
        "",
        "[defaults]",
        f'partition = "{mine.partition}"',
        f"gpus_per_node = {mine.gpus}" if mine.gpus else f"tasks_per_node = {ranks} # REVIEW: ranks on a node",
        f"cpus_per_task = {max(1, mine.cpus // ranks)}",
        f'time = "{_time(mine.limit)}"',
        *_mpi(answers, config),
        *_modules(answers.modules.text),
    ]
    return "\n".join(lines) + "\n"


def _table(found: list[Shape]) -> Iterator[str]:
    for shape in found[:_MOST_LINES]:
        name = shape.partition + "*" * shape.is_default
        yield f"{name:16} {shape.nodes} nodes of {shape.cpus} CPUs and {shape.gpus} GPUs, at most {shape.limit}"
    if len(found) > _MOST_LINES:
        yield f"and {len(found) - _MOST_LINES} more: sinfo"


def _account(config: dict[str, str]) -> Iterator[str]:
    if "associations" in config.get("AccountingStorageEnforce", ""):
        yield "# REVIEW: jobs are charged to an account; if yours must be named, take the # away:"
        yield '# requires = ["account"]'


def _time(limit: str) -> str:
    """Return half an hour, or the limit where that is less."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if not match:
        return values.in_words(_HALF_AN_HOUR)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return values.in_words(min(_HALF_AN_HOUR, ((days * 24 + hours) * 60 + minutes) * 60 + seconds) or _HALF_AN_HOUR)


def _mpi(answers: Answers, config: dict[str, str]) -> Iterator[str]:
    """Say which kind of PMI suits the MPI that mpi4py loads on this machine."""
    there, usual_kind = kinds(answers.kinds.text), config.get("MpiDefault", "?")
    known = f"srun has {', '.join(there) or '?'}; its default is {usual_kind}"
    library, file, own, network = (*answers.library.text.splitlines(), "", "", "", "")[:4]
    if not library:
        yield f"# REVIEW: the kind of PMI that your MPI needs, if srun's default is another. {_comment(known)}"
        yield '# mpi = "pmix"'
        return
    yield f"# Here mpi4py loads {_comment(library)}" + (f" ({_comment(file)})" if file else "")
    if network.strip():
        yield f"# This machine is connected by {_comment(network)}."
    if own:
        yield "# REVIEW: pip has installed it, and between nodes it talks by TCP. The cluster's is faster: see"
        yield "# mpistrategy guide which-mpi; then learn once more."
    wanted = _kind_for(library)
    if not there:
        yield f'# REVIEW: it speaks {wanted}\n# mpi = "{wanted}"'
    elif wanted not in there:
        yield f"# REVIEW: it needs {wanted}; {_comment(known)}. Take multi_node_mpirun, or another MPI."
    elif wanted != usual_kind:
        yield f'mpi = "{wanted}" # REVIEW: {_comment(known)}'
    else:
        yield f"# It speaks {wanted}, which is srun's default."


def _kind_for(library: str) -> str:
    if library.startswith("Open MPI"):
        return "pmix"
    return "cray_shasta" if library.upper().startswith("CRAY") else "pmi2"


def _modules(text: str) -> Iterator[str]:
    listed = [re.sub(r"\((default|D|L)\)$", "", line.strip()) for line in text.splitlines()]
    names = [name for name in listed if _MODULE.match(name) and re.fullmatch(r"[\w.+/-]+", name)]
    if names:
        yield "# REVIEW: the modules with Python and the cluster's own MPI, out of these and others (module avail):"
        yield f"# modules = {json.dumps(names[:_MOST_LINES])}"


def _comment(text: str) -> str:
    """Return a text that ends no line and is not too long."""
    return "".join(character for character in text if " " <= character <= "~")[:200]
