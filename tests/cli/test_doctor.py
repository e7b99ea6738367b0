"""The doctor's checks, with faults planted in what the ranks know of themselves: each is named, with its cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpistrategy.cli.doctor import checks, facts
from mpistrategy.cli.doctor.findings import BAD, NOTE, OK, VERDICTS, Facts, Job, as_json, as_text, worst
from mpistrategy.mpi.gpu.cuda_aware import Outcome
from mpistrategy.mpi.gpu.device_selection import Gpu, Sight

pytestmark = pytest.mark.one_rank

MIB = 2**20
SRUN = {"launcher": "srun", "tasks": 4, "said": "SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=0"}


def rank(number: int, **others: Any) -> Facts:
    """One of four well ranks, two on each of two nodes."""
    node = number // 2
    well = {
        "rank": number,
        "size": 4,
        "host": f"node{node + 1}",
        "python": "3.11.7",
        "mpistrategy": "0.1.0",
        "numpy": "2.4.6",
        "mpi4py": "4.1.2",
        "library": "MPICH 5.0.2",
        "libraries": ("/opt/mpich/lib/libmpi.so.12",),
        "launcher": "srun",
        "tasks": 4,
        "place": number,
        "said": f"SLURM_STEP_NUM_TASKS=4, SLURM_PROCID={number}",
        "pmi": ("PMI",),
        "leader": 2 * node,
        "cores": (2 * (number % 2), 2 * (number % 2) + 1),
        "machine_cores": 4,
        "threads": 2,
        "threads_source": "OMP_NUM_THREADS=2",
        "room_free": 4000 * MIB,
        "room_of": "the node's memory, 4096.0 MiB",
        "sight": Sight(host=f"node{node + 1}", reason="CuPy is not installed", fix="pip install it").text(),
        "network": "verbs",
    }
    return facts.UNKNOWN | well | others


def job(change: Callable[[Facts], Facts] = lambda facts_of_rank: facts_of_rank, ranks: int = 4, **others: Any) -> Job:
    """A job, and what is wrong with it."""
    well: dict[str, Any] = {"wanted_ranks": ranks, "sums_right": True}
    return Job([change(rank(number)) for number in range(ranks)], **{**well, **others})


def on(numbers: set[int], **others: Any) -> Callable[[Facts], Facts]:
    """Plant a fault on some ranks."""
    return lambda each: each | others if each["rank"] in numbers else each


def seeing(*gpus_of_rank: tuple[Gpu, ...], **others: Any) -> Callable[[Facts], Facts]:
    """Let the ranks see GPUs."""

    def change(each: Facts) -> Facts:
        return each | {"sight": Sight(gpus_of_rank[each["rank"]], host=each["host"]).text()} | others

    return change


def gpus_of(node: int, *numbers: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(f"GPU-{node}{number}") for number in numbers)


ALL = {0, 1, 2, 3}
BOTH = (gpus_of(1, 0, 1), gpus_of(1, 0, 1), gpus_of(2, 0, 1), gpus_of(2, 0, 1))
OWN = (gpus_of(1, 0), gpus_of(1, 1), gpus_of(2, 0), gpus_of(2, 1))
SINGLE = {
    "size": 1,
    "refusal": ("an MPI that takes this process for the only one", "Start it with `srun --mpi=pmi2`"),
    "pmi": (),
}

#: The fault; the check that finds it; the verdict; words of what it says; words of the cure; the ranks that it names.
FAULTS: dict[str, tuple[Job, str, str, list[str], str, set[int]]] = {
    "N singletons, since the launcher's PMI is none": (
        job(on(ALL, **SINGLE), 1), "launch", BAD,
        ["4 programs of one rank each", "it offers no PMI, and MPICH 5.0.2 speaks PMI"],
        "`srun --mpi=pmi2` For all steps: export SLURM_MPI_TYPE", set(),
    ),
    "the wrong PMI": (
        job(on(ALL, **SINGLE | {"pmi": ("PMI",), "library": "Open MPI v5.0.11"}), 1),
        "launch", BAD, ["it offers PMI, and Open MPI v5.0.11 speaks PMIx"], "srun --mpi=list", set(),
    ),
    "a rank that does not answer": (
        job(missing=[3], patience=48), "launch", BAD, ["no answer from rank 3 of 4 within 48 s"], "hostname", {3},
    ),
    "fewer ranks than wanted": (
        job(wanted_ranks=8), "launch", BAD, ["4 ranks where 8 were asked for"], "--ntasks=8", set(),
    ),
    "fewer ranks of Flux than wanted": (
        job(on(ALL, launcher="flux run"), wanted_ranks=8), "launch", BAD, ["where 8"], "Start 8: flux run -n 8", set(),
    ),
    "unequal mpistrategy": (
        job(on({2}, mpistrategy="0.0.9")), "versions", BAD,
        ["different versions of mpistrategy", "0.1.0 on ranks 0, 1, 3; 0.0.9 on rank 2", "node2"], "PYTHONPATH", {2},
    ),
    "unequal numpy": (
        job(on({2, 3}, numpy="1.26.4")), "versions", BAD, ["numpy: 2.4.6 on ranks 0, 1; 1.26.4 on ranks 2, 3"],
        "one environment", ALL,
    ),
    "unequal MPI": (
        job(on({1}, library="MPICH 4.3.0")), "versions", BAD, ["the MPI library", "MPICH 4.3.0 on rank 1"],
        "one environment", {1},
    ),
    "two MPIs mixed": (
        job(on({1}, libraries=("/opt/mpich/lib/libmpi.so.12", "/opt/openmpi/lib/libmpi.so.40"))), "mpi", BAD,
        ["two MPIs in one process on rank 1", "/opt/openmpi/lib/libmpi.so.40"], "LD_DEBUG=libs", {1},
    ),
    "no thread level": (
        job(on(ALL, thread_level="single")), "thread level", BAD, ["single", "against the rules"],
        "MPI4PY_RC_THREAD_LEVEL", set(),
    ),
    "a lower thread level": (
        job(on(ALL, thread_level="serialized")), "thread level", NOTE, ["serialized"], "MPI4PY_RC_THREAD_LEVEL", set(),
    ),
    "unequal thread levels": (
        job(on({2}, thread_level="funneled")), "thread level", BAD, ["funneled on rank 2"], "for all ranks alike", {2},
    ),
    "TCP beside InfiniBand": (
        job(on(ALL, network="TCP", fabric="InfiniBand")),
        "network", BAD, ["MPICH 5.0.2 talks by TCP, beside InfiniBand"],
        "OMPI_MCA_btl, ...). The cluster's own MPI", set(),
    ),
    "an Open MPI without room in /dev/shm": (
        job(on(ALL, library="Open MPI v5.0.11", network="verbs", shm_free=8 * MIB)),
        "shared memory", BAD, ["8 MiB are free in /dev/shm on node1", "16 MiB for each rank"], "--shm-size", {0, 1},
    ),
    "ranks of a host that share no memory": (
        job(on({1}, leader=1)), "nodes", BAD,
        ["rank 0 and rank 1 are all on node1, but share no memory"], "--ipc=host", {0, 1},
    ),
    "too many threads": (
        job(on(ALL, threads=64, threads_source="no OMP_NUM_THREADS is set")), "cores", BAD,
        ["128 threads", "4 cores on node1: 2 ranks", "no OMP_NUM_THREADS is set"], "export OMP_NUM_THREADS=2", {0, 1},
    ),
    "all ranks on one core": (
        job(on(ALL, cores=(0,), threads=1)), "cores", BAD, ["2 ranks share 1 core on node1, which has 4"],
        "--cpu-bind=cores", {0, 1},
    ),
    "more ranks than cores": (
        job(on(ALL, cores=(0,), threads=1, machine_cores=1)), "cores", NOTE, ["take turns"], "at most 1 ranks", {0, 1},
    ),
    "too little memory": (
        job(on({2, 3}, room_free=17 * MIB)), "shared memory", NOTE,
        ["17 MiB are free (the node's memory, 4096.0 MiB) on node2; the strategies of 2 ranks share ", "no room"],
        "--mem", {2, 3},
    ),
    "hidden GPUs": (
        job(on(ALL, gpu_devices=4, gpus_promised=4, visible="")), "gpus", BAD,
        ["Slurm gave the job 4 on node1", "ranks 0-3 see none", "CUDA_VISIBLE_DEVICES='' hides them"],
        "unset CUDA_VISIBLE_DEVICES", ALL,
    ),
    "GPUs and no CuPy": (
        job(on(ALL, gpu_devices=4)), "gpus", NOTE, ["4 GPUs are on node1", "CuPy is not installed"], "pip install", ALL,
    ),
    "two ranks on one GPU": (
        job(seeing(gpus_of(1, 0), gpus_of(1, 0), gpus_of(2, 0), gpus_of(2, 0))), "gpus", BAD,
        ["ranks 0, 1 on node1 with 1 GPU between them: GPU-10"], "srun --gpus-per-task=1", set(),
    ),
    "each rank sees its own GPU only": (
        job(seeing(*OWN)), "gpus", NOTE, ["see only their own"], "--gpus-per-node=N", {0, 1},
    ),
    "CUDA-aware, but the numbers are wrong": (
        job(seeing(*BOTH), trial=Outcome("wrong", "other numbers than were sent")), "cuda-aware", BAD,
        ["came back wrong: other numbers than were sent"], "MPISTRATEGY_CUDA_AWARE=0", set(),
    ),
    "CUDA-aware, and nobody could try": (
        job(seeing(*BOTH), trial=Outcome("unverified", "no mpiexec is here")), "cuda-aware", NOTE,
        ["not tried", "no mpiexec is here"], "MPISTRATEGY_CUDA_AWARE", set(),
    ),
    "not CUDA-aware": (
        job(seeing(*BOTH, cuda_refused="MPICH 5.0.2 does not say so")), "cuda-aware", NOTE,
        ["without NCCL arrays travel through the host (staged)"], "module", set(),
    ),
    "wrong sums": (job(sums_right=False), "sums", BAD, ["came out wrong"], "another MPI", set()),
    "leftovers": (
        job(on({0, 1}, leftovers="2 files of MPI")), "leftovers", NOTE,
        ["2 files of MPI on node1", "does not start"], "mpistrategy doctor --remove-leftovers", {0, 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_cure(fault: str) -> None:
    planted, check, verdict, words, cure, ranks = FAULTS[fault]
    findings = [each for each in checks.examine(planted) if each.check == check]
    found = next((each for each in findings if each.verdict == verdict), None)
    assert found is not None, findings
    assert [word for word in words if word not in found.found] == [], found
    assert cure in found.fix, found
    assert set(found.ranks) == ranks, found
    assert "\n" not in found.found + found.fix
    related = {"versions": "mpi", "mpi": "versions"}
    bad = {each.check for each in checks.examine(planted) if each.verdict == BAD}
    assert bad <= {check, related.get(check, check)}, "nothing else is bad"


WELL: dict[str, Job] = {
    "one rank": job(on(ALL, size=1, tasks=1), 1),
    "two ranks": job(on(ALL, size=2, tasks=2), 2),
    "three ranks": job(on(ALL, size=3, tasks=3), 3),
    "four ranks": job(),
    "GPUs of AMD": job(on(ALL, amd=True, gpus_promised=8)),
}


@pytest.mark.parametrize("what", WELL)
def test_a_job_that_is_well(what: str) -> None:
    findings = checks.examine(WELL[what])
    assert worst(findings) == OK, findings
    assert len({each.check for each in findings}) == 11
    assert as_text(WELL[what], findings).splitlines()[-1] == "Nothing is bad."


def test_gpus_that_are_well() -> None:
    findings = checks.examine(job(seeing(*BOTH), trial=Outcome("right", "two ranks, 20 GB/s")))
    told = {each.check: each for each in findings}
    assert told["gpus"].found.startswith("rank 0 drives GPU:0 (GPU-10), rank 1 drives GPU:1 (GPU-11)")
    assert told["cuda-aware"].verdict == told["gpus"].verdict == OK
    assert told["cuda-aware"].found.endswith("without NCCL arrays travel by MPI (mpi)")
    slower = checks.examine(job(seeing(*BOTH), trial=Outcome("slower", "two ranks")))
    assert any("through the host (staged)" in each.found for each in slower if each.check == "cuda-aware")


# ------------------------------------------------------------------------------------------------ the report


def test_the_report_has_a_line_for_each_finding_and_the_cure_below() -> None:
    planted = job(on({2}, mpistrategy="0.0.9"))
    lines = as_text(planted, checks.examine(planted)).splitlines()
    assert lines[0] == "mpistrategy doctor: 4 ranks on 2 nodes"
    at = next(number for number, line in enumerate(lines) if line.startswith("BAD "))
    assert lines[at].startswith("BAD   versions")
    assert lines[at + 1].strip().startswith("-> Give all nodes one environment")
    assert lines[-1] == "1 BAD. Fix what is BAD first."
    shown = json.loads(as_json(planted, checks.examine(planted)))
    for key in shown:
        assert f"``{key}``" in (as_json.__doc__ or ""), key
    assert (shown["format"], shown["verdict"], shown["ranks"], shown["nodes"]) == (1, "bad", 4, 2)
    assert {each["verdict"] for each in shown["findings"]} <= set(VERDICTS)
    assert [each["mpistrategy"] for each in shown["facts"]] == ["0.1.0", "0.1.0", "0.0.9", "0.1.0"]


# ------------------------------------------------------------------------------------------------ what is gathered


def test_variables_say_what_a_launcher_offers_and_how_many_threads_there_are() -> None:
    assert facts.offered({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}) == ()
    assert facts.offered({"PMI_RANK": "0", "PMI_FD": "7", "PMI_SIZE": "2", "PMI_JOBID": "17.0"}) == ("PMI",)
    assert facts.offered({"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.17.0", "HOME": "/"}) == ("PMIx",)
    assert facts.blas_threads({}, 6) == (6, "no OMP_NUM_THREADS is set")
    assert facts.blas_threads({"OMP_NUM_THREADS": "2,1", "MKL_NUM_THREADS": "3"}, 6) == (3, "MKL_NUM_THREADS=3")
    assert facts.blas_threads({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "3"}, 6) == (4, "OMP_NUM_THREADS=4")


@pytest.mark.parametrize(
    ("opened", "kind"),
    [
        (["/dev/null", "socket:[17]"], "TCP"),
        (["socket:[17]", "/dev/infiniband/uverbs0"], "verbs"),
        (["/dev/cxi0", "/dev/infiniband/uverbs0"], "Slingshot"),
        (["/dev/hfi1_0"], "Omni-Path"),
    ],
)
def test_the_network_is_what_the_process_has_open(opened: list[str], kind: str, tmp_path: Path) -> None:
    for number, path in enumerate(opened):
        (tmp_path / str(number)).symlink_to(path)
    assert facts.network(str(tmp_path)) == kind
    assert facts.network(str(tmp_path / "missing")) == ""


def test_fabrics_are_seen(tmp_path: Path) -> None:
    assert facts.fabric(str(tmp_path)) == ""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    assert facts.fabric(str(tmp_path)) == "RoCE"
    (port / "link_layer").write_text("InfiniBand\n")
    assert facts.fabric(str(tmp_path)) == "InfiniBand"
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    (tmp_path / "infiniband" / "rdmap0" / "device").mkdir(parents=True)
    (tmp_path / "infiniband" / "rdmap0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    assert facts.fabric(str(tmp_path)) == "EFA"
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert facts.fabric(str(tmp_path)) == "Slingshot"
