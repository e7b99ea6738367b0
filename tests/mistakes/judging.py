"""Makes a mistake in a job of its own, and says what came of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import launching

from mistakes.matrix import BY_DESIGN, RAISES, RIGHT, RIGHT_AT_ONCE, ROLL_CALL, WARNS

#: Long enough for a busy machine, in seconds.
TIMEOUT = 25
SILENT, PARTLY, HANG, ENDED = "silent", "on some ranks only", "hang", "ended"


class Verdict(NamedTuple):
    """What came of a mistake: one of the words above or of the table's; and the whole story."""

    kind: str
    story: str

    def is_as(self, expected: str) -> bool:
        """Return whether it is what the table says."""
        others = {BY_DESIGN: (RIGHT, SILENT, RAISES), RIGHT_AT_ONCE: (RIGHT, RAISES)}
        return self.kind in (expected, *others.get(expected, ()))


def judge(name: str, ranks: int, odd: int, rounds: int, folder: Path, nodes: int = 1) -> Verdict:
    """Run the job of one mistake; MPICH pretends that its ranks are on so many nodes."""
    environment = {
        "PYTHONPATH": os.pathsep.join(launching.HELPERS),
        "MPISTRATEGY_TIMEOUT_SECONDS": str(TIMEOUT),
        "MPISTRATEGY_RUN_DIR": str(folder),
        "MPIR_CVAR_NUM_CLIQUES": str(nodes),
    }
    arguments = ["-m", "mistakes.matrix", name, str(odd), str(rounds), str(folder)]
    try:
        job = launching.launch(ranks, arguments, timeout=3 * TIMEOUT, env=environment, cwd=folder)
    except TimeoutError as error:
        return Verdict(HANG, str(error))
    files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    told = [json.loads(file.read_text()) if file.exists() else None for file in files]
    story = f"{job}\n" + "\n".join(map(repr, told))
    if "roll call" in job.stderr:
        return Verdict(ROLL_CALL, story)
    if None in told:
        return Verdict(ENDED, story)
    raised = [bool(each["error"]) for each in told]
    if all(raised):
        return Verdict(RAISES, story)
    if any(raised):
        return Verdict(PARTLY, story)
    if "DatasetWarning" in told[0]["warned"]:
        return Verdict(WARNS, story)
    return Verdict(RIGHT if all(each["result"] == each["right"] for each in told) else SILENT, story)
