"""What Slurm knows of a job: its number, whether it runs, its nodes, and the folder that it works in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_PATIENCE_SECONDS = 20
_ID = re.compile(r"(\d+(?:[_+]\d+)?)(?:\.\d+)?")
#: A folder may have blanks in its name.
_FIELD = re.compile(r"(?:^|\s)(JobId|JobState|NodeList|NumNodes|WorkDir)=((?<=WorkDir=).*?(?=\s*$)|\S*)", re.M)


@dataclass(frozen=True)
class SlurmJob:
    """A job.

    Attributes:
        number: its own number, also where it is one of an array.
        state: RUNNING, ...; "" if unknown.
        folder: where it works; "" if unknown.
        nodes: how many nodes it has; 0 if unknown.
        trouble: why Slurm gives no answer; "" when it does.
    """

    number: str
    state: str = ""
    folder: str = ""
    nodes: int = 0
    trouble: str = ""


def is_id(text: str) -> bool:
    """Return whether a text is the number of a job: ``17``, ``17.0``, ``17_2`` or ``17+1``."""
    return bool(_ID.fullmatch(text))


def ask(text: str) -> SlurmJob:
    """Return what scontrol says of a job; never raises."""
    found = _ID.fullmatch(text)
    number = found[1] if found else text
    try:
        done = answer_of(["scontrol", "show", "job", number], _PATIENCE_SECONDS)
    except OSError as error:
        return SlurmJob(number, trouble=f"scontrol cannot be asked here ({error.strerror or error})")
    if done.returncode:
        return SlurmJob(number, trouble=f"scontrol: {(done.stderr or done.stdout).strip()}")
    return read(done.stdout, number)


def answer_of(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Return what a command of Slurm says.

    Raises:
        OSError: when it cannot be started, or takes longer.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from error


def read(told: str, number: str) -> SlurmJob:
    """Return what is in the output of ``scontrol show job``."""
    fields = _FIELD.findall(told)
    numbers = [value for name, value in fields if name == "JobId"]
    if len(numbers) > 1:
        return SlurmJob(number, trouble=f"{number} is an array of {len(numbers)} jobs: name one, such as {number}_0")
    of = {"JobId": number, "JobState": "", "NodeList": "", "NumNodes": "", "WorkDir": "", **dict(fields)}
    has_nodes = of["NumNodes"].isdigit() and of["NodeList"] not in ("", "(null)")
    return SlurmJob(of["JobId"], of["JobState"], of["WorkDir"], int(of["NumNodes"]) if has_nodes else 0)
