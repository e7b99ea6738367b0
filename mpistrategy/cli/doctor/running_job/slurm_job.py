"""What Slurm knows of a job: its number, whether it runs, its nodes, and the folder that it works in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PATIENCE_SECONDS = 20
#: Of an error.
_MOST_LETTERS = 400
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


def ask(text: str) -> SlurmJob:
    """Return what scontrol says of a job: ``17``, ``17.0``, ``17_2`` or ``17+1``; never raises."""
    found = _ID.fullmatch(text)
    if found is None:
        return SlurmJob(text, trouble=f"{text!r} is not the number of a job; expected 17, 17.0 or 17_2")
    told, trouble = answer_of(["scontrol", "show", "job", found[1]], _PATIENCE_SECONDS)
    return SlurmJob(found[1], trouble=trouble) if trouble else read(told, found[1])


def answer_of(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Return what a command of Slurm prints, and why it fails; "" where it does not.  Never raises."""
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, check=False, timeout=seconds, **how)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} cannot be asked here ({error})"
    return done.stdout, f"{command[0]}: {(done.stderr or done.stdout).strip()[-_MOST_LETTERS:]}" * bool(done.returncode)


def read(told: str, number: str) -> SlurmJob:
    """Return what is in the output of ``scontrol show job``."""
    fields = _FIELD.findall(told)
    numbers = [value for name, value in fields if name == "JobId"]
    if len(numbers) > 1:
        return SlurmJob(number, trouble=f"{number} is an array of {len(numbers)} jobs: name one, such as {number}_0")
    of = {"JobId": number, "JobState": "", "NodeList": "", "NumNodes": "", "WorkDir": "", **dict(fields)}
    has_nodes = of["NumNodes"].isdigit() and of["NodeList"] not in ("", "(null)")
    return SlurmJob(of["JobId"], of["JobState"], of["WorkDir"], int(of["NumNodes"]) if has_nodes else 0)
