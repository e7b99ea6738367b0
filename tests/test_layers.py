"""The house stands: imports point one way only, and what needs no MPI starts none."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launching
import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

PACKAGE = Path(ms.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up; a module may import from its own floor and from those below it.
FLOORS = [
    {
        "options",
        "errors",
        "pickling",
        "nest",
        "arrays",
        "extremes",
        "foreign_arrays",
        "device_arrays",
        "values",
        "devices",
    },
    {"mpi"},
    {"cross_device_ops"},
    {
        "arena",
        "arena_layout",
        "arena_reductions",
        "device_arena",
        "explain",
        "explain_devices",
        "explain_ways",
        "first_batches",
        "intact",
        "mirrored_check",
        "context",
        "creation_order",
        "async_reduce",
        "replica_context",
        "placement",
        "streams",
        "variables",
        "variable_storage",
        "variable_policies",
        "variable_writes",
        "extended",
        "inputs",
        "quick_all_reduce",
        "quick_arena",
        "quick_cells",
        "quick_nests",
        "quick_places",
        "strategy",
        "mirrored_strategy",
        "one_device_strategy",
        "outside_steps",
        "input",
        "input_context",
        "input_iterators",
        "datasets",
        "strategy_input",
        "strategy_old_names",
    },
    {
        "optimizers",
        "optimizer_base",
        "optimizer_checks",
        "optimizer_gradients",
        "optimizer_kernels",
        "optimizer_slots",
        "sliced_update",
        "sliced_variables",
        "gradient_buckets",
        "gradients",
        "nonfinite",
        "metrics",
        "telemetry",
        "testing",
        "checkpoint",
        "checkpoint_accumulators",
        "checkpoint_arrays",
        "checkpoint_files",
        "checkpoint_fitting",
        "checkpoint_holders",
        "checkpoint_identities",
        "checkpoint_lock",
        "checkpoint_manager",
        "checkpoint_manifest",
        "checkpoint_maps",
        "checkpoint_optimizers",
        "checkpoint_random",
        "checkpoint_reading",
        "checkpoint_restoring",
        "checkpoint_saving",
        "checkpoint_shards",
        "checkpoint_state",
        "checkpoint_values",
        "preemption",
    },
    {
        "bench",
        "cli",
        "doctor",
        "run",
        "slurm",
        "__main__",
        "plugins",
    },  # programs: they use the library as its users do, front page included
]
# The benchmark's reference is mpi4py itself, and must not go through what it is compared with; the doctor looks at
# ranks on which the library refuses to start.
MAY_IMPORT_MPI = (
    "mpistrategy.mpi.communicator",
    "mpistrategy.mpi.control_channel",
    "mpistrategy.mpi.node_peers",
    "mpistrategy.mpi.operations",
    "mpistrategy.mpi.verbs",
    "mpistrategy.mpi.world",
    "mpistrategy.bench.raw",
    "mpistrategy.doctor.ranks",
)
SERVICES = FLOORS[4] | {"input", "input_context", "input_iterators", "datasets", "strategy_input", "strategy_old_names"}
# Within a floor, modules that must not even import each other in a circle: the vocabulary has an order of its own.
LOWER_CASE_COMMUNICATION = {
    "send", "recv", "isend", "irecv", "bsend", "ssend", "sendrecv", "bcast", "gather", "allgather", "scatter",
    "alltoall", "reduce", "allreduce", "scan", "exscan",
}  # fmt: skip


def floor_of(module: str) -> int | None:
    """Return the floor of ``mpistrategy.a.b``; None for the package's own front page."""
    room = module.split(".")[1] if "." in module else ""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("mpistrategy", *(part for part in parts if part != "__init__")))


def imports_of(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (module, name, line) for everything that a file imports at run time; `name` is "" for whole modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                yield node.module or "", alias.name, node.lineno


def ours(module: str, name: str) -> str:
    """Return the module of ours that an import names: ``from mpistrategy import nest`` imports mpistrategy.nest."""
    return f"{module}.{name}" if module == "mpistrategy" and (PACKAGE / f"{name}.py").exists() else module


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    own = floor_of(name_of(path))
    for module, name, line in imports_of(path):
        if module.partition(".")[0] != "mpistrategy" or own is None:
            continue
        other = floor_of(ours(module, name))
        if other is None and own == len(FLOORS) - 1:
            continue
        assert other is not None, f"{path}:{line}: imports the package's front page"
        assert other <= own, f"{path}:{line}: floor {own} imports {module} of floor {other}"


def test_every_module_is_on_a_floor() -> None:
    rooms = {name_of(path).split(".")[1] for path in FILES if "." in name_of(path)}
    assert rooms == set().union(*FLOORS) & rooms, "a new module: give it a floor here and in ARCHITECTURE.md"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_communicator_imports_mpi(path: Path) -> None:
    for module, name, line in imports_of(path):
        if module.partition(".")[0] == "mpi4py":
            assert name_of(path) in MAY_IMPORT_MPI, f"{path}:{line}: imports {module}.{name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    for module, name, line in imports_of(path):
        assert {module.partition(".")[0], name}.isdisjoint({"pickle", "dill", "cloudpickle", "marshal", "shelve"}), (
            f"{path}:{line}: imports {module} {name}"
        )


@pytest.mark.parametrize("name", [name for name in MAY_IMPORT_MPI if name.startswith("mpistrategy.mpi.")])
def test_only_buffers_go_to_mpi(name: str) -> None:
    """mpi4py pickles in its lower-case methods; nothing here calls one on an mpi4py object."""
    path = PACKAGE / "mpi" / f"{name.rpartition('.')[2]}.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = ast.unparse(node.func.value)
            on_mpi = target.endswith(("comm", "inside", "across")) or target.startswith("MPI")
            assert not (on_mpi and node.func.attr in LOWER_CASE_COMMUNICATION), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).split(".")[-1] in SERVICES], ids=name_of)
def test_services_use_public_names_only(path: Path) -> None:
    for module, name, line in imports_of(path):
        assert not name.startswith("_"), f"{path}:{line}: imports {module}.{name}"
        assert not any(part.startswith("_") and part != "__future__" for part in module.split(".")), f"{path}:{line}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert isinstance(node.value, ast.Name), f"{path}:{node.lineno}: {ast.unparse(node)}"
            assert node.value.id in ("self", "cls"), f"{path}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_one_idea(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_public_names_exist_and_are_sorted() -> None:
    assert list(ms.__all__) == sorted(set(ms.__all__))
    for name in ms.__all__:
        assert getattr(ms, name) is not None


@pytest.mark.parametrize("name", [name for name in ms.__all__ if name not in ("errors", "metrics", "optimizers")])
def test_public_names_are_documented(name: str) -> None:
    assert (getattr(ms, name).__doc__ or "").strip()


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


@pytest.mark.parametrize("what", PROGRAMS)
def test_no_mpi_and_no_cupy_is_started_by(what: str) -> None:
    head = "import sys\nimport numpy as np\nimport mpistrategy as ms\n"
    names = ("mpi4py.MPI", "mpi4py", "cupy", "ml_dtypes", "mpistrategy.telemetry")
    tail = f"\nfor name in {names}:\n    assert name not in sys.modules, name\n"
    body = "\n".join(line.removeprefix(" " * 8) for line in PROGRAMS[what].splitlines())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launching.LAUNCHER_PREFIXES)}
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + body + tail],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
