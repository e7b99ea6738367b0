"""What the replay prints: failed cases, a row an area, the shares of deviations, and one last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .runner import Result
from .values import Json

COLUMNS = ("passed", "deviations", "superseded", "unsupported", "failed")
LAST_LINE = ("passed", "deviations", "unsupported", "failed")
CORE_AREAS = ("merge_call", "all_reduce", "reduce", "extended", "cross_device_ops")
LIMIT_ALL, LIMIT_CORE = 0.15, 0.09


def print_report(cases: list[Json], results: dict[str, Result], *, verbose: bool = False) -> int:
    """Print the report; return 0 when no case failed, else 1."""
    shown = COLUMNS[1:] if verbose else ("failed",)
    for column in shown:
        _print_cases(column, [results[case["id"]] for case in cases])
    counts = {area: Counter[str]() for area in sorted({case["area"] for case in cases})}
    for case in cases:
        counts[case["area"]][results[case["id"]].verdict] += 1
    _print_table(counts)
    _print_shares(counts)
    total = sum(counts.values(), Counter[str]())
    print(
        f"superseded={total['superseded']}"
        " (recorded in two environments that disagree; the design decides for the other one)"
    )
    print("conformance: " + " ".join(f"{column}={total[column]}" for column in LAST_LINE), flush=True)
    return 1 if total["failed"] else 0


def _print_cases(column: str, results: Iterable[Result]) -> None:
    chosen = [result for result in results if result.verdict == column]
    if chosen:
        print(f"\n{column}:")
    for result in chosen:
        print(f"  {result.case_id}" + (f"  [{result.rule}]" if result.rule else ""))
        for detail in result.details:
            print(f"      {detail}")


def _print_table(counts: dict[str, Counter[str]]) -> None:
    print(f"\n{'area':<20}" + "".join(f"{column:>13}" for column in COLUMNS))
    for area, count in counts.items():
        print(f"{area:<20}" + "".join(f"{count[column]:>13}" for column in COLUMNS))


def is_core(area: str) -> bool:
    """Return whether an area belongs to the pool with the tighter limit of deviations."""
    return area in CORE_AREAS or area.startswith("variables")


def _print_shares(counts: dict[str, Counter[str]]) -> None:
    print()
    for name, limit, chosen in (
        ("all cases", LIMIT_ALL, list(counts.values())),
        ("merge_call, all_reduce, reduce, extended, cross_device_ops, variables*", LIMIT_CORE,
         [count for area, count in counts.items() if is_core(area)]),
    ):  # fmt: skip
        deviations, total = (
            sum(count["deviations"] for count in chosen),
            sum(count.total() for count in chosen),
        )
        if total:
            print(f"deviations in {name}: {deviations} of {total} = {deviations / total:.1%} (limit {limit:.0%})")
