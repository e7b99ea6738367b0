"""The environment variables that this package reads, and a warning for similar names that nothing reads."""

from __future__ import annotations

import os

from mpistrategy.errors import OptionWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.objects.nearest import did_you_mean

_PREFIX = "MPISTRATEGY_"
#: What each variable sets.  The guide has the same table, with the arguments and the options of `run` that win.
VARIABLES = {
    "MPISTRATEGY_ALONE": "one replica is meant, although a launcher started several ranks",
    "MPISTRATEGY_CHECK": "how often calls are compared between nodes",
    "MPISTRATEGY_CUDA_AWARE": "whether the MPI takes pointers to GPU memory",
    "MPISTRATEGY_FULL_TRACEBACK": "whether tracebacks show frames of this package",
    "MPISTRATEGY_GPU_MAP": "which GPUs slurm/select_gpu.sh gives to the ranks of a node",
    "MPISTRATEGY_GPU_PATH": "how arrays in GPU memory travel",
    "MPISTRATEGY_INJECT": "faults to inject",
    "MPISTRATEGY_NVTX": "whether ranges are made for NVIDIA's profilers",
    "MPISTRATEGY_PATHS": "the file of thresholds",
    "MPISTRATEGY_RUN_DIR": "the folder of run directories",
    "MPISTRATEGY_TIMEOUT_SECONDS": "how long a collective may take",
    "MPISTRATEGY_TRACE": "the folder of a recording",
}
#: How similar a name must be to be suggested: all names share the prefix.
_ALIKE = 0.9
#: Variables of the tests begin so.
_TESTS = ("MPISTRATEGY_TEST_", "MPISTRATEGY_GPU_LANE")

_warned: set[str] = set()


def warn_of_unknown() -> None:
    """Warn, once for each process and name, of variables that only look like variables of this package."""
    unknown = {name for name in os.environ if name.startswith(_PREFIX) and not name.startswith(_TESTS)}
    for name in sorted(unknown - VARIABLES.keys() - _warned):
        _warned.add(name)
        advice = did_you_mean(name, VARIABLES, _ALIKE) or f"There are {', '.join(VARIABLES)}."
        warn(f"nothing reads the variable {name} of the environment.  {advice}", OptionWarning)
