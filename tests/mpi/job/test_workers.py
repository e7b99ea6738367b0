"""Processes that a rank starts are no ranks: a strategy in them says what to change, before MPI starts."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest

PROGRAM = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import mpistrategy as ms

strategy = ms.MirroredStrategy()


def double(x):
    return 2 * x


if __name__ == "__main__":
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
            print(*pool.map(double, [1, 2]))
    except (OSError, EOFError, RuntimeError) as error:
        print(type(error).__name__)
"""


@pytest.mark.each_mpi
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_of_a_rank_says_what_to_change(launch: launching.Launch, tmp_path: Path, method: str) -> None:
    job = launch(2, [launching.program(PROGRAM, tmp_path), method], timeout=60)
    assert job.returncode == 0, job
    assert "LaunchError: MirroredStrategy: found a process that rank" in job.stderr, job
    assert '`if __name__ == "__main__":`' in job.stderr, job
    assert "Abort(" not in job.stderr, job


OTHER_PROGRAM = """
import subprocess, sys
import mpistrategy as ms

strategy = ms.MirroredStrategy()
if strategy.rank == 1:
    other = "import mpistrategy as ms; print(ms.OneDeviceStrategy().reduce('SUM', 3.0)); ms.MirroredStrategy()"
    print(subprocess.run(["sh", "-c", 'exec "$0" -c "$1"', sys.executable, other], timeout=30).returncode, flush=True)
print(strategy.reduce("SUM", 1.0), flush=True)
"""


@pytest.mark.each_mpi
def test_a_program_that_a_rank_starts_is_no_rank(launch: launching.Launch, tmp_path: Path) -> None:
    job = launch(2, launching.program(OTHER_PROGRAM, tmp_path), timeout=60).check()
    assert sorted(job.stdout.split()) == ["1", "2.0", "2.0", "3.0"], job
    assert "LaunchError: MirroredStrategy: found a process that rank 1 of 2 has started" in job.stderr, job
