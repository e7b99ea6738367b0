"""Asks the commands of a cluster what it is: each has a time limit, and one that fails ends nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_PATIENCE_SECONDS = 20.0
_MOST_CHARACTERS = 200_000


@dataclass(frozen=True)
class Answer:
    """What a command said.

    Attributes:
        command: what was asked, as it would be typed.
        text: its output; "" without one.
        problem: why there is none; "" when there is.
    """

    command: str
    text: str = ""
    problem: str = ""


#: Partitions of nodes of one shape, a line each: name (the default one has a star), state, time limit, nodes, CPUs,
#: sockets:cores:threads, GPUs and the like.
SHAPES = ("sinfo", "--noheader", "--format=%P|%a|%l|%D|%c|%z|%G")
_MODULES = ("bash", "-lc", "module -t avail")  # a function of login shells
_LIBRARY = """
import sys
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
from mpistrategy.cli.doctor.facts import fabric
from mpistrategy.mpi.gpu import loaded_mpi
from mpistrategy.mpi.tuning.files import library_name
file = next((path for path in loaded_mpi.mapped_files() if loaded_mpi.is_mpi(path)), "")
own = sys.prefix != sys.base_prefix and file.startswith(sys.prefix + "/")
print(library_name(MPI.Get_library_version()), file, "own" * own, fabric.fabric(), sep="\\n")
"""


@dataclass(frozen=True)
class Answers:
    """What the commands of a cluster said.

    Attributes:
        sinfo: `SHAPES`.
        config: ``scontrol show config``.
        kinds: ``srun --mpi=list``.
        modules: ``module -t avail``.
        library: four lines: the MPI that mpi4py loads here, its file, "own" where it lies in Python's own environment,
            and the network of this machine.
    """

    sinfo: Answer
    config: Answer
    kinds: Answer
    modules: Answer
    library: Answer

    @classmethod
    def of_this_cluster(cls, patience: float = _PATIENCE_SECONDS) -> Answers:
        """Ask them all, each for at most `patience` seconds."""
        python = (sys.executable, "-c", _LIBRARY)
        return cls(
            sinfo=_ask(SHAPES, patience),
            config=_ask(("scontrol", "show", "config"), patience),
            kinds=_ask(("srun", "--mpi=list"), patience),
            modules=_ask(_MODULES, patience, "module -t avail"),
            library=_ask(python, patience, "import mpi4py.MPI"),
        )

    @property
    def problems(self) -> list[str]:
        """Which command had no answer, and why."""
        every = (self.sinfo, self.config, self.kinds, self.modules, self.library)
        return [f"{each.command}: {each.problem}" for each in every if each.problem]


def _ask(command: Sequence[str], patience: float, typed: str = "") -> Answer:
    typed = typed or " ".join(command[:2])
    if shutil.which(command[0]) is None:
        return Answer(typed, problem=f"there is no {command[0]} here")
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        return Answer(typed, problem=str(error))
    try:
        said, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]  # not read to its end: somebody may still hold it open
        return Answer(typed, problem=f"no answer within {patience:g} s")
    text = said.decode(errors="replace")[:_MOST_CHARACTERS]
    if process.returncode:
        last = (text.strip().splitlines() or ["no word"])[-1]
        return Answer(typed, problem=f"status {process.returncode}: {last[:200]}")
    return Answer(typed, text) if text.strip() else Answer(typed, problem="an empty answer")
