"""What scripts/conformance does in Python: `sizes` of the jobs to start, `replay` in one of them, and the `report`.

A job that dies ends the replay of its cases: the one that it was in, and those that it did not come to, count as
failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

from replicas import SIZE

from .cases import DEFAULT_ORACLE, load_cases
from .judge import Result
from .replay import Ranks, replay
from .values import Json

COLUMNS = ("passed", "deviations", "superseded", "unsupported", "failed")
LAST_LINE = ("passed", "deviations", "unsupported", "failed")


def main() -> int:
    """Take one of the three steps; return 0 unless a case failed."""
    parser = argparse.ArgumentParser(prog="scripts/conformance")
    parser.add_argument("step", choices=("sizes", "replay", "report"))
    parser.add_argument("results", type=Path, help="a file with a line of JSON for each case that was replayed")
    parser.add_argument("--oracle", type=Path, default=DEFAULT_ORACLE, help="a directory of area files (.jsonl, .json)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only cases whose id contains this")
    parser.add_argument("--verbose", action="store_true", help="list deviations, superseded and unsupported cases too")
    options = parser.parse_args()
    cases = list(load_cases(options.oracle, options.only))
    if options.step == "replay":
        replay_here(cases, options.results)
    elif options.step == "report":
        return print_report(cases, options.results, verbose=options.verbose)
    else:
        print(*sorted({case["num_replicas"] for case in cases}))
    return 0


def replay_here(cases: list[Json], results: Path) -> None:
    """Replay the cases of this number of ranks on COMM_WORLD; rank 0 appends each result as it comes."""

    def ended(result: Result) -> None:
        with results.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")

    replay([case for case in cases if case["num_replicas"] == SIZE], Ranks(), ended)


def print_report(cases: list[Json], path: Path, *, verbose: bool) -> int:
    """Print failed cases, a row an area, and one last line; return 0 when there are cases and none failed."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    found = {line["case_id"]: Result(**line) for line in lines}
    lost = ("no result: its job ended in this case, or before it",)
    results = [found.get(case["id"], Result(case["id"], "failed", details=lost)) for case in cases]
    for column in COLUMNS[1:] if verbose else ("failed",):
        print(f"\n{column}:")
        for result in results:
            if result.verdict == column:
                print(f"  {result.case_id}  {result.rule}", *result.details, sep="\n      ")
    counts = Counter((case["area"], result.verdict) for case, result in zip(cases, results, strict=True))
    print(f"\n{'area':<20}" + "".join(f"{column:>13}" for column in COLUMNS))
    for area in sorted({case["area"] for case in cases}):
        print(f"{area:<20}" + "".join(f"{counts[area, column]:>13}" for column in COLUMNS))
    total = Counter(result.verdict for result in results)
    superseded = "recorded in two environments that disagree; the design decides for the other one"
    print(f"\nsuperseded={total['superseded']} ({superseded})")
    print("conformance: " + " ".join(f"{column}={total[column]}" for column in LAST_LINE), flush=True)
    return 1 if total["failed"] or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
