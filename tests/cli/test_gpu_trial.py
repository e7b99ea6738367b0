"""Whether MPI takes GPU memory: tried by two ranks of a job of their own, which any launcher starts."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from mpistrategy.cli.doctor.facts import cuda_trial, fabric, trial_launch
from mpistrategy.cli.doctor.facts.trial_launch import Start
from mpistrategy.mpi.gpu import cuda_trials
from mpistrategy.mpi.gpu.cuda_aware import NO, YES, Answer

pytestmark = pytest.mark.one_rank


def child(program: str) -> Start:
    return Start((sys.executable, "-c", f"print('STARTED', flush=True); {program}"), os.environ)


RIGHT = 'print(\'{"right": true, "nbytes": 8000000, "direct": 0.001, "staged": 0.004}\', flush=True)'
BY_NCCL = RIGHT.replace("0.004", '0.004, "nccl": 0.0005').replace(
    "print(", "print('x NCCL INFO Using network {}'); print("
)


@pytest.mark.parametrize(
    ("started", "outcome", "reason"),
    [
        (child(RIGHT), "right", "two ranks, 8.0 GB/s; 2.0 GB/s staged through the host"),
        (child(BY_NCCL.replace("{}", "Socket")), "right", "host; 16.0 GB/s by NCCL over sockets"),
        (child(BY_NCCL.replace("{}", "IB")), "right", "16.0 GB/s by NCCL over InfiniBand"),
        (child(BY_NCCL.replace("{}", "AWS Libfabric")), "right", "16.0 GB/s by NCCL over AWS Libfabric"),
        (child(f"{RIGHT}; import time; time.sleep(60)"), "right", "two ranks, 8.0 GB/s"),
        (child(RIGHT.replace("true", "false")), "wrong", "other numbers"),
        (child(f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"), "died", "SIGSEGV"),
        (child("raise SystemExit(139)"), "died", "SIGSEGV"),
        (child("raise SystemExit(3)"), "died", "status 3"),
        (child("import a_cupy_that_is_not_there"), "unverified", "ModuleNotFoundError"),
        (child("import time; time.sleep(60)"), "died", "did not end within 1 s"),
        (Start(("sleep", "60"), os.environ), "unverified", "did not start within 1 s"),
        (Start(("sh", "-c", "echo no nodes are free >&2; exit 1"), os.environ), "unverified", "no nodes are free"),
        (Start(("/no/such/mpiexec",), os.environ), "unverified", "cannot be started"),
        (None, "unverified", "no mpiexec, srun, flux or jsrun"),
    ],
)
def test_what_comes_of_a_trial(started: Start | None, outcome: str, reason: str) -> None:
    trial = cuda_trial.attempt(started, 1 if "sleep" in str(started) else 20)
    assert trial.outcome == outcome, trial
    assert reason in trial.reason


def test_a_trial_does_not_inherit_the_launcher() -> None:
    launchers = {"PMI_RANK", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"}
    own = {"PATH", "UCX_TLS", "OPAL_PREFIX", "OMPI_MCA_pml", "OMPI_MCA_coll_hcoll_enable", "OMPI_ALLOW_RUN_AS_ROOT"}
    kept = trial_launch.without_launcher(dict.fromkeys(launchers | own, "1"))
    assert own <= set(kept)
    assert not launchers & set(kept)


@pytest.mark.parametrize(
    ("environment", "there", "one_node", "several"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "srun mpiexec", "srun --overlap --nodes=1", "srun .*--nodes=2"),
        ({"SLURM_JOB_ID": "7"}, "srun", "srun --overlap --nodes=1", "srun .*--nodes=2 --ntasks=2 --ntasks-per-node=1"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "HYDI_CONTROL_FD": "3"},
            "srun mpiexec",
            "mpiexec -n 2",
            "-hosts a,b",
        ),
        ({"SLURM_JOB_ID": "7"}, "srun mpiexec", "mpiexec -n 2", "mpiexec -n 2 -hosts a,b -ppn 1"),
        ({"FLUX_TASK_RANK": "0", "FLUX_URI": "u"}, "flux mpiexec", "flux run -N1 -n2", "flux run -N2 -n2"),
        ({"JSM_NAMESPACE_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}, "jsrun mpiexec", "jsrun -n1 -a2", "jsrun -n2 -r1"),
        ({"LSB_JOBID": "9"}, "jsrun", "jsrun -n1 -a2", "jsrun -n2 -r1"),
        ({}, "mpiexec srun", "mpiexec -n 2", "mpiexec -n 2 -hosts a,b"),
    ],
)
def test_a_trial_is_started_by_every_launcher(
    environment: dict[str, str], there: str, one_node: str, several: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_launch.sys, "executable", "/no/such/bin/python")  # type: ignore[attr-defined]
    which = lambda name: name if name in there.split() else None  # noqa: E731
    for place, expected in (("one node", one_node), ("several nodes", several)):
        started = trial_launch.start(place, environment, (), ["a", "a", "b"], which)  # type: ignore[arg-type]
        assert started is not None
        assert re.search(expected, " ".join(started.command))
        assert started.command[-1] == "mpistrategy.cli.doctor.facts.cuda_child"
        assert "SLURM_STEP_ID" not in started.environment
        assert ("SLURM_JOB_ID" in started.environment) == (
            "srun" in started.command or "-hosts" in started.command
        ) or ("SLURM_JOB_ID" not in environment)


def test_a_trial_on_several_nodes_needs_their_names() -> None:
    assert trial_launch.start("several nodes", {}, (), ["a", "a"], lambda name: "mpiexec") is None
    started = trial_launch.start("several nodes", {}, ["/x/libopen-pal.so.80"], ["a", "b"], lambda name: "mpiexec")
    assert started is not None
    assert "--host a:1,b:1" in " ".join(started.command)


def test_a_trial_is_started_by_what_came_with_the_mpi(tmp_path: Path) -> None:
    for name in ("bin/mpiexec", "lib/libmpi.so.40"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    files = ["/usr/lib/libc.so.6", str(tmp_path / "lib" / "libmpi.so.40")]
    started = trial_launch.start("one node", {}, files)
    assert started is not None
    assert started.command[0] == str(tmp_path / "bin" / "mpiexec")


def test_both_places_are_tried_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    programs = {"one node": RIGHT, "several nodes": RIGHT.replace("true", "false")}
    monkeypatch.setattr(cuda_trial, "start", lambda place, *_: child(programs[place]))
    trial = cuda_trial.try_all("Some MPI 1.0", ["a", "a", "b"], os.environ, 20)
    assert (trial.outcome, trial.reason.count(";")) == ("wrong", 2)
    assert re.match(r"one node: two ranks, 8.0 GB/s.*; several nodes: other numbers", trial.reason)
    kept = cuda_trials.load("Some MPI 1.0", "one node")
    assert kept is not None
    assert (kept.outcome, kept.direct, kept.staged) == ("right", 8e9, 2e9)
    assert cuda_trials.verified(Answer(YES, "it says so"), "Some MPI 1.0", None).is_yes
    assert cuda_trials.verified(Answer(YES, "it says so"), "Some MPI 1.0", None, nodes=2).verdict == NO
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert cuda_trials.load("Some MPI 1.0", "one node") is None


def test_fabrics_are_seen_and_so_is_a_plugin(tmp_path: Path) -> None:
    assert fabric.fabric(str(tmp_path)) == ""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    assert fabric.fabric(str(tmp_path)) == "RoCE"
    (port / "link_layer").write_text("InfiniBand\n")
    assert fabric.fabric(str(tmp_path)) == "InfiniBand"
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    (tmp_path / "infiniband" / "rdmap0" / "device").mkdir(parents=True)
    (tmp_path / "infiniband" / "rdmap0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    assert fabric.fabric(str(tmp_path)) == "EFA"
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert fabric.fabric(str(tmp_path)) == "Slingshot"
    assert not fabric.has_plugin({"LD_LIBRARY_PATH": str(tmp_path)}, ())
    (tmp_path / "libnccl-net.so").touch()
    assert fabric.has_plugin({"LD_LIBRARY_PATH": f"/none:{tmp_path}"}, ())
    assert not fabric.has_plugin({"LD_LIBRARY_PATH": str(tmp_path), "NCCL_NET_PLUGIN": "ofi"}, ())
