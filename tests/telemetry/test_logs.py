"""Log lines of many ranks: who speaks, in front of every line who it is, and no line is torn."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import launching
import pytest
from replicas import RANK, SIZE, outcomes

import mpistrategy as ms
from mpistrategy.testing import run_replicas

PREFIX = f"[rank {RANK}/{SIZE}] " if SIZE > 1 else ""


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger of the test's own, which is as new afterwards."""
    made = logging.getLogger("mpistrategy.tests.log")
    made.propagate = False
    yield made
    made.handlers.clear()
    made.setLevel(logging.NOTSET)


def said(logger: logging.Logger, **options: object) -> str:
    """Return what this rank says of one record of each level from DEBUG to ERROR, and of two for certain ranks."""
    stream = io.StringIO()
    ms.telemetry.setup_logging(**{"logger": logger, "format": "%(message)s", "stream": stream, **options})  # type: ignore[arg-type]
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)(level)
    logger.info("all", extra=ms.telemetry.ALL_RANKS if options else {"ranks": "ALL"})
    logger.info("last", extra={"ranks": [SIZE - 1]})
    return "".join(f"{line.removeprefix(PREFIX)} " for line in stream.getvalue().splitlines()).strip()


LAST = "last" if RANK == SIZE - 1 else ""
CASES = {
    "by default rank 0": ({}, ["info warning error all", "error all", "error all"]),
    "all": ({"ranks": "all"}, ["info warning error all"] * 3),
    "several": ({"ranks": [1, 2, 3], "others": None}, ["all", "info warning error all", "info warning error all"]),
    "another": ({"ranks": 1}, ["error all", "info warning error all", "error all"]),
    "others warn": ({"others": "WARNING"}, ["info warning error all", "warning error all", "warning error all"]),
    "a higher level": ({"level": "WARNING"}, ["warning error", "error", "error"]),
}


@pytest.mark.parametrize("case", CASES)
def test_who_logs_what(strategy: ms.Strategy, logger: logging.Logger, case: str) -> None:
    options, expected = CASES[case]
    last = LAST if case != "a higher level" else ""
    assert said(logger, **options) == f"{expected[min(RANK, 2)]} {last}".strip()


def test_the_same_on_simulated_replicas(logger: logging.Logger) -> None:
    stream = io.StringIO()
    ms.telemetry.setup_logging(logger=logger, ranks="all", stream=stream, format="%(rank)d of %(size)d: %(message)s")
    logger.info("here")  # a format that says the rank itself
    ms.telemetry.setup_logging(logger=logger, ranks="all", stream=stream)
    run_replicas(lambda: logger.warning("one\ntwo"), 2)
    time_and_name = r"\d\d:\d\d:\d\d WARNING mpistrategy.tests.log:"
    expected = "".join(rf"\[rank {rank}/2\] {time_and_name} one\n\[rank {rank}/2\] two\n" for rank in (0, 1))
    assert re.fullmatch(f"{RANK} of {SIZE}: here\n{expected}", stream.getvalue())


def test_a_second_call_replaces_the_first_and_leaves_others(logger: logging.Logger) -> None:
    other = logging.NullHandler()
    logger.addHandler(other)
    ms.telemetry.setup_logging(logger=logger)
    second = ms.telemetry.setup_logging("DEBUG", logger=logger)
    handlers = [each for each in logger.handlers if "Capture" not in type(each).__name__]  # pytest's own
    assert handlers == [other, second]
    assert logger.level == logging.DEBUG
    third = ms.telemetry.setup_logging(logger=logger, force=True)
    assert logger.handlers == [third]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"level": "LOUD"}, ms.errors.OptionError),
        ({"level": 1.5}, ms.errors.OptionTypeError),
        ({"ranks": "none"}, ms.errors.OptionError),
        ({"ranks": [-1]}, ms.errors.OptionError),
        ({"ranks": None}, ms.errors.OptionError),
    ],
)
def test_what_is_refused(options: dict[str, object], error: type[Exception]) -> None:
    assert {each.error for each in outcomes(lambda: ms.telemetry.setup_logging(**options))} == {error}  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a", "\n".join(f"{n}" * 600 for n in range(7))])
def test_long_records_are_cut_between_lines(logger: logging.Logger, text: str) -> None:
    written: list[str] = []

    stream: Any = SimpleNamespace(write=written.append, flush=lambda: None)
    ms.telemetry.setup_logging(logger=logger, ranks="all", format="%(message)s", stream=stream)
    logger.info(text)
    assert "".join(written) == "".join(f"{PREFIX}{line}\n" for line in text.split("\n"))
    assert all(part.endswith("\n") and len(part) <= 4096 for part in written if part)  # tqdm writes its end, too


PROGRAM = """
import logging, sys
import mpistrategy as ms
ms.telemetry.setup_logging(ranks="all", format="%(message)s")
log = logging.getLogger("program")
log.info("before")
assert "mpi4py.MPI" not in sys.modules
strategy = ms.MirroredStrategy()
for number in range(400):
    log.info("%s", f"<{number} " + "x" * 200 + ">")
strategy.close()
log.info("after")
"""


@pytest.mark.each_mpi
@pytest.mark.slow
def test_lines_of_a_job_are_whole_before_and_after_the_strategy(launch: Callable[..., launching.Finished]) -> None:
    job = launch(3, PROGRAM).check()
    lines = [line for line in job.stderr.splitlines() if line]
    for rank in range(3):
        mine = [line.removeprefix(f"[rank {rank}/3] ") for line in lines if line.startswith(f"[rank {rank}/3] ")]
        assert mine[0] == "before"
        assert mine[-1] == "after"
        assert mine[1:-1] == [f"<{number} {'x' * 200}>" for number in range(400)]
    assert len(lines) == 3 * 402
