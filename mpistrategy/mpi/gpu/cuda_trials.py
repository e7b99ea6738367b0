"""Outcomes of giving GPU memory to an MPI library, kept from one job to the next.

`mpistrategy doctor` tries it in a job of its own, where a crash is an answer, and writes it down beside the measured
thresholds; strategies read it.  The library is known by all that it says about itself.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpistrategy import own_files
from mpistrategy.mpi.gpu.cuda_aware import NO, UNVERIFIED, YES, Answer
from mpistrategy.mpi.tuning.files import MOST_BYTES, kept_file, library_name, replace_whole

_FORMAT = 1
_VERDICTS = {"right": YES, "wrong": NO, "died": NO}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        outcome: "right", "wrong" (the numbers), or "died".
        reason: in words.
    """

    outcome: str
    reason: str


def file_of(version: str) -> Path:
    """Return the file with the outcome for a library, which is known by its version text."""
    return kept_file(library_name(version), f"{zlib.crc32(version.encode()):08x}-gpu")


def save(version: str, found: Outcome) -> Path:
    """Write the outcome for a library; return the file.

    Raises:
        OSError: when it cannot be written.
    """
    file = file_of(version)
    own_files.make_folders(str(file.parent))
    content = {"format": _FORMAT, "library": version, "outcome": found.outcome, "reason": found.reason}
    replace_whole(file, json.dumps(content) + "\n")
    return file


def load(version: str) -> Outcome | None:
    """Return the outcome for a library; None without a trial, or where the file cannot be understood."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(own_files.read(str(file_of(version)), MOST_BYTES).decode())
        if isinstance(content, dict) and content.get("format") == _FORMAT and content.get("library") == version:
            outcome, reason = content.get("outcome"), content.get("reason")
            if isinstance(outcome, str) and outcome in _VERDICTS and isinstance(reason, str):
                return Outcome(outcome, reason)
    return None


def verified(answer: Answer, version: str, word: bool | None) -> Answer:
    """Return the answer after the trial: a yes without a trial does not count.

    Args:
        answer: `mpistrategy.mpi.gpu.cuda_aware.decide`'s.
        version: what the library says about itself.
        word: the user's, who has the last one.
    """
    if word is not None or answer.verdict == NO:
        return answer
    tried = load(version)
    if tried is None:
        return Answer(UNVERIFIED, f"{answer.reason}; not tried here yet: run mpistrategy doctor once")
    return Answer(_VERDICTS[tried.outcome], f"{answer.reason}; tried: {tried.reason}")
