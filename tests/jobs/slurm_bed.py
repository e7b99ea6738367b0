"""A real Slurm on this machine, for tests: slurmctld here, and nodes that are a slurmd in namespaces of their own.

Needs root, Linux namespaces, iproute2, and Debian's packages slurm-wlm, munge and (for Open MPI under srun) libpmix2.
GPUs are made up: devices that do nothing.  A node has its own name, address, processes, /dev/shm and `local` folder,
and shares the rest of the file system, as nodes of a cluster share the home folders. What is in `local` is there again
when a node comes back.  Its settings are those that job scripts meet on clusters: nodes are missed late, urgent jobs
take nodes, jobs are requeued.
"""

from __future__ import annotations

import glob
import itertools
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin", "/sbin"))
# What Slurm's plugin loads; Debian has it under this name only with libpmix-dev, or where somebody made the link.
PMIX = glob.glob("/usr/lib/*/pmix2/lib/libpmix.so")
_beds = itertools.count()
CPUS, GPUS = 288, 4  # of each node, as many as job scripts of any cluster ask for

NODE = """
read -r _ # until the network is there
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$3/disk-$1" "$3/local" || exit 1
mount --bind "$3/hosts" /etc/hosts || exit 1
slurmd -D -c -N "$1" -f "$2" & # not exec: the first process of a node has to bury the orphans
wait
"""


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job that has ended.

    Attributes:
        state: COMPLETED, FAILED, ...
        status: the exit status of its script.
        output: what it wrote.
    """

    state: str
    status: int
    output: str


class SlurmBed:
    """A Slurm with two nodes; `close` it also where `start` fails.

    Args:
        folder: for everything that belongs to it; its path must be short and without blanks.
    """

    names = ("node1", "node2")

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.local, self.conf = self.folder / "local", self.folder / "slurm.conf"
        number = next(_beds)  # several of one process at the same time
        self._bridge = f"ms{os.getpid() % 10**7}{chr(97 + number % 10)}"
        self._subnet = f"10.{180 + os.getpid() % 40}.{(os.getpid() // 40 + 97 * number) % 250}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        """End everything that was started; the folder's files stay."""
        for process in reversed(self._processes.values()):  # a node ends with all that runs on it
            process.kill()
            process.wait()
        self._processes.clear()
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    # ----------------------------------------------------------------------------------------- for the tests

    def run(self, *command: str, timeout: float = 60, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a program of this Slurm; its output is text."""
        told: Mapping[str, str] = options.pop("env", None) or os.environ  # type: ignore[assignment]
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            command,
            env={**told, "SLURM_CONF": str(self.conf), "PATH": f"{told.get('PATH', '')}{os.pathsep}{SEARCH}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            **options,
        )

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, output: Path, timeout: float = 90) -> Job:
        """Wait until a job has ended, and return what became of it."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.show(job).get("JobState") in states, timeout, f"the end of job {job}", output)
        told = self.show(job)
        return Job(told["JobState"], int(told["ExitCode"].partition(":")[0]), _text(output))

    def until(self, happened: Callable[[], object], timeout: float, what: str, output: Path | None = None) -> None:
        """Look again and again until something has happened; TimeoutError with what the daemons say if it does not."""
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end:
                logs = sorted(self.folder.glob("*.log"))
                told = "\n".join(f"--- {log.name}\n{_text(log)[-2000:]}" for log in logs)
                raise TimeoutError(f"no {what} within {timeout:g} s\n{_text(output) if output else ''}\n{told}")
            time.sleep(0.1)

    def on(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program that sees the file systems of a node, without Slurm."""
        return self.run("nsenter", "-t", str(self._processes[name].pid), "--mount", *command)

    def plug(self, name: str, way: str) -> None:
        """Connect a node ("up"), or let nothing that it sends or is sent arrive, and tell nobody ("down")."""
        _sh("ip", "link", "set", self._port(self.names.index(name) + 1), way)

    def cut(self, name: str, silently: bool = False) -> None:
        """Make a node be gone at once, with all that runs on it; Slurm misses it after SlurmdTimeout.

        Its connections are closed by its kernel, as when all its processes are killed; or, `silently`, they stay open
        for the others, as when its power is cut.
        """
        if silently:
            self.plug(name, "down")
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def crash(self, name: str) -> None:
        """Make a node be gone at once, with all that runs on it, and tell Slurm."""
        self.cut(name)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=crashed")

    def revive(self, name: str) -> None:
        """Start a node again that has crashed."""
        number = self.names.index(name) + 1
        for folder in (self.folder / f"spool-{name}", self.folder / name):
            shutil.rmtree(folder)  # what PMIx has left there would keep the same job from starting again
            folder.mkdir()
        subprocess.run(["ip", "link", "del", self._port(number)], capture_output=True, check=False)
        self._start_node(number, name)

    # ----------------------------------------------------------------------------------------- the start

    def start(self) -> None:
        """Start it, and wait until all nodes are idle."""
        of_nodes = [f"{kind}{name}" for kind in ("", "spool-", "disk-") for name in self.names]
        for name in ("state", "local", *of_nodes):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        for number in range(GPUS):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null
        key, where = self.folder / "munge.key", self.folder
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        prolog = self.folder / "prolog"  # process numbers repeat between nodes, and with them names in /tmp
        prolog.write_text(f'#!/bin/sh\necho "export TMPDIR={self.folder}/$SLURMD_NODENAME"\n')
        prolog.chmod(0o755)
        self._write_configuration()
        self._spawn(
            "munged", "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={where}/munge.socket",
            f"--pid-file={where}/munged.pid", f"--log-file={where}/munged.log", f"--seed-file={where}/munge.seed",
        )  # fmt: skip
        self.until((where / "munge.socket").exists, 20, "munge.socket")
        for left in Path("/sys/class/net").glob("ms[0-9]*"):  # by sessions that were killed
            number_of = left.name[2:].rstrip("abcdefghij")
            if number_of.isdigit() and not Path("/proc", number_of).exists():
                subprocess.run(["ip", "link", "del", left.name], capture_output=True, check=False)
        _sh("ip", "link", "add", self._bridge, "type", "bridge")
        _sh("ip", "addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _sh("ip", "link", "set", self._bridge, "up")
        self._spawn("slurmctld", "slurmctld", "-D", "-c", "-i", "-f", str(self.conf))
        for number, name in enumerate(self.names, 1):
            self._start_node(number, name)
        self.until(self.all_idle, 60, "idle nodes")

    def _start_node(self, number: int, name: str) -> None:
        process = self._spawn(
            name, "unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc",
            "--kill-child=KILL", "bash", "-c", NODE, name, name, str(self.conf), str(self.folder), stdin=True,
        )  # fmt: skip
        mine, pid = os.readlink("/proc/self/ns/net"), process.pid
        self.until(lambda: os.readlink(f"/proc/{pid}/ns/net") != mine, 10, f"network of {name}")
        port = self._port(number)
        # A node that comes back has its old address of Ethernet, as a machine has, since the others remember it.
        same = ("address", f"02:00:00:00:00:{number:02x}")
        _sh("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", *same, "netns", str(pid))
        _sh("ip", "link", "set", port, "master", self._bridge, "up")
        inside = ("nsenter", "-t", str(pid), "-n", "ip")
        _sh(*inside, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _sh(*inside, "link", "set", link, "up")
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()

    def _port(self, number: int) -> str:
        return f"{self._bridge}n{number}"[-15:]

    def all_idle(self) -> bool:
        """Return whether all nodes wait for jobs."""
        nodes = self.run("sinfo", "--partition=test", "--noheader", "--Node", "--format=%T").stdout.split()
        return nodes == ["idle"] * len(self.names)

    def _spawn(self, name: str, program: str, *arguments: str, stdin: bool = False) -> subprocess.Popen[bytes]:
        # A session that runs out of time is killed, and tidies up nothing.
        until_we_die = ("setpriv", "--pdeathsig", "KILL")
        log: IO[bytes]
        with open(self.folder / f"{name}.out.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                [*until_we_die, program, *arguments],
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={"PATH": SEARCH, "SLURM_CONF": str(self.conf), "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        return self._processes[name]

    def _write_configuration(self) -> None:
        host, address = socket.gethostname().partition(".")[0], f"{self._subnet}.254"
        addresses = {name: f"{self._subnet}.{number}" for number, name in enumerate(self.names, 1)}
        shape = (
            f"Port=17001 State=UNKNOWN CPUs={CPUS} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 "
            f"RealMemory=64000 Feature=gpu,fast Gres=gpu:{GPUS}"
        )
        lines = [f"NodeName={name} NodeHostname={name} NodeAddr={at} {shape}" for name, at in addresses.items()]
        usual = "Nodes=ALL MaxTime=INFINITE State=UP"
        lines += [
            f"PartitionName=test {usual} Default=YES OverSubscribe=NO GraceTime=4 PriorityTier=1",
            f"PartitionName=urgent {usual} PriorityTier=10",
        ]
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        hosts = {"localhost": "127.0.0.1", host: address} | addresses
        (self.folder / "hosts").write_text("".join(f"{at} {name}\n" for name, at in hosts.items()))
        settings = {
            "ClusterName": "tests",
            "SlurmctldHost": f"{host}({address})",
            "SlurmctldPort": _free_port(),
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthInfo": f"socket={self.folder}/munge.socket,cred_expire=5",  # how long a requeued job waits
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": f"{self.folder}/spool-%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/slurmd.%n.pid",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdLogFile": f"{self.folder}/slurmd.%n.log",
            "TmpFS": f"{self.folder}/%n",  # Slurm's plugin for PMIx puts files of the same names there on every node
            "TaskProlog": self.folder / "prolog",
            "ProctrackType": "proctrack/linuxproc",  # what needs neither cgroups nor systemd
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",  # believe the made-up CPUs
            "SchedulerParameters": "sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0",
            "GresTypes": "gpu",
            "MpiDefault": "none",
            "ReturnToService": 2,
            "KillWait": 4,
            "MinJobAge": 3600,
            "InactiveLimit": 0,
            "SlurmdTimeout": 300,  # how soon a node that is gone is missed: MPI and srun give up long before
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "JobRequeue": 1,
            "MaxArraySize": 10001,
            "EnforcePartLimits": "ALL",
        }
        text = [*(f"{key}={value}" for key, value in settings.items()), *lines]
        self.conf.write_text("\n".join(text) + "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
