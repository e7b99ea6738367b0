"""`mpistrategy requeue -- LAUNCHER ...`: runs the program of a job, and has the job go on where it ended too early.

A job script ends with ``exec mpistrategy requeue ... -- srun ... mpistrategy run PROGRAM``.  The signal that the time
is nearly up reaches this process, which hands it on to the launcher, and so to all ranks.  After the end the reason
decides, not the launcher's status: one may return 0 where nothing was started, and the greatest status of all ranks
hides the first.  The ranks write the reason into a file: see `mpistrategy.cli.endings`.

- The program is done, or failed (an exception, a status, a signal of its own fault, too little memory): the job ends.
- It was told to stop and has saved, or was ended from outside (a lost node, a more urgent job, the time limit): the job
  goes back to the queue, or, in a chain, the next job goes on.

This file needs the standard library alone (Python 3.9): where a container holds the package, a copy of it beside the
job script does the same, as ``python3 requeue.py ... -- srun ...``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

#: "Saved; start me again": what programs end with that were told to stop.
STOPPED = 75
_DONE = "is done"
_PATIENCE_SECONDS = 60
_FAULTS = "Out Of Memory|Segmentation fault|Aborted|Killed|Bus error|Illegal instruction|Floating point exception"
#: What launchers say of a rank that a signal of its own fault has ended.
_FAULT = re.compile(
    rf"^srun: error: .*: tasks? [^ ]*: ({_FAULTS})|signal [0-9]+ \(({_FAULTS})\)|\(({_FAULTS})\) *\(signal [0-9]+\)"
)
#: From this line on srun itself kills the ranks that are left.
_SRUN_ENDS = re.compile(r"^srun: .*(Job step aborted|Terminating StepId)")
_KILLED_BY_SRUN = re.compile(r"^srun: error: .*: Killed$")


class Batch(ABC):
    """A batch system, and the job that this process runs in.

    Args:
        job: its number.
        place: its nodes, in words.
    """

    def __init__(self, job: str, place: str) -> None:
        self.job = job
        self.place = place

    @abstractmethod
    def restarts(self) -> int:
        """Return how often the job has gone back to the queue."""

    @abstractmethod
    def requeue(self) -> bool:
        """Put the job back into the queue; return whether that was done."""

    @abstractmethod
    def submit(self, script: str, link: int) -> str:
        """Submit the next job of a chain, which waits for the end of this one; return its number."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Take a job out of the queue."""

    def nodes_answer(self) -> bool:
        """Return whether all nodes of the job can start a process: some MPIs crash where a node is gone."""
        return True


class Slurm(Batch):
    """A job of Slurm."""

    def __init__(self) -> None:
        super().__init__(os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NODELIST", ""))

    def restarts(self) -> int:
        return int(os.environ.get("SLURM_RESTART_COUNT") or 0)

    def requeue(self) -> bool:
        return _did("scontrol", "requeue", self.job)

    def submit(self, script: str, link: int) -> str:
        after = f"--dependency=afterany:{self.job}"
        return _answer("sbatch", "--parsable", after, script, str(link), self.job).partition(";")[0]

    def cancel(self, job: str) -> None:
        _did("scancel", job)

    def nodes_answer(self) -> bool:
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
        command = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", "true"]
        try:
            done = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=_PATIENCE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


class Pbs(Batch):
    """A job of PBS Pro or OpenPBS, which end a job when they miss a node."""

    def __init__(self) -> None:
        with open(os.environ["PBS_NODEFILE"]) as file:
            super().__init__(os.environ["PBS_JOBID"], f"{len(set(file))} nodes")

    def restarts(self) -> int:
        found = re.search(r"(?m)^ *run_count = (\d+)", _answer("qstat", "-f", self.job))
        return int(found[1]) - 1 if found else 0

    def requeue(self) -> bool:
        return _did("qrerun", self.job)

    def submit(self, script: str, link: int) -> str:
        handed_on = f"CHAIN_LINK={link},CHAIN_BEFORE={self.job}"
        return _answer("qsub", "-W", f"depend=afterany:{self.job}", "-v", handed_on, script)

    def cancel(self, job: str) -> None:
        _did("qdel", job)


def _did(*command: str) -> bool:
    sys.stdout.flush()
    try:
        return subprocess.run(command, check=False).returncode == 0
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        return False


def _answer(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _path_of_notes(job: str) -> str:
    return os.path.abspath(f".mpistrategy-{job}.unfinished")  # the ranks may run in another folder


class Notes:
    """The file in which the ranks say how the program ended; rank 0 takes it away after a good end.

    Args:
        job: the number of the job, which is in the file's name.
    """

    def __init__(self, job: str) -> None:
        self.path: str = _path_of_notes(job)
        try:
            open(self.path, "w").close()
        except OSError:
            self.path = ""

    def handed_to(self, command: list[str]) -> list[str]:
        """Return the command with the words that tell `mpistrategy run` of the file; without it, forget the file."""
        for at, word in enumerate(command[1:], 1):
            if self.path and word == "run" and os.path.basename(command[at - 1]) == "mpistrategy":
                return [*command[: at + 1], "--unfinished", self.path, *command[at + 1 :]]
        self.remove()
        self.path = ""
        return command

    def read(self) -> list[str] | None:
        """Return the lines in it; None where rank 0 has taken it away."""
        try:
            with open(self.path, errors="replace") as file:
                return file.read().splitlines()
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        """Take it away."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _size_of_output() -> int | None:
    """Return how much stands in the output of the job; None where that is no file."""
    state = os.fstat(2)
    return state.st_size if stat.S_ISREG(state.st_mode) else None


def _fault_in_output(start: int | None) -> str:
    """Return the line from there on in which the launcher says that a rank ended by its own fault; "" for none."""
    if start is None:
        return ""
    srun_ends = False
    with contextlib.suppress(OSError), open("/proc/self/fd/2", errors="replace") as file:
        file.seek(start)
        for line in map(str.rstrip, file):
            srun_ends = srun_ends or bool(_SRUN_ENDS.search(line))
            if _FAULT.search(line) and not (srun_ends and _KILLED_BY_SRUN.search(line)):
                return line
    return ""


def verdict(status: int, notes: list[str] | None, fault: Callable[[], str]) -> tuple[bool, str]:
    """Return whether the program is to be started once more, and why, as words behind "the program".

    Args:
        status: the launcher's.
        notes: what the ranks have written; None where rank 0 has taken the file away.
        fault: returns what the launcher says of a rank that ended by its own fault, on nodes that all answer.
    """
    if notes is None:
        return False, f"failed with status {status}" if status else _DONE
    failed = next((line for line in notes if line.startswith("failed")), "")
    if failed:
        return False, failed
    if status == 0:
        return True, "has not ended, whatever the launcher says"
    if "begun" in notes and not any(line.startswith("stopped") for line in notes) and (found := fault()):
        return False, f"was ended: {found}"
    return True, f"stopped with status {status}"


def verdict_by_status(status: int, told: bool) -> tuple[bool, str]:
    """Return the same where the ranks could write nothing."""
    if status == 0:
        return False, _DONE
    again = told or status == STOPPED
    return again, f"{'stopped' if again else 'failed'} with status {status}"


class Step:
    """The launcher, under a process that is told when the time is nearly up.

    Args:
        batch: the job.
        command: the launcher's.
        hands_on: the signal by which the launcher tells the ranks.
    """

    def __init__(self, batch: Batch, command: list[str], hands_on: int) -> None:
        self.told: bool = False
        self.status: int = 0
        self._batch = batch
        self._signal, self._is_handed_on = hands_on, False
        self.notes: Notes = Notes(batch.job)
        self._command = self.notes.handed_to(command)
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, self._tell)
        signal.signal(signal.SIGTERM, self._end)

    def run(self, seconds: int) -> tuple[bool, str]:
        """Run it to its end; return what `verdict` returns.

        Args:
            seconds: when the program is told to stop, if the batch system sends no signal; 0 for never.
        """
        signal.alarm(seconds)
        start = _size_of_output()
        try:
            with subprocess.Popen(self._command) as self._process:
                self._hand_on()
                code = self._process.wait()
        except OSError as error:  # it would be so again
            sys.stderr.write(f"mpistrategy requeue: {error}\n")
            self.notes.remove()
            self.status = 127
            return False, "failed with status 127"
        self.status = code if code >= 0 else 128 - code  # as a shell counts
        for number in (signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        if not self.notes.path:
            return verdict_by_status(self.status, self.told)

        def fault() -> str:
            found = _fault_in_output(start)
            return found if found and self._batch.nodes_answer() else ""

        notes = self.notes.read()
        self.notes.remove()
        return verdict(self.status, notes, fault)

    def _tell(self, number: int, frame: Any) -> None:
        os.write(
            1, f"job {self._batch.job}: the time is nearly up, {_now()}\n".encode()
        )  # not print: it may be at work
        self.told = True
        self._hand_on()

    def _hand_on(self) -> None:
        """Tell the launcher, once there is one, and once."""
        if self.told and self._process is not None and not self._is_handed_on:
            self._is_handed_on = True
            self._process.send_signal(self._signal)

    def _end(self, number: int, frame: Any) -> None:
        """Leave no file when the job is cancelled; the batch system ends the ranks."""
        self.notes.remove()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy requeue`."""
    parser.usage = "%(prog)s [option ...] -- LAUNCHER [WORD ...] mpistrategy run PROGRAM [ARGUMENT ...]"
    parser.add_argument("--at-most", type=int, default=10, metavar="N", help="restarts, or links of a chain (10)")
    parser.add_argument("--tell-after", type=int, default=0, metavar="SECONDS", help="where no signal comes (PBS)")
    parser.add_argument("--signal", default="USR2", choices=("USR2", "TERM"), help="what the launcher hands on (USR2)")
    parser.add_argument("--chain", metavar="SCRIPT", help="submit it as the next job, in place of a requeue")
    parser.add_argument("--link", type=int, default=1, metavar="N", help="which job of the chain this is (1)")
    parser.add_argument("--before", metavar="JOB", help="the job before it in the chain")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="LAUNCHER ...", help="what starts the ranks")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the status of the job."""
    command = options.words[1:] if options.words[:1] == ["--"] else options.words
    named = "PBS_JOBID" if "PBS_JOBID" in os.environ else "SLURM_JOB_ID"
    if not command or named not in os.environ:
        found = "outside a job of Slurm or PBS" if command else "no launcher"
        sys.stderr.write(f"mpistrategy requeue: found {found}; write: exec mpistrategy requeue -- srun ...\n")
        return 2
    batch = Pbs() if named == "PBS_JOBID" else Slurm()
    step = Step(batch, command, signal.Signals[f"SIG{options.signal}"])
    try:
        return (_requeued if options.chain is None else _chained)(batch, step, options)
    except (OSError, subprocess.CalledProcessError) as error:  # of sbatch, qsub or qstat
        step.notes.remove()
        sys.stderr.write(f"mpistrategy requeue: {error}; the program was not started\n")
        return 2


def _requeued(batch: Batch, step: Step, options: argparse.Namespace) -> int:
    job, restarts = f"job {batch.job}", batch.restarts()
    print(f"{job}, restart {restarts} of {options.at_most}, on {batch.place}: {sys.executable}, {_now()}", flush=True)
    again, why = step.run(options.tell_after)
    if again and restarts >= options.at_most:
        sys.stderr.write(f"{job}: not done after {restarts} restarts; not requeued\n")
    elif again:
        print(f"{job}: the program {why}; back to the queue", flush=True)
        if not batch.requeue():
            sys.stderr.write(f"{job}: cannot be requeued here; use chain\n")
    elif why == _DONE:
        print(f"{job}: the program {why}")
    else:
        sys.stderr.write(f"{job}: the program {why}; not requeued\n")
    return _status(step, again, why)


def _chained(batch: Batch, step: Step, options: argparse.Namespace) -> int:
    job, link, following = f"job {batch.job}", options.link, ""
    print(f"{job}, link {link} of {options.at_most}, on {batch.place}: {sys.executable}, {_now()}", flush=True)
    if options.before:  # it has ended, perhaps by a SIGKILL
        with contextlib.suppress(OSError):
            os.unlink(_path_of_notes(options.before))
    if link < options.at_most:  # now, and not at the end: a job that is killed gets no further
        following = batch.submit(options.chain, link + 1)
        print(f"{job}: job {following} goes on after it", flush=True)
    again, why = step.run(options.tell_after)
    if again:
        print(f"{job}: the program {why}; {f'job {following}' if following else 'nothing'} goes on")
    else:
        if following:
            batch.cancel(following)
        print(f"{job}: the program {why}; the chain ends here")
    return _status(step, again, why)


def _status(step: Step, again: bool, why: str) -> int:
    if step.status == 0 and why != _DONE:
        return STOPPED if again else 1
    return step.status


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="requeue.py")
    add_options(_parser)
    sys.exit(run(_parser.parse_args()))
