"""Reads files and settings that were made up to harm: each ends in an error of ours, or well; at once.

Checkpoints (bytes that are flipped, cut, moved and put in; manifests and headers that lie, with checksums that are
right), some with partial=True, thresholds, and environment variables of jobs.
`errors that are not ours` are Python's own, and changes that a refused checkpoint made.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
from pathlib import Path

import hostile
import hostile_others

import mpistrategy as ms


def soak(options: argparse.Namespace) -> bool:
    """Read everything; return whether something is wrong."""
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        settings = [(variable, value) for variable in hostile_others.VARIABLES for value in hostile_others.SETTINGS]
        read = [hostile_others.read_environment(folder, settings[: options.count])]
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
        program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
        program.checkpoint.save(folder / "c")
        read.append(hostile.read_checkpoints(program, folder / "c", options.count, dice))
        read.append(hostile_others.read_thresholds(folder, options.count // 10, dice))
    for figures in read:
        print(figures.line(), *figures.foreign, sep="\n  ")
    print(f"the peak of memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
    return any(figures.foreign for figures in read)
