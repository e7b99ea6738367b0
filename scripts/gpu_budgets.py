"""What each operation on arrays in GPU memory may ask CUDA for, by path; counted by scripts/gpu_counts.py.

Needs nothing but Python itself.
"""

from __future__ import annotations

from collections.abc import Sequence

PATHS = ("nccl", "mpi", "staged")
#: What is compared with a budget, and its heading.
COUNTED = {
    "launches": "launches",
    "copies": "copies",
    "records": "records",
    "stream_waits": "stream waits",
    "host_waits": "host waits",
    "payload": "payload to the host",
}
Budget = tuple[int, int, int, int, int, int]
#: For each operation and path: the most of each of `COUNTED`; the payload in multiples of the arrays' bytes.
BUDGETS: dict[str, dict[str, Budget]] = {
    "SUM of 4 KiB": {
        "nccl": (0, 1, 1, 0, 0, 0),
        "mpi": (0, 1, 1, 0, 1, 0),
        "staged": (0, 3, 4, 3, 1, 1),
    },
    "SUM of 4 KiB, in place": {
        "nccl": (0, 0, 1, 0, 0, 0),
        "mpi": (0, 0, 1, 0, 1, 0),
        "staged": (0, 2, 4, 3, 1, 1),
    },
    "SUM of 161 arrays": {
        "nccl": (1, 0, 1, 0, 0, 0),
        "mpi": (1, 0, 1, 0, 1, 0),
        "staged": (1, 2, 4, 3, 1, 1),
    },
    "MEAN of 161 arrays": {
        "nccl": (2, 0, 1, 0, 0, 0),
        "mpi": (2, 0, 1, 0, 1, 0),
        "staged": (2, 2, 4, 3, 1, 1),
    },
    "SGD with momentum, 161 variables": {
        "nccl": (3, 0, 1, 0, 0, 0),
        "mpi": (3, 0, 1, 0, 1, 0),
        "staged": (3, 2, 4, 3, 1, 1),
    },
    "Adam, 161 variables": {
        "nccl": (3, 0, 1, 0, 0, 0),
        "mpi": (3, 0, 1, 0, 1, 0),
        "staged": (3, 2, 4, 3, 1, 1),
    },
    "Adam, clipped and checked": {
        "nccl": (5, 2, 1, 0, 2, 0),
        "mpi": (5, 2, 1, 0, 3, 0),
        "staged": (5, 4, 4, 3, 3, 1),
    },
}


def over(path: str, found: dict[str, list[int]]) -> list[str]:
    """Return in words what is over its budget."""
    return [
        f"{name} on {path}: {number} {heading}, and the budget is {most}"
        for name, numbers in found.items()
        for heading, number, most in zip(COUNTED.values(), numbers, BUDGETS[name][path], strict=True)
        if number > most
    ]


def table(found: dict[str, dict[str, list[int]]] | None = None) -> str:
    """Return launches, copies and host waits by operation and path as Markdown: the budgets, or what was found.

    Args:
        found: by path and operation, as many numbers as `COUNTED`; each cell then has the budget, too.
    """
    lines = [f"| operation | {' | '.join(f'`{path}`' for path in PATHS)} |", f"|{'---|' * (1 + len(PATHS))}"]
    for name, budgets in BUDGETS.items():
        cells = []
        for path in PATHS:
            cell = _shown(budgets[path])
            if found is not None:
                counts = found.get(path, {}).get(name)
                cell = f"{_shown(counts) if counts else 'not counted'} (most: {cell})"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(str(numbers[number]) for number in (0, 1, 4))
