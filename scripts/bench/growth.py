"""Prints, as tables, how the work of a rank grows with the number of ranks.

    .venv/bin/python scripts/bench growth [TABLE...] [--real 16 64] [--pretended 1024 10000]

Tables: creation, watchdog, mismatch, imports; without any, all. Real ranks are started with the mpiexec beside that
Python (MPICH, 8 ranks a pretended node). Pretended ranks run the library's own code without MPI. Nodes have 8 ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "doubles")]
LOCAL = 8

REAL_CREATION = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
MPI.COMM_WORLD.Barrier()
cpu = time.process_time()
strategy = ms.MirroredStrategy(sys.argv[1] or None)
took = np.array([time.process_time() - cpu])
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, took, MPI.MAX)
if MPI.COMM_WORLD.rank == 0:
    print(took[0], flush=True)
strategy.close()
"""
#: The last rank is late. What all ranks do in the run directory is counted, by an audit hook and around listdir.
REAL_ALARM = """
import os, sys, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
from mpistrategy.mpi.watchdog.run_directory import RunDirectory
counts = {"read": 0, "names": 0, "write": 0, "claim": 0}
def counted(name, function):
    def call(*arguments):
        counts[name] += 1
        return function(*arguments)
    return call
for name in counts:
    setattr(RunDirectory, name, counted(name, getattr(RunDirectory, name)))
def tell():
    with open(f"{sys.argv[2]}/{MPI.COMM_WORLD.rank}", "w") as file:
        file.write(repr(counts))
end = os._exit
os._exit = lambda status: (tell(), end(status))
strategy = ms.MirroredStrategy()
step = lambda: strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3)))
step()
strategy.extended.communicator.guard.timeout = float(sys.argv[3])
strategy.barrier()
if strategy.rank == strategy.num_replicas_in_sync - 1:
    if sys.argv[1] == "busy":
        with strategy.expect_long(9):
            time.sleep(9)
    else:
        time.sleep(1000)
step()
tell()
"""


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(f'{each:.3g}' if isinstance(each, float) else str(each) for each in row)} |", flush=True)


def launched(ranks: int, program: str, *arguments: object, folder: str) -> subprocess.CompletedProcess[str]:
    """Run a program on real ranks, eight to a pretended node."""
    path = Path(folder, "program.py")
    path.write_text(program)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    environment = {
        **os.environ,
        "MPIR_CVAR_NUM_CLIQUES": str(-(-ranks // LOCAL)),
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "MPISTRATEGY_RUN_DIR": folder,
    }
    command = [str(mpiexec), "-n", str(ranks), sys.executable, str(path), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL
    )


# ------------------------------------------------------------------------------------- tables


def creation(real: Sequence[int], pretended: Sequence[int]) -> None:
    """CPU time of making a strategy: real ranks include MPI; of pretended ones it is Python's."""
    from pretended import creation_seconds

    rows: list[list[object]] = []
    for ranks in real:
        with tempfile.TemporaryDirectory() as folder:
            took = [float(launched(ranks, REAL_CREATION, devices, folder=folder).stdout) for devices in ("", "auto")]
        rows.append([f"{ranks} real", *took])
    creation_seconds(16, LOCAL)  # loads modules
    for ranks in (*real, *pretended):
        took = [min(creation_seconds(ranks, LOCAL, devices) for _ in range(3)) for devices in (None, "auto")]
        rows.append([f"{ranks} pretended", *took])
    table("Making a strategy, CPU seconds a rank", ["ranks", "CPUs", 'devices="auto", no GPUs'], rows)


def watchdog(real: Sequence[int], pretended: Sequence[int]) -> None:
    """What all ranks together do with files while one is busy for 9 s with a limit of 1 s, and after an alarm."""
    rows: list[list[object]] = []
    for ranks in real:
        row: list[object] = [f"{ranks} real", -(-ranks // LOCAL)]
        for what in ("busy", "late"):
            with tempfile.TemporaryDirectory() as folder:
                counted = Path(folder, "counts")
                counted.mkdir()
                job = launched(ranks, REAL_ALARM, what, counted, 1 if what == "busy" else 3, folder=folder)
                counts = [eval(path.read_text()) for path in counted.iterdir()]
                if what == "busy":
                    assert job.returncode == 0, job.stderr
                    row += [sum(sum(each.values()) for each in counts) / 9]
                else:
                    files = [*Path(folder).glob("mpistrategy-run-*/*")]
                    operations = sum(sum(each.values()) for each in counts)
                    row += [len(files), operations, job.stderr.count("roll call:")]
        rows.append(row)
    numbers = [*real, *pretended]
    rows += [[f"{ranks} pretended", ranks // LOCAL, *_pretended_watchdog(ranks // LOCAL)] for ranks in numbers]
    head = ["ranks", "nodes", "file operations a second, one busy", "files after an alarm", "operations", "roll calls"]
    table("Watchdog, whole job (real: a limit of 1 s; pretended: of 600 s)", head, rows)


def _pretended_watchdog(nodes: int) -> Iterator[object]:
    from pretended import PretendedJob

    with tempfile.TemporaryDirectory() as folder:
        job, seconds = PretendedJob(Path(folder, "run"), nodes, LOCAL), 60
        with job.clock():
            job.busy_until = job.now + 10 * seconds
            job.hear()
            job.done.clear()
            for _ in range(seconds):
                assert all(job.tick(1.0))
            yield sum(job.done.values()) / seconds
            job.done.clear()
            with _quiet() as told:
                job.raise_alarm(0)
            yield from (len(os.listdir(job.path)), sum(job.done.values()), Path(told).read_text().count("roll call:"))
            os.unlink(told)


class _quiet:  # noqa: N801
    """Send what this process writes to stderr to a file, whose path it returns."""

    def __enter__(self) -> str:
        file, path = tempfile.mkstemp()
        self._kept = os.dup(2)
        os.dup2(file, 2)
        os.close(file)
        return path

    def __exit__(self, *error: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)


def mismatch(real: Sequence[int], pretended: Sequence[int]) -> None:
    """What one rank prints when one call, or every call, differs."""
    from mpistrategy.mpi.contract.mismatch_report import Report
    from mpistrategy.mpi.contract.mismatch_report import mismatch as error_of

    rows = []
    for ranks in (*real, *pretended):
        row: list[object] = [ranks]
        for apart in (lambda rank: rank == 7, lambda rank: rank):
            values = [f"float64[{3 + int(apart(rank))}]" for rank in range(ranks)]
            reports = [Report({"call": "Strategy.reduce", "values": each}, "train.py:7") for each in values]
            began = time.process_time()
            text = str(error_of(reports))
            row += [len(text.splitlines()), len(text), time.process_time() - began]
        rows.append(row)
    head = ["ranks", "lines, one differs", "bytes", "s", "lines, all differ", "bytes", "s"]
    table("The table of a mismatch, which one rank prints", head, rows)


FIRST_SUM = """
import sys
import numpy as np
import mpistrategy as ms
strategy = ms.MirroredStrategy()
strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3)))
modules = [name for name, module in sys.modules.items() if getattr(getattr(module, "__spec__", None), "loader", None)]
print(sum(name.partition(".")[0] == "mpistrategy" for name in modules))
"""


def imports(real: Sequence[int], pretended: Sequence[int]) -> None:
    """Modules and file-system calls of a process up to its first all-reduce; needs strace."""
    strace = shutil.which("strace")
    if strace is None:
        print("\nimports: strace is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "mpistrategy.zip")
        pack(packed)
        rows: list[list[object]] = []
        cases = [
            ("numpy and mpi4py alone", "import numpy, mpi4py.MPI\nprint(0)", ROOT),
            ("package in a folder", FIRST_SUM, ROOT),
            ("package in a zip file", FIRST_SUM, packed),
        ]
        for what, program, place in cases:
            rows.append([what, *_calls(strace, program, place, folder)])
    head = ["", "modules of ours", "calls with a path", "of these in the environment", "on our files", "a module"]
    table("Up to the first all-reduce", head, rows)


def pack(path: Path) -> None:
    """Write the package, compiled, to a zip file, as `mpistrategy guide slurm` says."""
    with zipfile.PyZipFile(str(path), "w") as file:
        file.writepy(str(ROOT / "mpistrategy"))


def _calls(strace: str, program: str, place: Path, folder: str) -> list[object]:
    trace = Path(folder, "trace")
    environment = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=environment, capture_output=True, check=True, cwd=folder)  # fills the caches
    traced = [strace, "-f", "-o", str(trace), "-e", "trace=%file", *command]
    done = subprocess.run(traced, env=environment, capture_output=True, text=True, check=True, cwd=folder)
    lines = trace.read_text().splitlines()
    package = str(place if place.suffix else place / "mpistrategy")
    ours = sum(package in line for line in lines)
    shared = sum(package in line or sys.prefix in line for line in lines)
    modules = int(done.stdout.split()[-1])
    return [modules, len(lines), shared, ours, round(ours / modules, 1) if modules else ""]


TABLES = {each.__name__: each for each in (creation, watchdog, mismatch, imports)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--real", type=int, nargs="*", default=[16, 64], help="default: 16 64")
    parser.add_argument("--pretended", type=int, nargs="*", default=[1_024, 10_000], help="default: 1024 10000")
    options = parser.parse_args()
    for name in options.tables or TABLES:
        if name not in TABLES:
            parser.error(f"{name!r} is no table; expected {', '.join(TABLES)}")
        TABLES[name](options.real, options.pretended)
    sys.stdout.flush()
    os._exit(0)  # the pretended ranks do not come to the end


if __name__ == "__main__":
    main()
