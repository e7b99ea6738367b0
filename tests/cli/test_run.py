"""`mpistrategy run`: a drop-in for `python`, and the end of one rank is the end of the job from the first line on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

Launch = Callable[..., launching.Finished]

RUN = ["-m", "mpistrategy", "run"]
ROOT = Path(__file__).resolve().parents[2]


def alone(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one python without a launcher."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *arguments],
        env=launching.environment() | {"PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ------------------------------------------------------------------------------------- as under python

WHO_AM_I = """
import os, sys
main = sys.modules["__main__"]
sys.argv[0] = os.path.abspath(sys.argv[0])
print(sys.argv, sys.path[0], __name__, __file__, __package__ or "", __doc__, __cached__ is None)
print(__spec__ and (__spec__.name, __spec__.parent), vars(main) is globals(), main.__name__)
"""
ENDS = {
    "exit with words": "raise SystemExit('the reason')",
    "exception": "def f():\n    raise ValueError('the reason')\nf()",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "syntax error": "def f(:\n    pass",
    "a hook": "import sys\nsys.excepthook = lambda kind, *rest: print('mine', kind.__name__)\n1 / 0",
    "an atexit callback that needs the program's names": (
        "import atexit, pickle\nclass Of:\n    pass\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Of()))).__name__))\n"
    ),
    "os._exit": "import os\nos._exit(5)",
}


@pytest.fixture
def folder(launch: Launch, tmp_path: Path) -> Path:
    """A folder with programs in it; needs `launch` only since one rank is enough."""
    (tmp_path / "who.py").write_text(WHO_AM_I)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(WHO_AM_I)
    (tmp_path / "package" / "broken.py").write_text("import no_such_module_at_all")
    (tmp_path / "link.py").symlink_to(tmp_path / "package" / "__main__.py")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        "./who.py a --timeout -h -- x",
        "link.py",
        "-m who a -c b",
        "-m package --only",
        "package",
        "-m package.broken",
        "-m no_such_module_at_all",
        "none.py",
        "-c import\tsys;print(sys.argv,sys.path[0],__name__,'__file__'in\tglobals());sys.exit(4) a -b",
    ],
)
def test_programs_are_found_and_named_as_by_python(folder: Path, arguments: str) -> None:
    theirs = alone(*arguments.split(" "), cwd=folder)
    ours = alone(*RUN, *arguments.split(" "), cwd=folder)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout), ours.stderr
    # Python says in other words than runpy that there is no such module.
    said = theirs.stderr.strip().partition(": ")[2].partition(" (")[0].split(":")[-1].strip()
    assert said in ours.stderr


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_by_python(folder: Path, how: str) -> None:
    (folder / "ends.py").write_text(ENDS[how])
    theirs, ours = (alone(*head, "ends.py", cwd=folder) for head in ([], RUN))
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout), ours.stderr
    assert {*theirs.stderr.splitlines()} <= {*ours.stderr.splitlines()}  # there are frames of this package, too


@pytest.mark.each_mpi
@pytest.mark.parametrize("name", ["SIGQUIT", "SIGSEGV"])
def test_a_signal_shows_the_stack(folder: Path, name: str) -> None:
    """SIGQUIT, and the program goes on; a signal that kills, and Open MPI catches it and shows its own stack, too."""
    job = alone(
        *RUN, "-c", f"import os, signal\ndef here():\n    os.kill(os.getpid(), signal.{name})\nhere()\nprint('on')"
    )
    statuses = (-signal.SIGSEGV, -signal.SIGABRT) if name == "SIGSEGV" else (0,)
    assert job.returncode in statuses, job
    assert ("on\n" in job.stdout) == (name == "SIGQUIT")
    assert re.search(r'File "<string>", line \d in here', job.stderr), job.stderr


# ------------------------------------------------------------------------------------- the end of one of two ranks


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file in which the ranks say how the program ended."""
    path = tmp_path / "mark"
    path.touch()
    return path


@pytest.mark.each_mpi
@pytest.mark.slow
def test_ranks_that_have_agreed_to_stop_end_without_a_word(launch: Launch, tmp_path: Path, mark: Path) -> None:
    source = """
    import os, signal, sys
    import numpy as np
    import mpistrategy as ms

    def train():
        with ms.MirroredStrategy() as strategy:
            manager = ms.CheckpointManager(ms.Checkpoint(v=ms.Variable(np.ones(2))), sys.argv[1])
            handler = ms.PreemptionCheckpointHandler(manager)
            if strategy.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            handler.run(lambda: strategy.reduce("SUM", 1.0))

    train()
    """
    job = launch(2, [*RUN, "--unfinished", mark, launching.program(source, tmp_path), tmp_path / "run"])
    assert job.returncode == 75, job
    assert mark.read_text().startswith("begun\nstopped with status 75\n"), job
    assert "told to stop" in job.stdout + job.stderr, job
    assert "SystemExit" not in job.stderr, job


TRAIN = """
import sys
from mpi4py import MPI

world = MPI.COMM_WORLD
part = world.Split(0, world.rank)
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy(communicator=part)
if strategy.rank == 0:
    world.send(20, dest=2)
    given = world.recv(source=2)
else:
    given = None
given = int(strategy.broadcast(given if strategy.rank == 0 else 0))
total = strategy.reduce("SUM", np.full(100_000, given))[0]
if sys.argv[1:] and strategy.rank == 1:
    raise ValueError("a rank of the training")
sys.stdout.write(f"train {strategy.rank} of {strategy.size}: {total}\\n")
"""
SOLVER = """
import sys
from mpi4py import MPI

world = MPI.COMM_WORLD
part = world.Split(1, world.rank)
world.send(2 * world.recv(source=0), dest=0)
if sys.argv[1:]:
    world.recv(source=0)  # which nobody sends
sys.stdout.write(f"solver {part.rank} of {part.size}\\n")
"""
#: What they print on three ranks, of which the last one runs SOLVER.
TOLD = ("solver 0 of 1", "train 0 of 2: 80", "train 1 of 2: 80")


@pytest.mark.each_mpi
@pytest.mark.parametrize("how", ["", "fails"])
def test_one_job_of_two_programs(launch: Launch, tmp_path: Path, how: str) -> None:
    train, solver = (launching.program(text, tmp_path) for text in (TRAIN, SOLVER))
    job = launch(2, [*RUN, train, *how.split(), ":", "-n", "1", sys.executable, solver, *how.split()], timeout=20)
    if how:
        assert job.returncode == 1, job
        assert "[rank 1/3] ValueError: a rank of the training" in job.stderr, job
    else:
        assert (job.returncode, sorted(job.stdout.splitlines())) == (0, sorted(TOLD)), job
        assert job.stderr.strip() == "", job


@pytest.mark.parametrize(
    ("source", "status", "left"),
    [
        ("import os\nos.chdir('/')\nfrom mpi4py import MPI\nMPI.Finalize()\n", 0, ""),
        pytest.param("import sys\nsys.exit(3)\n", 3, "failed with status 3 on rank ", marks=pytest.mark.each_mpi),
        ("import mpistrategy.options as o\no.CommunicationOptions(-1)\n", 1, "failed with OptionError on rank "),
    ],
)
def test_a_file_says_how_the_program_ended(
    launch: Launch, tmp_path: Path, mark: Path, source: str, status: int, left: str
) -> None:
    """It is taken away at a good end.  Where all ranks exit together, the first says so."""
    (tmp_path / "job.py").write_text(source)
    job = launch(2, [*RUN, "--unfinished", "mark", "job.py"], cwd=tmp_path)
    assert (job.returncode, mark.exists()) == (status, bool(left)), job
    assert not left or left in mark.read_text()
    assert status or not job.stderr.strip(), job
    assert job.stderr.count("SystemExit: 3") == job.stderr.count("[rank 0/2] ended with status 3: ") == (status == 3)
