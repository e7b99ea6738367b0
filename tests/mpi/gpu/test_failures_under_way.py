"""What becomes of a job where a rank fails while work is queued on the GPUs: the outcome, and how soon, on every path.

| on one rank | outcome | seconds, at most |
|---|---|---|
| SIGKILL | the launcher ends the job | 10 |
| SIGSTOP | the watchdog ends the job with a roll call | the timeout, and 10 |
| another call | CollectiveMismatchError on all ranks | 10 |
| an error of CUDA after the ranks have agreed | the job ends, and the report names the error | 5 |
"""

from __future__ import annotations

import time
from typing import Any

import gpu_here
import pytest
from replicas import ALL

TIMEOUT = 4
PROGRAM = """
import os, signal, sys, time
os.environ["MPISTRATEGY_CUDA_AWARE"], os.environ["MPISTRATEGY_GPU_PATH"] = "1", {path!r}
import cupy, numpy as np
import mpistrategy as ms
from mpistrategy.mpi.interface.gpu_transport import chosen_path

def at_once(value):
    return ms.get_replica_context().all_reduce("SUM", value)

def under_way(value):
    return ms.get_replica_context().all_reduce_async("SUM", value, out=value)

def fails(*args, **more):
    raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

def failing(path):
    kind = type(path)
    kind.reduce = fails

options = ms.CommunicationOptions(timeout_seconds={timeout})
devices = "gpu" if {path!r} == "nccl" else "shared"
strategy = ms.MirroredStrategy(devices, communication_options=options)
rank = strategy.extended.communicator.rank
value = cupy.asarray(np.ones(1000))
with strategy.expect_long(60):  # kernels are compiled
    strategy.run(at_once, args=(value,))
    strategy.run(under_way, args=(value,)).wait().get()
    strategy.reduce("SUM", 1.0)
fault, is_late = {fault!r}, {is_late!r}
cupy.cuda.get_current_stream().launch_host_func(time.sleep, 0.5)
value[...] = 2.0
print("FAULT", time.time(), flush=True)
if fault == "CUDA" and rank == 1:
    failing(chosen_path(strategy.extended.communicator))
if fault == "call" and rank == 1:
    value = cupy.asarray(np.ones(999))
if fault in ("SIGKILL", "SIGSTOP") and rank == 1 and not is_late:
    os.kill(os.getpid(), getattr(signal, fault))
if is_late:
    handle = strategy.run(under_way, args=(value,))
    if fault in ("SIGKILL", "SIGSTOP") and rank == 1:
        os.kill(os.getpid(), getattr(signal, fault))
    result = handle.wait()
else:
    result = strategy.run(at_once, args=(value,))
print("found", result.get()[:2], flush=True)
strategy.reduce("SUM", 1.0)
print("went on", flush=True)
"""
#: What stands in the output, and within how many seconds the job is over.
OUTCOMES = {
    "SIGKILL": ("", 10),
    "SIGSTOP": ("roll call", TIMEOUT + 10),
    "call": ("CollectiveMismatchError", 10),
    "CUDA": ("cudaErrorIllegalAddress", 5),
}


#: The short lane makes each fault on each path once.
CASES = [
    (path, fault, is_late)
    for path in gpu_here.PATHS
    for fault in OUTCOMES
    for is_late in (False, True)
    if ALL or gpu_here.IS_GPU or is_late == (path != "mpi")
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "fault", "is_late"), CASES)
def test_no_rank_waits_for_ever(launch: Any, path: str, fault: str, is_late: bool) -> None:
    job = launch(2, PROGRAM.format(path=path, fault=fault, is_late=is_late, timeout=TIMEOUT), timeout=60)
    ended = time.time()
    begun = max(float(line.split()[-1]) for line in job.stdout.splitlines() if "FAULT" in line)
    word, seconds = OUTCOMES[fault]
    print(f"{path}, {fault}, {'all_reduce_async' if is_late else 'all_reduce'}: {ended - begun:.1f} s")
    assert job.returncode
    assert "went on" not in job.stdout
    assert word in job.stdout + job.stderr, job.stderr[-3000:]
    assert ended - begun < seconds
