"""Before a program: whether MPI takes GPU memory is tried once for each library, setting and kind of job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import glob
from importlib.util import find_spec

#: How long each of the two trials may take.
_SECONDS = 20.0


def try_once(rank: int, hosts: Sequence[str]) -> None:
    """Try it on the first rank, if there is a GPU and nobody has tried it here; never raises for what it finds.

    The other ranks go on, and wait for the first one where they first need it.

    Args:
        rank: this rank's number.
        hosts: the node of each rank.
    """
    if rank or len(hosts) < 2 or not glob("/dev/nvidia[0-9]*") or find_spec("cupy") is None:
        return
    from mpistrategy.mpi.gpu import cuda_aware, cuda_trials, loaded_mpi

    evidence, word = loaded_mpi.evidence(), cuda_aware.said()
    if word is not None or cuda_aware.decide(evidence, word).verdict == cuda_aware.NO:
        return
    if cuda_trials.load(evidence.version, "several nodes" if len(set(hosts)) > 1 else "one node") is not None:
        return
    from mpistrategy.cli.doctor.facts import cuda_trial

    cuda_trial.try_all(evidence.version, hosts, os.environ, _SECONDS)
