"""Replays the recorded cases, in one job for each number of replicas, and prints the report.

A job that dies ends the replay of its cases: the one that it was in, and those that it did not come to, count as
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from launching import HELPERS, LAUNCHER_PREFIXES

from .cases import DEFAULT_ORACLE, load_cases
from .judge import Result
from .values import Json

ROOT = Path(__file__).resolve().parents[2]
JOB_SECONDS = 900
#: A collective that does not come to its end: the job says who is missing, and ends.
CASE_SECONDS = 30
SHELL = 'source "$1/scripts/environment.sh"; MPI=$2 VENV=$3; shift 3; run_ranks "$@"'
COLUMNS = ("passed", "deviations", "superseded", "unsupported", "failed")
LAST_LINE = ("passed", "deviations", "unsupported", "failed")


def main() -> int:
    """Parse the command line, replay, report; 0 only when no case failed."""
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument("--oracle", type=Path, default=DEFAULT_ORACLE, help="a directory of area files (.jsonl, .json)")
    parser.add_argument("--mpi", default="mpich", help="mpich, openmpi or impi: which virtual environment to run in")
    parser.add_argument(
        "--simulated", action="store_true", help="run the replicas as threads of one process, without mpiexec"
    )
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only cases whose id contains this")
    parser.add_argument("--areas", default="", metavar="A,B", help="only these areas")
    parser.add_argument("--verbose", action="store_true", help="list deviations, superseded and unsupported cases too")
    options = parser.parse_args()
    areas = tuple(options.areas.split(",")) if options.areas else ()
    cases = list(load_cases(options.oracle, areas, options.only))
    if not cases:
        print("no case matches", file=sys.stderr)
        return 2
    results = []
    for replicas in sorted({case["num_replicas"] for case in cases}):
        of_size = [case["id"] for case in cases if case["num_replicas"] == replicas]
        started = time.monotonic()
        results += run_job(of_size, replicas, options)
        print(f"{len(of_size)} cases on {replicas} rank(s) in {time.monotonic() - started:.1f} s", flush=True)
    return print_report(cases, results, verbose=options.verbose)


def run_job(ids: list[str], replicas: int, options: argparse.Namespace) -> list[Result]:
    """Replay cases of one size in one mpiexec, or in one process with simulated ranks."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        work, lines = Path(folder) / "work.json", Path(folder) / "results.jsonl"
        work.write_text(json.dumps({"oracle": str(options.oracle.resolve()), "ids": ids}))
        lines.touch()
        program = ["-m", f"{__package__}.replay", str(work), str(lines)]
        if options.simulated:
            command = [sys.executable, *program, "--simulated", str(replicas)]
        else:
            where = [str(ROOT), options.mpi, sys.prefix]
            command = ["bash", "-c", SHELL, "conformance", *where, str(replicas), str(JOB_SECONDS), *program]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        folders = [str(ROOT), *HELPERS, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        environment.setdefault("MPISTRATEGY_TIMEOUT_SECONDS", str(CASE_SECONDS))
        job = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        results = [Result(**json.loads(line)) for line in lines.read_text().splitlines() if line.endswith("}")]
    # Of a job that has died, which replays in this order, the first case without a result is the one it was in.
    missing = ids[len(results) :]
    said = (f"the job ended with exit status {job.returncode}", *(job.stdout + job.stderr).splitlines()[-15:])
    for number, case_id in enumerate(missing):
        results.append(Result(case_id, "failed", details=said if number == 0 else ("not replayed",)))
    return results


def print_report(cases: list[Json], results: list[Result], *, verbose: bool) -> int:
    """Print failed cases, a row an area, and one last line; return 0 when no case failed."""
    for column in COLUMNS[1:] if verbose else ("failed",):
        of_column = [result for result in results if result.verdict == column]
        if of_column:
            print(f"\n{column}:")
        for result in of_column:
            print(f"  {result.case_id}" + (f"  [{result.rule}]" if result.rule else ""))
            for detail in result.details:
                print(f"      {detail}")
    area_of = {case["id"]: case["area"] for case in cases}
    counts = Counter((area_of[result.case_id], result.verdict) for result in results)
    total = Counter(result.verdict for result in results)
    print(f"\n{'area':<20}" + "".join(f"{column:>13}" for column in COLUMNS))
    for area in sorted(set(area_of.values())):
        print(f"{area:<20}" + "".join(f"{counts[area, column]:>13}" for column in COLUMNS))
    superseded = "recorded in two environments that disagree; the design decides for the other one"
    print(f"\nsuperseded={total['superseded']} ({superseded})")
    print("conformance: " + " ".join(f"{column}={total[column]}" for column in LAST_LINE), flush=True)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
