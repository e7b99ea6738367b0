"""The environment variables that this package reads, and a warning for similar names that nothing reads."""

from __future__ import annotations

import os

from mpistrategy.errors import OptionWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.objects.shown import did_you_mean

_PREFIX = "MPISTRATEGY_"
#: The names without the prefix.  `mpistrategy guide environment` says what each variable sets.
NAMES = (
    *("ALONE", "CHECK", "CUDA_AWARE", "FULL_TRACEBACK", "GPU_MAP", "GPU_PATH", "INJECT", "NVTX", "PATHS", "RUN_DIR"),
    *("TIMEOUT_SECONDS", "TRACE"),
)


def warn_of_unknown() -> None:
    """Warn of variables that only look like variables of this package, but for those of the tests."""
    for name in sorted(os.environ):
        short = name.removeprefix(_PREFIX)
        if short != name and short not in NAMES and not short.startswith(("TEST_", "GPU_LANE")):
            advice = did_you_mean(short, NAMES) or f"There are {', '.join(NAMES)}."
            warn(f"nothing reads the variable {name} of the environment.  After {_PREFIX}: {advice}", OptionWarning)
