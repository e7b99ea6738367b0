"""Reads files and settings that were made up to harm, and shows that each ends in an error of ours, or well; at once.

    python scripts/soak hostile_files [--files 10000] [--seed 0] [--no-jobs]    in one process; for settings jobs of 2
    scripts/mpirun -n 2 scripts/soak hostile_files --on-ranks [--files 500]      checkpoints that all ranks read

Checkpoints (bytes that are flipped, cut, moved and put in; manifests and headers that lie, with checksums that are
right), .npz, .npy and .safetensors files, manifests with partial=True, thresholds, run directories, and
environment variables.  `errors that are not ours` are Python's own, and changes that a refused checkpoint made.
Address space is limited; the peak of memory is told.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "jobs"), str(ROOT)]

import hostile  # noqa: E402
import hostile_others  # noqa: E402

import mpistrategy as ms  # noqa: E402

_ADDRESS_SPACE = 4 * 2**30
#: Of so many mutated checkpoint files as many others of each kind.
_PARTIAL, _OTHERS = 10, 10


def soak(files: int, seed: int, jobs: bool) -> int:
    """Read everything in this process; return the exit status."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, before[1]))
    dice = random.Random(seed)
    found = []
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        for in_part, count in ((False, files), (True, files // _PARTIAL)):
            program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
            program.checkpoint.save(folder / "c", overwrite=True)
            found.append(tell(hostile.read_checkpoints(program, folder / "c", count, dice, partial=in_part)))
        others = (hostile_others.read_thresholds,)
        found += [tell(read(folder, files // _OTHERS, dice)) for read in others]
        print(f"the peak of memory meanwhile: {_peak()} MiB", flush=True)
        if jobs:
            os.environ["PYTHONPATH"] = str(ROOT)
            resource.setrlimit(resource.RLIMIT_AS, before)
            pairs = [(variable, value) for variable in hostile_others.VARIABLES for value in hostile_others.SETTINGS]
            found.append(tell(hostile_others.read_environment(folder, pairs)))
    return int(not all(found))


def on_ranks(files: int, seed: int) -> int:
    """Have all ranks read each mutated checkpoint; return the exit status."""
    from replicas import RANK, SIZE, gather_texts

    dice, figures = random.Random(seed), hostile.Figures(f"mutated checkpoint files on {SIZE} ranks")
    with ms.MirroredStrategy() as strategy:
        folder = Path(gather_texts(tempfile.mkdtemp(prefix="soak-") if RANK == 0 else "")[0])
        program = hostile.Program(strategy)
        program.checkpoint.save(folder / "c")
        for number in range(files):
            path, way = folder / "mutated", ""
            if RANK == 0:
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(folder / "c", path)
                way = hostile.mutate_checkpoint(path, dice)
            strategy.barrier("mutated")
            restore = partial(program.checkpoint.restore, path, partial=bool(number % 2))
            kinds: set[object] = set()
            figures.add(way, partial(_note_kinds, kinds, restore))
            if len(kinds) != 1 or Exception in kinds:
                figures.foreign.append(f"number {number}, {way}: {kinds}")
            elif kinds == {None}:
                program.check()
                program = hostile.Program(strategy)
            strategy.barrier("read")
        if RANK == 0:
            shutil.rmtree(folder)
            tell(figures)
    return int(not figures.is_good)


def _note_kinds(kinds: set[object], call: Callable[[], object]) -> None:
    """Make a call on all ranks, and note which errors they raise; raise this rank's."""
    from replicas import outcomes

    raised: list[Exception] = []

    def noted() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)
            raise

    kinds.update(outcome.error for outcome in outcomes(noted))
    if raised:
        raise raised[0]


def tell(figures: hostile.Figures) -> bool:
    """Print the figures, and what is wrong; return whether nothing is."""
    print(figures.line(), flush=True)
    for each in figures.foreign + figures.hangs:
        print(f"  {each}")
    return figures.is_good


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> int:
    """Do what the options say; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000, help="how many checkpoint files; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--no-jobs", action="store_true", help="leave the environment variables out")
    parser.add_argument("--on-ranks", action="store_true", help="read checkpoints on the ranks of this job")
    options = parser.parse_args()
    if options.on_ranks:
        return on_ranks(options.files, options.seed)
    return soak(options.files, options.seed, not options.no_jobs)


if __name__ == "__main__":
    sys.exit(main())
