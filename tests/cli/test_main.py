"""The command line: what it takes, and what it says about what it does not take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import mpistrategy
from mpistrategy.cli import main

pytestmark = pytest.mark.one_rank  # argparse calls sys.exit, which ends a job of several ranks


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--version"], f"mpistrategy {mpistrategy.__version__}\n"),
        *(([name, "--help"], summary) for name, (summary, _) in main.COMMANDS.items()),
    ],
)
def test_version_and_help(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    assert caught.value.code == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "COMMAND"),
        (["bensh"], "invalid choice: 'bensh' (choose from"),
        (["bench", "--lists", "resnet51"], "invalid choice: 'resnet51' (choose from"),
        (["bench", "--sizes", "4KiB"], "invalid size value: '4KiB'"),
        (["bench", "--sizes", "6"], "'6' is not a size"),
        (["bench", "--sizes", "0"], "'0' is not a size"),
        (["doctor", "--timeout", "-1"], "invalid positive value: '-1'"),
        (["bench", "--json", "no such folder/x.json"], "'no such folder/x.json' cannot be written"),
        (["bench", "--json", "/"], "'/' cannot be written"),
        (["bench", "--quik"], "unrecognized arguments: --quik"),
        (["run"], "name one program"),
        (["run", "--chek", "all", "who.py"], "unrecognized arguments: --chek"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    assert caught.value.code == 2
    assert what in capsys.readouterr().err


def test_a_reader_that_has_seen_enough() -> None:
    """As `mpistrategy slurm multi_node | head -1`: no traceback, and the status that a shell makes of SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mpistrategy", "slurm", "multi_node"]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
