"""`mpistrategy trace`: merges the recordings of all ranks on one clock, for a viewer, and prints a summary."""

from __future__ import annotations

import argparse
import os

from mpistrategy.objects.text import printable
from mpistrategy.telemetry.tracing.plot import draw
from mpistrategy.telemetry.tracing.report import report
from mpistrategy.telemetry.tracing.timeline import refusal, timeline_of

_NAME = "trace.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy trace`."""
    parser.add_argument(
        "folder", metavar="DIR", help="the folder that MPISTRATEGY_TRACE, or telemetry.trace, was given"
    )
    parser.add_argument("-o", dest="output", metavar="FILE", help=f"what to write (default: DIR/{_NAME})")
    parser.add_argument("--png", metavar="FILE", help="draw a picture, too; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Put a trace together; return the exit status."""
    output = options.output or os.path.join(options.folder, _NAME)
    timeline = timeline_of(options.folder)
    try:
        timeline.write(output)
        if options.png:
            draw(timeline, options.png)
    except OSError as error:
        raise refusal(str(error), "files that can be written") from error
    for line in report(timeline):
        print(printable(line))  # whoever has made the program up
    print(f"{output}: open it in https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing")
    if options.png:
        print(f"{options.png}: a picture of it")
    return 0
