"""A pytest plugin: reports that the library prints before it ends a job bypass pytest's capture.

pytest loads it wherever mpistrategy is installed.  It does nothing unless a launcher started several ranks; then it
keeps a descriptor of stderr from before the capture, and the first failures, which pytest shows only at its end.
`watchdog.reports` finds them here.  It is installed beside the package: importing the package takes longer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

#: Launchers set these to the number of ranks, on this node or in total.
_SIZES = (
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
_MOST_FAILURES, _MOST_LINES = 3, 60


class Reports:
    """The parts of this session of pytest that the library uses.

    Attributes:
        stderr: a descriptor of stderr from before the capture.
    """

    def __init__(self) -> None:
        self.stderr: int = os.dup(2)
        self._pid = os.getpid()
        self._failures: list[str] = []

    def is_of_this_process(self) -> bool:
        """Return whether this is not a forked child of the session."""
        return os.getpid() == self._pid

    def failed_tests(self) -> str:
        """Return the failures of this rank that pytest has not shown yet; "" without any."""
        more = len(self._failures) - _MOST_FAILURES
        last = [f"and {more} more failed on this rank"] * (more > 0)
        return "\n".join([*self._failures[:_MOST_FAILURES], *last])

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Keep a failure."""
        if not report.failed:
            return
        when = getattr(report, "when", "collect")
        lines = report.longreprtext.splitlines()
        left_out = [f"... ({len(lines) - _MOST_LINES} lines)"] * (len(lines) > _MOST_LINES)
        title = f"{report.nodeid} failed on this rank before ({when}):"
        self._failures.append("\n".join([title, *left_out, *lines[-_MOST_LINES:]]))

    pytest_collectreport = pytest_runtest_logreport

    def pytest_unconfigure(self) -> None:
        """Forget the failures: pytest has shown them."""
        self._failures.clear()


#: None where there are no ranks, or pytest does not run.
reports: Reports | None = None


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Begin, under several ranks: this is called before pytest captures anything."""
    global reports
    # pytest rewrites the assertions of packages with plugins, on each import where it cannot store the result.
    hook = getattr(pluginmanager, "rewrite_hook", None)
    getattr(hook, "_must_rewrite", set()).discard("mpistrategy")
    if reports is None and any(os.environ.get(name, "1") not in ("", "0", "1") for name in _SIZES):
        with suppress(OSError):  # stderr may be closed
            reports = Reports()
    if reports is not None:
        pluginmanager.register(reports, "mpistrategy reports")
