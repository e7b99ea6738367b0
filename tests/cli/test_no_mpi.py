"""Without an MPI, and without mpi4py, every way in tells the same three lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import launching
import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

CURES = [
    "Load your cluster's MPI module, or install an MPI into this environment: pip install mpich",
    "Without MPI, OneDeviceStrategy and mpistrategy.testing.run_replicas work.",
]
COMMANDS = {
    "mpistrategy run": (["-m", "mpistrategy", "run", "-c", "print(1)"], 2),
    "mpistrategy doctor": (["-m", "mpistrategy", "doctor"], 1),
    "MirroredStrategy": (["-c", "import mpistrategy as ms; ms.MirroredStrategy()"], 1),
    "mpistrategy bench": (["-m", "mpistrategy", "bench", "--quick"], 2),
}


@pytest.mark.parametrize("missing", ["libmpi", "mpi4py"])
@pytest.mark.parametrize("name", COMMANDS)
def test_three_lines_say_what_is_missing_and_what_to_do(name: str, missing: str, tmp_path: Path) -> None:
    arguments, status = COMMANDS[name]
    environment = launching.environment() | {"PYTHONPATH": str(Path(ms.__file__).parents[1])}
    if missing == "libmpi":
        environment["MPI4PY_LIBMPI"] = "/opt/none/libmpi.so.12"
        found = "no MPI library (there is no /opt/none/libmpi.so.12)"
    else:
        (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('No module named mpi4py', name='mpi4py')\n")
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
        found = "no mpi4py"
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if missing == "libmpi" and (done.returncode == 0 or "there is no" not in done.stdout + done.stderr):
        pytest.skip("this mpi4py is built for one MPI and takes no other")
    assert done.returncode == status, done
    # Below the three lines, a traceback has that of every error which names the guide.
    told = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("More about it: ")]
    if name == "mpistrategy doctor":
        assert any(f"BAD   mpi  {found}" in line for line in told), done.stdout
        assert len(told) <= 6
        arrow = next(line for line in told if line.lstrip().startswith("->"))
        assert ("Correct MPI4PY_LIBMPI=/opt/none" if missing == "libmpi" else CURES[0]) in arrow
        assert CURES[0] in done.stdout
    else:
        where = name if "bench" not in name else "MirroredStrategy"
        first = f"{where}: found {found}; expected an MPI that mpi4py can load."
        message = [line.removeprefix("mpistrategy.errors.LaunchError: ") for line in told]
        start = message.index(first)
        assert message[start + 1 : start + 3] == CURES
        assert len(message) - start <= 4  # an exception also names its page of the guide
    assert "During handling" not in done.stderr
    assert "direct cause" not in done.stderr
    if name != "MirroredStrategy":
        assert "Traceback" not in done.stderr
