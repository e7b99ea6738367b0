"""The steps of scripts/gpu_lane, which tells more; needs nothing but Python itself."""

from __future__ import annotations

import argparse
import json
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

from gpu_budgets import PATHS
from gpu_budgets import table as table_of_counts
from gpu_lane_figures import bench, check, hidden, host, limits, nccl1, nodes, optimizers, packing, path
from gpu_lane_jobs import ELSEWHERE, NOT_RUN, RIGHT, ROOT, WRONG, Ended, Lane, Row, environment, prepare, probe

LIMIT = 475  # seconds for everything
PYTEST = ("-m", "pytest", "--with-mpi", "-q", "-s", "--color=no", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml")


def gpu(lane: Lane, row: Row) -> None:
    """Report machine and packages."""
    row.result = RIGHT
    version = lane.facts.get("driver", 0)
    cuda = f"driver for CUDA {version // 1000}.{version % 1000 // 10}, CuPy {lane.facts.get('cupy')}"
    row.text = "the double" if lane.double else f"{lane.facts.get('gpus')} x {lane.facts.get('device')}, {cuda}"


def doctor(lane: Lane, row: Row) -> None:
    """Whether MPI takes GPU memory: mpistrategy doctor tries it, and strategies read what came of it."""
    ended = lane.ranks(row.name, 2, ["-m", "mpistrategy", "doctor"], 90)
    lines = [line for line in ended.output.splitlines() if line[6:].startswith("cuda-aware ")]
    row.result = RIGHT if lines else WRONG
    row.text = " ".join(lines[0][6:].split()) if lines else ended.why
    if "cuda-aware yes" in row.text:  # tried in the rows also where the host is quicker, where strategies leave it
        lane.environment["MPISTRATEGY_CUDA_AWARE"] = "1"


def counts(lane: Lane, row: Row) -> None:
    """Count what each operation asks CUDA for; more than its budget is wrong."""
    row.limit = "the budgets, which the lane prints"
    if not lane.on_cpu:
        row.result, row.text = ELSEWHERE, "operations are counted with --on-cpu"
        return
    file = lane.work / "counts.json"
    ended = lane.ranks(row.name, 2, [ROOT / "scripts" / "gpu_counts.py", file], LIMIT)
    if not file.exists():
        row.result, row.text = WRONG, ended.why
        return
    found = json.loads(file.read_text())
    row.figures, wrong = found["counts"], found["over"]
    print(f"launches, copies and waits of the host, and the most there may be:\n\n{table_of_counts(row.figures)}\n")
    row.result = WRONG if wrong else RIGHT
    numbers = sum(len(each) for each in row.figures.values())
    row.text = "; ".join(wrong) or f"{numbers} operations within their budgets"


def run_tests(
    *files: str, ranks: int, at_once: bool = False, paths: Sequence[str] = PATHS
) -> Callable[[Lane, Row], None]:
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
    if lane.is_measured and "CUDA True" in lane.job(row.name, asked, 30).output:
        run_tests(*TORCH, ranks=2)(lane, row)
    else:
        row.result, row.text = ELSEWHERE, "needs a torch with CUDA in this Python, and a GPU"


def digits(lane: Lane, row: Row) -> None:
    """Training on the GPU and on the CPU: the same weights."""
    if lane.double:
        row.text = "the double trains no digits"
        return
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
    row.figures = {"largest relative difference": apart}
    row.result = RIGHT if apart < 1e-6 else WRONG
    row.text = f"weights of 1 and 2 ranks on the GPU and 2 on the CPU differ by at most {apart:.1e} of the largest"


def sanitizer(lane: Lane, row: Row) -> None:
    """The packing kernel under compute-sanitizer."""
    if lane.double or lane.on_cpu:
        row.result, row.text = ELSEWHERE, "there are no kernels of a GPU"
        return
    places = [
        str(folder)
        for root in Path("/usr/local").glob("cuda*")
        for folder in (root / "bin", root / "compute-sanitizer")
    ]
    tool = shutil.which("compute-sanitizer", path=":".join([lane.environment["PATH"], *places]))
    if tool is None:
        row.text = "there is no compute-sanitizer, neither on PATH nor below /usr/local/cuda*"
        return
    program = [lane.python, ROOT / "scripts" / "gpu_figures.py", lane.work / "sanitized.json", "check"]
    ended = lane.job(row.name, [tool, "--tool", "memcheck", "--error-exitcode", "9", *program], 120)
    clean = ended.status == 0 and "ERROR SUMMARY: 0 errors" in ended.output
    unable = "not supported" in ended.output.lower() or "Unable to" in ended.output
    row.result = RIGHT if clean else NOT_RUN if unable else WRONG
    row.text = "memcheck found nothing" if clean else ended.why


VALUES = ("variables/test_gpu_variables.py", "reduction/test_gpu_destinations.py", "arrays/test_foreign_arrays.py")
STAYS = (
    "mpi/gpu/test_device_collectives.py",
    "mpi/gpu/test_operation_counts.py",
    "reduction/test_gpu_stays_there.py",
    "reduction/test_gpu_memory.py",
)
TORCH = tuple(f"frameworks/test_torch_{each}.py" for each in ("cuda", "group", "optimizer", "starts", "checkpoint"))
OVERLAP = ("reduction/test_gpu_overlap.py", "reduction/test_gpu_foreign_memory.py")
#: The rows in order: name, what it is, its step, and the seconds that it may take; all together take less than `LIMIT`.
STEPS: list[tuple[str, str, Callable[[Lane, Row], None], int]] = [
    ("gpu", "GPU", gpu, 1),
    ("doctor", "what mpistrategy doctor says", doctor, 15),
    ("limits", "limits", limits, 8),
    ("packing", "packing on the device", packing, 8),
    ("check", "packing kernel against NumPy", check, 8),
    ("staged", "all-reduce, staged through the host, 2 ranks on one GPU", path, 8),
    ("mpi", "all-reduce, CUDA-aware MPI, 2 ranks on one GPU", path, 8),
    ("nccl1", "NCCL on one rank", nccl1, 8),
    ("nccl", "all-reduce, NCCL", path, 15),
    ("hidden", "all-reduce beside computation, a GPU for each rank", hidden, 15),
    ("nodes", "all-reduce between nodes, with wire, beside computation", nodes, 1),
    ("host", "time of the host", host, 15),
    ("optimizers", "steps of optimizers, 161 variables", optimizers, 15),
    ("bench", "mpistrategy bench --devices gpu, a GPU for each rank", bench, 20),
    ("counts", "operations counted, and their budgets, 2 ranks", counts, 15),
    ("races", "slow kernels, 2 ranks", run_tests("reduction/test_gpu_races.py", ranks=2), 20),
    ("stays", "every collective, and what stays on the GPU, 2 ranks", run_tests(*STAYS, ranks=2), 20),
    (
        "onnodes",
        "every collective on 2 pretended nodes, 3 ranks",
        run_tests(STAYS[0], ranks=3, paths=("mpi", "staged")),
        20,
    ),
    ("overlap", "reductions beside computation; memory of other libraries, 2 ranks", run_tests(*OVERLAP, ranks=2), 20),
    (
        "failures",
        "a rank fails while work is queued",
        run_tests("mpi/gpu/test_failures_under_way.py", ranks=1, at_once=True),
        50,
    ),
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
#: The rows whose figures are times; the others come later.
MEASURED = [name for name, *_ in STEPS[: [name for name, *_ in STEPS].index("counts")]]


def table(rows: Sequence[Row], facts: dict[str, Any], seconds: float) -> str:
    """Return the table: Markdown that can be read as it is."""
    device = facts.get("device", "the double" if facts.get("double") else "no GPU")
    limit = "limit" if facts.get("is_measured", True) else "limit; times and rates are a GPU's, and not judged here"
    lines = [f"| on {device}, {facts['date']} | | | {limit} |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.result} | {row.text or '-'} | {row.limit or '-'} |" for row in rows]
    counts = {result: sum(row.result == result for row in rows) for result in (RIGHT, WRONG, NOT_RUN, ELSEWHERE)}
    said = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    return "\n".join([*lines, "", f"{said}; {seconds:.0f} s, of {LIMIT} at most"])


def status_of(rows: Sequence[Row]) -> int:
    """Return the exit status that these rows make."""
    results = {row.result for row in rows}
    return 1 if WRONG in results else 3 if NOT_RUN in results else 0


def main() -> int:
    """Run the steps, and tell."""
    started = time.monotonic()
    options = parse_arguments()
    wanted = set(options.only.split(",")) if options.only else {name for name, *_ in STEPS}
    unknown = wanted - {name for name, *_ in STEPS}
    if unknown or (options.folder and not options.folder.is_dir()):
        trouble = f"no row {', '.join(sorted(unknown))}" if unknown else f"no folder {options.folder}"
        print(f"error: {trouble}; scripts/gpu_lane --help tells more", file=sys.stderr)
        return 2
    logs = options.json.resolve().with_suffix(".logs")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    rows = [Row(name, what) for name, what, *_ in STEPS if name in wanted]
    steps = {name: (step, seconds) for name, _, step, seconds in STEPS}
    with tempfile.TemporaryDirectory(prefix="gpu-lane-", ignore_cleanup_errors=True) as work:
        end = started + options.seconds
        lane = Lane(options.double, logs, Path(work), environment(options.double), end)
        lane.on_cpu = options.on_cpu
        lane.facts |= {"date": time.strftime("%Y-%m-%d"), "double": options.double, "machine": platform.node()}
        lane.facts["is_measured"] = lane.is_measured
        trouble = prepare(lane, options.folder and options.folder.resolve()) or probe(lane)

        def run(row: Row) -> None:
            before = time.monotonic()
            if trouble:
                row.text = trouble
            elif before > end - 5:
                row.text = f"the {options.seconds:.0f} s were over"
            else:
                step, allowed = steps[row.name]
                step(replace(lane, until=min(end, before + allowed * lane.patience)), row)
            row.seconds = round(time.monotonic() - before, 1)
            print(f"== {row.what}: {row.result}, {row.seconds} s", file=sys.stderr, flush=True)

        measured = len([row for row in rows if row.name in MEASURED])
        for row in rows[:measured]:
            run(row)
        # Others wait for most of their time: several at once, fewer where a processor does a GPU's work.
        with ThreadPoolExecutor(4 if lane.is_measured else 2) as threads:
            list(threads.map(run, rows[measured:]))
        lane.facts.pop("gpu_error", None)
    seconds = time.monotonic() - started
    report = {**lane.facts, "seconds": round(seconds, 1), "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(table(rows, lane.facts, seconds))
    return status_of(rows)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_lane", description="See scripts/gpu_lane --help.")
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER", help="wheels and a packed MPI")
    parser.add_argument("--json", type=Path, default=Path("gpu_lane.json"), help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="ROW,ROW", help="only these rows")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="for everything; default: %(default)s")
    stand_ins = parser.add_mutually_exclusive_group()
    stand_ins.add_argument("--double", action="store_true", help="on the tests' double of CuPy")
    stand_ins.add_argument("--on-cpu", action="store_true", help="on the real CuPy and tests/cuda_on_cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
