"""pytest under mpiexec: every rank runs every test, and all ranks agree on what came of it.

pytest-mpi gives the markers; by itself it leaves each rank to its own report, and a rank that failed meets
the others' collectives with its next test. Here the ranks exchange the outcome after each phase (setup, call,
teardown) of each test, so that one rank's failure fails the test everywhere and rank 0's report shows every
rank's reason. A rank that failed while the others are stuck in a collective says why and ends the job.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import hypothesis.errors
import launching
import numpy as np
import pytest
from mpi4py import MPI

import mpistrategy
from mpistrategy.mpi.watchdog import reports

# How long a rank waits for the others, in seconds: GRACE when its own test was cut short, so that they may be
# stuck in a collective that it never entered, else PATIENCE.
GRACE = float(os.environ.get("MPISTRATEGY_TEST_GRACE", "10"))
PATIENCE = float(os.environ.get("MPISTRATEGY_TEST_PATIENCE", "270"))
CUT_SHORT = ("failed", "skipped", "xfailed")
ABORT_STATUS = 3
os.environ.setdefault("MPISTRATEGY_PATHS", "")  # not what somebody once measured on this machine
gc.disable()  # until the tests are collected, which would take half as long again

# All ranks must draw the same examples, run the same number of them, and not judge by a clock.
hypothesis.settings.register_profile(
    "mpi",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    report_multiple_bugs=False,
)
hypothesis.settings.load_profile("mpi")


@dataclass(frozen=True)
class Account:
    """What one rank says at a meeting: `outcome` is compared, `text` tells why."""

    outcome: str
    text: str

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"


class Ranks:
    """The ranks of this session, on a communicator that no test can reach."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size

    def meet(self, where: str, outcome: str = "passed", text: str = "") -> list[Account]:
        """Wait for all ranks at `where` and return their accounts; end the job if they do not come."""
        account = "\0".join((where, outcome, text)).encode(errors="replace")
        # The rows alone settle the common case: all came to the same place with the same outcome, silently.
        row = np.array([_fingerprint(where), _fingerprint(outcome), len(account), bool(text)], np.int64)
        rows = np.empty((self.size, row.size), np.int64)
        patience = GRACE if outcome in CUT_SHORT else PATIENCE
        self._wait(self._comm.Iallgather(row, rows), patience, where, text)
        if not rows[:, 3].any() and (rows[:, :2] == row[:2]).all():
            return [Account(outcome, "")] * self.size

        lengths = rows[:, 2]
        everything = np.empty(int(lengths.sum()), np.uint8)
        sent = np.frombuffer(account, np.uint8)
        self._comm.Allgatherv(sent, [everything, lengths.tolist()])
        parts = np.split(everything, np.cumsum(lengths)[:-1])
        told = [part.tobytes().decode(errors="replace").split("\0", 2) for part in parts]
        if len({place for place, *_ in told}) > 1:
            places = "\n".join(f"rank {rank}: {place} ({what})\n{why}" for rank, (place, what, why) in enumerate(told))
            if self.rank == 0:
                self._say(f"the ranks are at different places, ending the job\n{places}")
            self._comm.Barrier()  # the text is out before the first Abort ends rank 0
            MPI.COMM_WORLD.Abort(ABORT_STATUS)
        return [Account(outcome, text) for _, outcome, text in told]

    def close(self) -> None:
        """Leave together: some launchers end the job at the first non-zero exit, be the report out or not."""
        on_the_way_out = sys.exc_info()[0]  # an error in pytest or a plugin, which only Python would show later
        self.meet("end of the session", text=traceback.format_exc() if on_the_way_out else "")
        self._comm.Free()

    def _wait(self, request: MPI.Request, patience: float, where: str, text: str) -> None:
        started = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - started
            if waited > patience:
                reason = text or "(nothing failed on this rank)"
                self._say(f"{where}: the other ranks did not come within {patience:g} s, ending the job\n{reason}")
                MPI.COMM_WORLD.Abort(ABORT_STATUS)
            time.sleep(min(waited / 8, 5e-3))  # gives the core to the ranks that are waited for

    def _say(self, text: str) -> None:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        sys.stderr.write(f"\n=== rank {self.rank} of {self.size}: {text}\n")
        sys.stderr.flush()
        reports.finish()  # MPICH's launcher may drop what it has not read when a rank aborts


def _fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest(), "little")


class Muted(io.TextIOBase):
    """A terminal for the ranks that do not report.

    The main thread's words are dropped. Another thread's come from pytest-timeout, just before it ends this
    process, and are wanted from whichever rank says them.
    """

    def write(self, text: str) -> int:
        if threading.current_thread() is not threading.main_thread():
            sys.stderr.write(text)
        return len(text)


RANKS = pytest.StashKey[Ranks]()
FOLDER = pytest.StashKey[Path]()
STATUS = pytest.StashKey[int]()
FAILED = pytest.StashKey[bool]()
FILE = pytest.StashKey[Path]()
COLLECT_ERRORS = pytest.StashKey[list[str]]()


# ---------------------------------------------------------------------------------------------- the session


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="FOLDER",
        type=Path,
        help="run, on one rank, what no other session with this folder has taken",
    )
    parser.addoption(
        "--count-in",
        metavar="FILE",
        type=Path,
        help="add a byte to this file after each test, so that others can tell how far the session is",
    )
    parser.addoption(
        "--second-mpi",
        action="store_true",
        help="leave out, on 1 rank, what came out on another MPI: all that is not marked each_mpi",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.help or config.option.markers:
        return
    if not config.getoption("--with-mpi", default=False):
        raise pytest.UsageError(
            "pytest-mpi skips tests silently without --with-mpi. Run scripts/test, or for one process: "
            "python -m pytest --with-mpi, or for more: mpiexec -n 2 python -m pytest --with-mpi"
        )
    ranks = config.stash[RANKS] = Ranks(config)
    config.stash[COLLECT_ERRORS] = []
    # pytest's sessions tidy up one common folder, and stumble over each other when they do so at the same time.
    mine = config.option.basetemp or (tempfile.mkdtemp(prefix="mpistrategy-tests-") if ranks.rank == 0 else "")
    folder = config.stash[FOLDER] = Path(ranks.meet("choosing a folder", text=str(mine))[0].text)
    folder.mkdir(parents=True, exist_ok=True)
    config.option.basetemp = folder / f"rank{ranks.rank}"
    os.environ.setdefault("MPISTRATEGY_RUN_DIR", str(folder))  # ranks that pose as nodes tell each other things there


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.stash[RANKS].rank:
        session.config.get_terminal_writer()._file = Muted()
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False  # only turns off its page-long closing report


def pytest_report_header(config: pytest.Config) -> str:
    ranks = config.stash[RANKS]
    library = " ".join(launching.LIBRARY.replace(",", " ").split()[:3])
    return f"MPI: {library}, {ranks.size} ranks; tmp_path: {config.stash[FOLDER]} (kept after a failure)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which --second-mpi leaves out every test: their imports would take longer than the others."""
    if not config.option.second_mpi or config.stash[RANKS].size > 1 or not collection_path.name.startswith("test_"):
        return None
    return None if "each_mpi" in collection_path.read_text(encoding="utf-8") else True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.failed:
        collector.config.stash[COLLECT_ERRORS].append(f"{report.nodeid}: {report.longreprtext}")
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to start when the ranks are about to run different tests."""
    gc.freeze()
    gc.enable()
    ranks = session.config.stash[RANKS]
    mine = "\n".join(item.nodeid for item in session.items)
    errors = session.config.stash[COLLECT_ERRORS]
    accounts = ranks.meet("collection", f"{_fingerprint(mine)}, errors: {len(errors)}")
    if len({account.outcome for account in accounts}) == 1:
        return
    lists = [set(account.text.split("\n")) for account in ranks.meet("comparing", text=mine)]
    troubles = [account.text for account in ranks.meet("explaining", text="\n".join(errors))]
    lines = ["the ranks collected different tests"]
    for rank, (items, trouble) in enumerate(zip(lists, troubles, strict=True)):
        more, less = sorted(items - lists[0]), sorted(lists[0] - items)
        lines.append(f"rank {rank}: {len(items)} tests; only here, not on rank 0: {more[:3]}; missing: {less[:3]}")
        lines += [trouble] if trouble else []
    pytest.exit("\n".join(lines), returncode=ABORT_STATUS)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    accounts = session.config.stash[RANKS].meet("exit status", outcome=str(int(exitstatus)))
    session.exitstatus = session.config.stash[STATUS] = max(int(account.outcome) for account in accounts)


def pytest_unconfigure(config: pytest.Config) -> None:
    ranks = config.stash.get(RANKS, None)
    if ranks is not None:
        sys.stdout.flush()
        ranks.close()
        if ranks.rank == 0 and config.stash.get(STATUS, None) == 0:
            shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


# ---------------------------------------------------------------------------------------------- each test


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    ranks = item.config.stash[RANKS]
    outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    text = report.longreprtext if report.failed else ""
    accounts = ranks.meet(f"{report.nodeid} [{report.when}]", outcome, text)
    # Ranks that disagree without a failure (one skipped, say) would run different phases next.
    if any(a.failed for a in accounts) or len({a.outcome for a in accounts}) > 1:
        item.stash[FAILED] = True
        others = _tell(accounts, told=text)
        if report.failed:
            report.sections += [("on the ranks", others)] if ranks.size > 1 else []
        else:
            report.outcome, report.longrepr = "failed", others
            vars(report).pop("wasxfail", None)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before each file, set aside what lives: each gc.collect() would walk through thousands of tests and reports."""
    if item.path != item.session.stash.get(FILE, None):
        item.session.stash[FILE] = item.path
        gc.collect()
        gc.freeze()


def _tell(accounts: Sequence[Account], told: str | None = None) -> str:
    """Say who came to what and why; equal reasons are told once, and `told` not again."""
    groups: dict[Account, list[int]] = {}
    for rank, account in enumerate(accounts):
        groups.setdefault(account, []).append(rank)
    named = {a: f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}" for a, members in groups.items()}
    ordered = sorted(named, key=lambda account: not account.failed)
    head = "; ".join(f"{account.outcome} on {named[account]}" for account in ordered)
    reasons = [f"--- {named[account]}\n{account.text}" for account in ordered if account.text not in ("", told)]
    return "\n".join([head, *reasons])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ranks = config.stash[RANKS]
    _mark_further_jobs(items)
    if ranks.size > 1:
        _drop(config, items, _starts_jobs)
        _drop(
            config,
            items,
            lambda item: item.get_closest_marker("one_rank") is not None and item.get_closest_marker("mpi") is None,
        )
    elif config.option.second_mpi:
        _drop(config, items, lambda item: item.get_closest_marker("each_mpi") is None)
    for item in items:
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if ranks.size > 1 and handle is not None and not hasattr(handle.inner_test, "agreed"):
            handle.inner_test = _agree_on_examples(handle.inner_test, item.nodeid, ranks)


def _mark_further_jobs(items: Sequence[pytest.Item]) -> None:
    """Mark as slow all but the first case of each table of jobs: a job takes seconds."""
    begun: set[str] = set()
    for item in filter(_starts_jobs, items):
        table = item.nodeid.partition("[")[0]
        if table in begun:
            item.add_marker(pytest.mark.slow)
        begun.add(table)


def _starts_jobs(item: pytest.Item) -> bool:
    return "launch" in getattr(item, "fixturenames", ())


def _drop(config: pytest.Config, items: list[pytest.Item], which: Callable[[pytest.Item], bool]) -> None:
    dropped = {item for item in items if which(item)}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    done = yield
    if item.config.option.count_in is not None and item.config.stash[RANKS].rank == 0:
        with open(item.config.option.count_in, "ab") as file:
            file.write(b".")
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With --share, take tests until there are none left: sessions mostly wait for jobs, and several wait together."""
    folder = session.config.option.share
    if folder is None or session.config.option.collectonly or session.testsfailed:
        return None
    if session.config.stash[RANKS].size > 1:
        raise pytest.UsageError("--share is for sessions on one rank")
    for name, group in _groups(session.items):
        try:
            (folder / f"{_fingerprint(name):x}").touch(exist_ok=False)
        except FileExistsError:
            continue
        for item, following in zip(group, [*group[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def _groups(items: Sequence[pytest.Item]) -> list[tuple[str, list[pytest.Item]]]:
    """Return tests that share fixtures together, and what takes longest first."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid if _starts_jobs(item) else str(item.path), []).append(item)
    return sorted(groups.items(), key=lambda group: (-sum(map(_expected_seconds, group[1])), group[0]))


def _expected_seconds(item: pytest.Item) -> float:
    """Return about how long a test takes on one rank, as far as its kind says it."""
    if "bed" in getattr(item, "fixturenames", ()):  # a Slurm
        return 10.0
    if item.get_closest_marker("slow") is not None:
        return 4.0
    return 2.0 if _starts_jobs(item) else 0.02


def _agree_on_examples(test: Callable[..., None], name: str, ranks: Ranks) -> Callable[..., None]:
    """Make an example that fails on one rank fail on all, so that they go on to the same next example.

    Hypothesis decides by the outcome what it tries next; a rank that shrinks alone would meet the others'
    collectives with the wrong ones.
    """
    count = 0

    @functools.wraps(test)
    def example(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        __tracebackhide__ = True
        count += 1
        failure: BaseException | None = None
        try:
            test(*args, **kwargs)
        except hypothesis.errors.UnsatisfiedAssumption:
            raise  # no failure: the same on every rank, since all drew the same
        except (Exception, pytest.fail.Exception) as error:
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        accounts = ranks.meet(f"{name} example {count}", "failed" if failure else "passed", text)
        if any(account.failed for account in accounts):
            raise AssertionError(_tell(accounts)) from failure

    example.agreed = True  # type: ignore[attr-defined]
    return example


# ---------------------------------------------------------------------------------------------- for the tests


@pytest.fixture(scope="module")
def cupy() -> Iterator[ModuleType]:
    """The real CuPy, on a GPU or on the processor in the place of one; without it the test is skipped."""
    import gpu_here  # here: most tests use no GPU

    found = gpu_here.cupy_or_skip()
    yield found
    found.cuda.runtime.deviceSynchronize()


@pytest.fixture(scope="module")
def strategy() -> Iterator[mpistrategy.MirroredStrategy]:
    """One replica on every rank; a communicator is a finite resource, so that a module's tests share one."""
    with contextlib.closing(mpistrategy.MirroredStrategy()) as made:  # the tests are outside its scope
        yield made


@pytest.fixture(scope="module")
def other() -> Iterator[mpistrategy.MirroredStrategy]:
    """Another strategy of the same ranks."""
    with contextlib.closing(mpistrategy.MirroredStrategy()) as made:
        yield made


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[mpistrategy.Strategy]:
    """As many ranks as there are, every second one as if on another node; one node for one rank."""
    from replicas import RANKS, OnNodes  # here: most tests use no such strategy

    with contextlib.closing(OnNodes([rank % 2 for rank in RANKS], mpistrategy.MpiAllReduce())) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One folder for all ranks."""
    from checkpoints import shared_folder  # here: most tests write nothing

    return shared_folder(tmp_path)


@pytest.fixture(autouse=True)
def _strategy_still_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that has a `strategy`, whatever was refused or failed in it, the ranks sum as before."""
    strategy = request.getfixturevalue("strategy") if "strategy" in request.fixturenames else None
    yield
    if strategy is not None and not request.node.stash.get(FAILED, False):
        assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    """A communicator of all ranks for this test alone."""
    fresh = MPI.COMM_WORLD.Dup()
    yield fresh
    if not request.node.stash.get(FAILED, False):  # after a failure messages may be under way in it
        fresh.Free()


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., launching.Finished]:
    """Start an MPI job: ``launch(n, what, timeout=60, env=None)``.

    `what` is a program's source (str), its file (Path), or a list of arguments for python. It runs in the
    test's own folder: a report that another job leaves elsewhere is nothing to it. Only in the session on
    one rank: others would each start one.
    """
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("starts MPI jobs of its own: runs in the session on 1 rank")

    def start(ranks: int, what: str | Path | Sequence[str | Path], **options: Any) -> launching.Finished:
        if isinstance(what, str):
            what = launching.program(what, tmp_path)
        options.setdefault("cwd", tmp_path)
        return launching.launch(ranks, [what] if isinstance(what, Path) else what, **options)

    return start
