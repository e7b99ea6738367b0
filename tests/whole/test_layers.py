"""The house stands: imports point one way only, and what needs no MPI starts none."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import launching
import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

PACKAGE = Path(ms.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in FILES}

#: A file imports only from its own floor and from those before it, imports for types included.
FLOORS = {
    name: floor
    for floor, names in enumerate(
        (
            "errors options objects own_files arrays",
            "mpi",
            "context reduction",
            "cross_device_ops",
            "variables input",
            "strategy",
            "training gradients losses metrics optimizers schedules telemetry",
            "checkpoint torch jax",
            "testing",
            "cli __main__ plugins",
        )
    )
    for name in names.split()
}
#: The same within the two largest folders.
ORDER = {
    "mpi": "contract tuning shared_memory watchdog job interface multi_node,gpu faults over_mpi,over_threads",
    "reduction": "transfer gpu inputs plan reducer collectives arena",
}
# The benchmark's reference is mpi4py itself, and must not go through what it is compared with; the doctor looks at
# ranks on which the library refuses to start.
MAY_IMPORT_MPI = (
    "mpistrategy.mpi.over_mpi.ranks",
    "mpistrategy.mpi.contract.mpi_channel",
    "mpistrategy.mpi.over_mpi.messages",
    "mpistrategy.mpi.job.world",
    "mpistrategy.mpi.job.launcher",
    "mpistrategy.mpi.gpu.cuda_aware",
    "mpistrategy.cli.ranks",
)
LOWER_CASE_COMMUNICATION = {
    "send", "recv", "isend", "irecv", "bsend", "ssend", "sendrecv", "bcast", "gather", "allgather", "scatter",
    "alltoall", "reduce", "allreduce", "scan", "exscan",
}  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("mpistrategy", *(part for part in parts if part != "__init__")))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path, *, types: bool = False) -> Iterator[tuple[str, str, int]]:
    """Yield (module, name, line) of the imports of a file; `types`: those for type checkers, too."""
    tree = tree_of(path)
    for_types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types_only and not types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                yield node.module or "", alias.name, node.lineno


def modules_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the modules of this package that a file imports, for types or at run time, each with its line."""
    for module, name, line in imports_of(path, types=True):
        if module.partition(".")[0] == "mpistrategy":
            yield f"{module}.{name}" if f"{module}.{name}" in MODULES else module, line


def rank_in(folder: str, name: str) -> int:
    """Return the place of a room in the order of its folder; what is not named there comes last."""
    rows = ORDER[folder].split()
    return next((number for number, row in enumerate(rows) if name in row.split(",")), len(rows))


def is_above(module: str, path: Path) -> bool:
    """Return whether a module stands above a file that imports it; the package's front page does, but for programs."""
    own, other = name_of(path).split("."), module.split(".")
    if len(own) == 1:
        return False
    if len(other) == 1:
        return own[1] not in ("cli", "plugins")
    if own[1] == other[1] and own[1] in ORDER and len(own) > 2 and len(other) > 2:
        return rank_in(own[1], other[2]) > rank_in(own[1], own[2])
    return FLOORS[other[1]] > FLOORS[own[1]]


def test_imports_point_downwards() -> None:
    imported = [(path, module, line) for path in FILES for module, line in modules_of(path)]
    assert [f"{path}:{line}: {module}" for path, module, line in imported if is_above(module, path)] == []


def test_no_imports_go_in_a_circle() -> None:
    graph = {name_of(path): {module for module, _ in modules_of(path)} for path in FILES}
    order: TopologicalSorter[str] = TopologicalSorter(
        {name: {m for m in modules if m in graph and not name.startswith(f"{m}.")} for name, modules in graph.items()}
    )
    order.prepare()  # raises CycleError, which names the circle


def test_only_the_communicator_imports_mpi_and_nothing_is_pickled() -> None:
    pickling = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for path in FILES:
        for module, name, line in imports_of(path):
            package = module.partition(".")[0]
            assert package != "mpi4py" or name_of(path) in MAY_IMPORT_MPI, f"{path}:{line}: imports {module}.{name}"
            assert {package, name}.isdisjoint(pickling), f"{path}:{line}: imports {module} {name}"


@pytest.mark.parametrize("name", [name for name in MAY_IMPORT_MPI if name.startswith("mpistrategy.mpi.")])
def test_only_buffers_go_to_mpi(name: str) -> None:
    """mpi4py pickles in its lower-case methods; nothing here calls one on an mpi4py object."""
    path = PACKAGE.parent / f"{name.replace('.', '/')}.py"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = ast.unparse(node.func.value)
            on_mpi = target.endswith(("comm", "inside", "across")) or target.startswith("MPI")
            assert not (on_mpi and node.func.attr in LOWER_CASE_COMMUNICATION), f"{path}:{node.lineno}"


PROGRAMS = {
    "import mpistrategy": "",
    "the default strategy": """
        strategy = ms.get_strategy()
        v = ms.Variable([1.0, 2.0], aggregation="SUM")
        assert strategy.num_replicas_in_sync == 1
        assert ms.get_replica_context().all_reduce("SUM", v).tolist() == [1, 2]
    """,
    "OneDeviceStrategy": """
        strategy = ms.OneDeviceStrategy("CPU:0")
        with strategy.scope():
            v = ms.Variable([1.0, 2.0], aggregation="SUM")
            adam, loss = ms.optimizers.Adam(), ms.metrics.Mean()
        def step(x):
            adam.apply_gradients([(x, v)])
            loss.update_state(x)
            return ms.get_replica_context().all_gather(x, 0)
        for part in strategy.experimental_distribute_dataset([np.ones(2), np.ones(2)]):
            got = strategy.run(step, args=(part,))
        assert strategy.reduce("MEAN", got, axis=0) == 1
        assert strategy.gather(got, 0).shape == (2,)
        assert strategy.extended.reduce_to("SUM", got, "CPU:0").shape == (2,)
        assert strategy.extended.broadcast_to(got, v).shape == (2,)
        assert loss.result() == 1
        for ops in (ms.ReductionToOneDevice(), ms.HierarchicalCopyAllReduce(), ms.MpiAllReduce()):
            with strategy.scope():
                assert float(ops.reduce("SUM", 3.0, "CPU:0")) == 3
    """,
}


@pytest.mark.parametrize(("what", "switch"), [*((what, "") for what in PROGRAMS), ("OneDeviceStrategy", "Off")])
def test_no_mpi_and_no_cupy_is_started_by(what: str, switch: str) -> None:
    head = "import sys\nimport numpy as np\nimport mpistrategy as ms\n"
    names = ("mpi4py.MPI", "mpi4py", "cupy", "ml_dtypes", "mpistrategy.telemetry")
    tail = f"\nfor name in {names}:\n    assert name not in sys.modules, name\n"
    body = "\n".join(line.removeprefix(" " * 8) for line in PROGRAMS[what].splitlines())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launching.LAUNCHER_PREFIXES)}
    environment |= {"PYTHONPATH": str(PACKAGE.parent), "MPISTRATEGY_NVTX": switch}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + body + tail],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
