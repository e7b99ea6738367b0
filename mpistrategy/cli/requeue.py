"""`mpistrategy requeue -- LAUNCHER ...`: runs the program of a job, and has the job go on where it ended too early.

A job script ends with ``exec mpistrategy requeue ... -- srun ... mpistrategy run PROGRAM``.  The signal that the time
is nearly up reaches this process, which hands it on to the launcher, and so to all ranks.  After the end the reason
decides, not the launcher's status: a launcher may return 0 where nothing was started, and the greatest status of
all ranks hides the first.  The ranks write the reason into a file: see `mpistrategy.cli.run.Unfinished`.

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
import subprocess
import sys
import time
from typing import Any, NamedTuple

#: "Saved; start me again": the status of programs that were told to stop.
STOPPED = 75
_DONE = "is done"
_PATIENCE_SECONDS = 60
_OUTPUT = "/proc/self/fd/2"
_FAULTS = "Out Of Memory|Segmentation fault|Aborted|Killed|Bus error|Illegal instruction|Floating point exception"
#: What launchers say of a rank that a signal of its own fault has ended.
_FAULT = re.compile(
    rf"^srun: error: .*: tasks? [^ ]*: ({_FAULTS})|(?i:signal):? [0-9]+ \(({_FAULTS})\)"
    rf"|({_FAULTS})\)? *\(signal [0-9]+\)"
)
#: From this line on srun itself kills the ranks that are left.
_SRUN_ENDS = re.compile(r"^srun: .*(Job step aborted|Terminating StepId)")
_KILLED_BY_SRUN = re.compile(r"^srun: error: .*: Killed$")


class Batch(NamedTuple):
    """The job that this process runs in, and the commands of its batch system.

    Attributes:
        job: its number.
        restarts: how often the job has gone back to the queue.
        requeue: puts it back into the queue.
        submit: submits the next job of a chain, which waits for the end of this one, and prints its number.
        cancel: takes a job, whose number follows, out of the queue.
        probe: starts a process on all nodes of the job; empty where the job ends when they do not answer.
    """

    job: str
    restarts: int
    requeue: list[str]
    submit: list[str]
    cancel: list[str]
    probe: list[str]


def _slurm(options: argparse.Namespace) -> Batch:
    job = os.environ["SLURM_JOB_ID"]
    return Batch(
        job,
        int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        ["scontrol", "requeue", job],
        ["sbatch", "--parsable", f"--dependency=afterany:{job}", str(options.chain), str(options.link + 1), job],
        ["scancel"],
        ["srun", f"--nodes={os.environ.get('SLURM_JOB_NUM_NODES', '1')}", "--ntasks-per-node=1", "true"],
    )


def _pbs(options: argparse.Namespace) -> Batch:
    """Return a job of PBS Pro or OpenPBS, which end a job when they miss a node."""
    job, restarts = os.environ["PBS_JOBID"], 0
    if options.chain is None:
        count = re.search(r"(?m)^ *run_count = (\d+)", _answer(["qstat", "-f", job]))
        restarts = int(count[1]) - 1 if count else 0
    variables = f"CHAIN_LINK={options.link + 1},CHAIN_BEFORE={job}"
    submit = ["qsub", "-W", f"depend=afterany:{job}", "-v", variables, str(options.chain)]
    return Batch(job, restarts, ["qrerun", job], submit, ["qdel"], [])


def _succeeds(command: list[str], **how: Any) -> bool:
    try:
        return subprocess.run(command, check=False, **how).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        return False


def _answer(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _path_of_notes(job: str) -> str:
    return os.path.abspath(f".mpistrategy-{job}.unfinished")  # the ranks may run in another folder


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _fault_in_output(start: int) -> str:
    """Return the launcher's line, from `start` on, about a rank that ended by its own fault; "" for none."""
    if not os.path.isfile(_OUTPUT):  # a pipe, or a terminal
        return ""
    srun_ends = False
    with contextlib.suppress(OSError), open(_OUTPUT, errors="replace") as file:
        file.seek(start)
        for line in map(str.rstrip, file):
            srun_ends = srun_ends or bool(_SRUN_ENDS.search(line))
            if _FAULT.search(line) and not (srun_ends and _KILLED_BY_SRUN.search(line)):
                return line
    return ""


class Step:
    """The launcher, under a process that is told when the time is nearly up.

    Args:
        batch: the job.
        command: the launcher's.
        hands_on: the signal by which the launcher tells the ranks.

    Attributes:
        notes: the file in which the ranks say how the program ended; rank 0 takes it away after a good end.
        status: the launcher's.
    """

    def __init__(self, batch: Batch, command: list[str], hands_on: int) -> None:
        self.notes: str = _path_of_notes(batch.job)
        self.status: int = 0
        self._batch, self._command, self._signal = batch, command, hands_on
        self._is_told, self._is_handed_on = False, False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, self._tell)
        signal.signal(signal.SIGTERM, self._end)
        with contextlib.suppress(OSError):
            for at, word in enumerate(command[1:], 1):
                if word == "run" and os.path.basename(command[at - 1]) == "mpistrategy":
                    open(self.notes, "w").close()
                    self._command = [*command[: at + 1], "--unfinished", self.notes, *command[at + 1 :]]
                    break

    def run(self, seconds: int) -> tuple[bool, str]:
        """Run it to its end; return whether it is to be started once more, and why, as words behind "the program".

        Args:
            seconds: when the program is told to stop, if the batch system sends no signal; 0 for never.
        """
        signal.alarm(seconds)
        start = os.fstat(2).st_size
        try:
            with subprocess.Popen(self._command) as self._process:
                self._hand_on()
                code = self._process.wait()
        except OSError as error:  # it would be so again
            sys.stderr.write(f"mpistrategy requeue: {error}\n")
            _remove(self.notes)
            code = 127
        self.status = code if code >= 0 else 128 - code  # as a shell counts
        for number in (signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        notes = None
        if "--unfinished" not in self._command and self.status and (self._is_told or self.status == STOPPED):
            notes = ["stopped"]  # the ranks could write nothing
        with contextlib.suppress(FileNotFoundError), open(self.notes, errors="replace") as file:
            notes = file.read().splitlines()
        _remove(self.notes)
        return self._verdict(notes, start)

    def _verdict(self, notes: list[str] | None, start: int) -> tuple[bool, str]:
        """Return whether the program is to be started once more, and why, as words behind "the program".

        Args:
            notes: the lines that the ranks have written; None where rank 0 has removed the file, or there was none.
            start: where the output of this start begins.
        """
        if notes is None:
            return False, f"failed with status {self.status}" if self.status else _DONE
        failed = next((line for line in notes if line.startswith("failed")), "")
        if failed:
            return False, failed
        if self.status == 0:
            return True, "has not ended, whatever the launcher says"
        is_silent = "begun" in notes and not any(line.startswith("stopped") for line in notes)
        if is_silent and (fault := _fault_in_output(start)):
            probe = self._batch.probe
            if not probe or _succeeds(probe, stderr=subprocess.DEVNULL, timeout=_PATIENCE_SECONDS):
                return False, f"was ended: {fault}"
        return True, f"stopped with status {self.status}"

    def _tell(self, number: int, frame: Any) -> None:
        # not print: it may be at work
        os.write(1, f"job {self._batch.job}: the time is nearly up, {_now()}\n".encode())
        self._is_told = True
        self._hand_on()

    def _hand_on(self) -> None:
        """Tell the launcher, once there is one, and once."""
        if self._is_told and self._process is not None and not self._is_handed_on:
            self._is_handed_on = True
            self._process.send_signal(self._signal)

    def _end(self, number: int, frame: Any) -> None:
        """Leave no file when the job is cancelled; the batch system ends the ranks."""
        _remove(self.notes)
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
    variable = "PBS_JOBID" if "PBS_JOBID" in os.environ else "SLURM_JOB_ID"
    if not command or variable not in os.environ:
        problem = "outside a job of Slurm or PBS" if command else "no launcher"
        sys.stderr.write(f"mpistrategy requeue: found {problem}; write: exec mpistrategy requeue -- srun ...\n")
        return 2
    try:
        batch = _pbs(options) if variable == "PBS_JOBID" else _slurm(options)
        step = Step(batch, command, signal.Signals[f"SIG{options.signal}"])
        count = f"restart {batch.restarts}" if options.chain is None else f"link {options.link}"
        place = os.environ.get("SLURM_JOB_NODELIST", os.environ.get("PBS_NODEFILE"))
        print(f"job {batch.job}, {count} of {options.at_most}, on {place}: {sys.executable}, {_now()}", flush=True)
        if options.before:  # it has ended, perhaps by a SIGKILL
            _remove(_path_of_notes(options.before))
        next_job = ""
        if options.chain is not None and options.link < options.at_most:
            next_job = _answer(batch.submit).partition(";")[0]  # now: a job that is killed gets no further
            print(f"job {batch.job}: job {next_job} goes on after it", flush=True)
        again, why = step.run(options.tell_after)
    except (OSError, subprocess.CalledProcessError) as error:  # of sbatch, qsub or qstat
        _remove(_path_of_notes(os.environ[variable]))
        sys.stderr.write(f"mpistrategy requeue: {error}; the program was not started\n")
        return 2
    words = f"job {batch.job}: the program {why}"
    if options.chain is not None:
        if next_job and not again:
            _succeeds([*batch.cancel, next_job])
        next_one = f"job {next_job}" if next_job else "nothing"
        print(f"{words}; {next_one} goes on" if again else f"{words}; the chain ends here")
    elif again and batch.restarts >= options.at_most:
        sys.stderr.write(f"job {batch.job}: not done after {batch.restarts} restarts; not requeued\n")
    elif again:
        print(f"{words}; back to the queue", flush=True)
        if not _succeeds(batch.requeue):
            sys.stderr.write(f"job {batch.job}: cannot be requeued here; use chain\n")
    else:
        print(words if why == _DONE else f"{words}; not requeued")
    if step.status == 0 and why != _DONE:
        return STOPPED if again else 1
    return step.status


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="requeue.py")
    add_options(_parser)
    sys.exit(run(_parser.parse_args()))
