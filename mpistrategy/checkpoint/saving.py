"""Writing a checkpoint: it is complete or absent, whatever ends the job and whichever rank fails.

1. Rank 0 makes a folder with a unique name beside the final one.
2. Per-rank data go to the writers (`collecting`).  Each writer writes one shard into the folder and syncs it to the
   disk.
3. Rank 0 gets the sizes and checksums from the writers.  It writes the manifest, last, syncs it, and renames the
   folder.  Before the rename there is no new checkpoint, after it there is a complete one.

An error on one rank raises on all, and the folder is removed; an older checkpoint is not touched before step 3.

Threads write the shards and do step 3, with ``wait=False`` from copies, and exchange no messages: a writer that has
finished makes an empty file in the folder, whose name says the size and the checksum of its shard.  The thread of rank
0 looks for these files and completes the checkpoint, so the program need not make another call.  An error is raised on
all ranks by the call that waits for the save.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpistrategy import own_files
from mpistrategy.checkpoint.collecting import collect
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage import files
from mpistrategy.checkpoint.storage.manifest import NAME, Manifest, Shard, is_checkpoint
from mpistrategy.checkpoint.storage.shards import shard_name
from mpistrategy.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.observers import interval
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.job.exit_hooks import before_abort
from mpistrategy.mpi.job.introductions import version
from mpistrategy.objects.copies import NotPickled

_WHERE = "Checkpoint.save"
#: Names of the folder of checkpoint {}, while it is written and while it is replaced.
SAVING, REPLACED = ".{}.saving-", ".{}.replaced"
#: The name of the empty file that a writer makes: the number, the size and the checksum of its shard; after a failure.
_DONE, _FAILED = "done-{:09}-{}-{}", "failed-"
#: The seconds between two looks of rank 0 at the marks; a metadata server has other things to do.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.1
#: At the end of the program, how long nothing may move in the folder of a save before it is given up.
_STALLED_SECONDS = 60.0


class Saving(NotPickled):
    """A checkpoint that is being written; what `Checkpoint.save` returns.

    Args:
        communicator: the ranks.
        path: the folder.
        overwrite: whether to replace an existing checkpoint.
        layout: `Strategy.layout()`.

    Attributes:
        path: the folder.
        is_committed: whether the checkpoint is in place, as far as this rank knows: rank 0 sees it at once, the other
            ranks in the next call that waits for it.
        has_failed: whether the save has failed, as all ranks know after such a call.
    """

    _instead_of_pickling = "Send its path."

    def __init__(self, communicator: Ranks, path: str, overwrite: bool, layout: dict[str, Any]) -> None:
        self.path = path
        self.is_committed: bool = False
        self.has_failed: bool = False
        self._communicator = communicator
        self._overwrite = overwrite
        #: The folder while it is written, and its lock; the writers, and the contents.
        self._folder = ""
        self._lock: files.Lock | None = None
        self._writers: list[int] = []
        self._manifest = Manifest(communicator.size, (), {}, [], layout, version())
        #: Whether this rank has written its shard; and whether its thread is done.
        self._written, self._done = threading.Event(), threading.Event()
        self._done.set()
        #: Lets the thread look for the shards at once; whether another rank has failed.
        self._look_now = threading.Event()
        self._is_cancelled = False
        #: The error in the thread of this rank; and the error that all ranks know and no call has raised.
        self._error: CheckpointError | None = None
        self._failure: CheckpointError | None = None
        #: Whether all ranks know the outcome.
        self._is_known = False

    # ------------------------------------------------------------------------------------------- the steps

    def _begin(self, state: State, call: Call, prepare: Callable[[], object], *, wait: bool) -> dict[str, int]:
        """Do step 1, start the threads, and with `wait`, wait for them.  Collective; the caller abandons it on errors.

        Rank 0 calls `prepare` first.  Returns `State.by_name`.
        """
        call.expect_more()
        digests = state.digests()
        if self._communicator.rank == 0:
            with files.writing(call.where, self.path):
                prepare()
                self._make_folder(call.where)
        call.agree("make a folder")
        self._folder = self._communicator.allgather_text(self._folder)[0]
        state.decide(digests, self._communicator)
        self._writers, own, pieces = collect(state, self._communicator, call)
        self._manifest = dataclasses.replace(self._manifest, items=state.items, own=own)
        if pieces is not None and not files.is_folder(self._folder):
            raise CheckpointWriteError.at(
                call.where,
                found=f"nothing at {self._folder!r}, where rank 0 has made a folder",
                expected="a file system that the nodes of all ranks share",
            )
        if not wait:
            pieces = None if pieces is None else [bytes(piece) for piece in pieces]
        if self._communicator.rank == 0:
            self._manifest.text(call.where)  # too much of it is refused here
        call.agree("begin to write")  # no rank starts to write if another cannot
        self._start(pieces)
        if wait:
            self._join(call)
        else:
            _note(self)
        return state.by_name(digests)

    def _start(self, pieces: list[Any] | None) -> None:
        """Write this rank's shard in a thread; at once where none can be started."""
        if pieces is None:
            self._written.set()
            return
        self._done.clear()
        try:
            threading.Thread(target=self._work, args=(pieces,), name=f"checkpoint {self.path}").start()
        except (RuntimeError, MemoryError):  # no more threads for this user, or no memory for one
            self._work(pieces)

    def _make_folder(self, where: str) -> None:
        parent, name = os.path.split(self.path)
        own_files.make_folders(parent)
        self._check_place(where)
        # Folders of jobs that have ended: nobody holds their locks.
        locked = files.sweep(parent, re.compile(re.escape(SAVING.format(name)) + files.TOKEN))
        if locked:
            raise CheckpointExistsError.at(
                where,
                found=f"{locked!r}: another save to {self.path!r} has begun and not ended",
                expected="one at a time",
                fix="Give each job a folder of its own; and wait() for what save(..., wait=False) returned.",
            )
        self._folder = files.new_folder(os.path.join(parent, SAVING.format(name)))
        self._lock = files.Lock(self._folder)

    def _check_place(self, where: str) -> bool:
        """Return whether there is a checkpoint to replace; raise if the name is taken."""
        if not os.path.lexists(self.path) or (files.is_folder(self.path) and not os.listdir(self.path)):
            return False
        has_checkpoint = is_checkpoint(self.path)
        if has_checkpoint and self._overwrite:
            return True
        raise CheckpointExistsError.at(
            where,
            found=f"{'a checkpoint' if has_checkpoint else 'something else than a checkpoint'} at {self.path!r}",
            expected="nothing there",
            fix="Give each checkpoint a name of its own (CheckpointManager does), or pass overwrite=True, which "
            "replaces a checkpoint and nothing else.",
        )

    # ------------------------------------------------------------------------------------------- in a thread

    def _work(self, pieces: list[Any]) -> None:
        """Write this rank's shard; on rank 0, complete the checkpoint when all are there.  Errors wait for `_join`."""
        is_first, number = self._communicator.rank == 0, self._writers.index(self._communicator.rank)
        path = os.path.join(self._folder, shard_name(number))
        try:
            with interval("span", "write a checkpoint"), files.writing(_WHERE, path):
                marks = [_DONE.format(number, *files.write(path, pieces))]
            pieces.clear()
            with files.writing(_WHERE, self.path):
                if len(self._writers) > 1:
                    files.write(os.path.join(self._folder, marks[0]), [])
                if is_first:
                    self._written.set()
                    if len(self._writers) > 1:
                        marks = self._marks()
                    if marks:
                        self._finish(marks)
                        self.is_committed = True
                    else:
                        self._remove()
        except BaseException as error:
            if is_first or os.path.lexists(self._folder):  # else rank 0 has removed it after another rank's error
                text = f"{type(error).__name__}: {error}"
                unexpected = CheckpointWriteError.at(_WHERE, found=text, expected="memory and time to write")
                self._error = error if isinstance(error, CheckpointError) else unexpected
            if is_first:
                self._remove()
            elif self._error is not None:
                with contextlib.suppress(OSError):
                    files.write(os.path.join(self._folder, f"{_FAILED}{self._communicator.rank}"), [])
        finally:
            pieces.clear()  # also what an error's traceback would hold
            self._written.set()
            self._done.set()

    def _marks(self) -> list[str]:
        """Wait until all writers have made their marks; remove and return them, none after a failure.

        Raises:
            CheckpointWriteError: when nothing has moved in the folder for as long as a collective may wait.
        """
        for names in self._looks(self._communicator.guard.timeout):
            if self._is_cancelled or any(name.startswith(_FAILED) for name in names):
                return []
            marks = [name for name in names if name.startswith(_DONE[:5])]
            if len(marks) == len(self._writers):
                for mark in marks:
                    files.change(os.unlink, os.path.join(self._folder, mark))
                return marks
        raise CheckpointWriteError.at(
            _WHERE,
            found=f"shards that are missing, and nothing that moves in {self._folder!r}",
            expected="ranks that write their shards",
        )

    def _looks(self, seconds: float) -> Iterator[list[str]]:
        """Yield the names in the folder, again and again, until no file in it has grown for so many seconds.

        The folder is opened anew for each look: network file systems then ask the server for the names.
        """
        pause, sizes, end = _SHORTEST_PAUSE, [-1], time.monotonic() + seconds
        while True:
            yield os.listdir(self._folder)
            if time.monotonic() > end:
                before, sizes = sizes, sorted(entry.stat().st_size for entry in os.scandir(self._folder))
                if sizes == before:
                    return
                end = time.monotonic() + seconds
            self._look_now.wait(pause)
            self._look_now.clear()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _end_of_program(self) -> None:
        """Wait for the threads of all ranks, without a message to them; print the error that no call has raised.

        When they have ended, the folder has its final name, or is gone.
        """
        if self._is_known:
            return
        with contextlib.suppress(KeyboardInterrupt, OSError):  # the user does not want to wait; or the folder is gone
            for _ in self._looks(_STALLED_SECONDS):
                if self._communicator.rank == 0 and self._error is not None:
                    break
        if not os.path.lexists(self._folder):
            self._done.wait()
        if self._error is not None:
            rank, reason = self._communicator.rank, self._error.found
            sys.stderr.write(f"[rank {rank}] the checkpoint {self.path!r} was not saved: {reason}\n")

    # ------------------------------------------------------------------------------------------- what ranks wait for

    @property
    def is_written(self) -> bool:
        """Whether this rank's shard is on the disk; the checkpoint is in place when all shards are."""
        return self.is_committed or self._written.is_set()

    def wait(self, *, name: str | None = None) -> str:
        """Wait until the checkpoint is in place; return its path.  Collective.

        The checkpoint comes into place without it: this call says when, and raises an error of the save.

        Args:
            name: is compared between the ranks instead of the call site.

        Raises:
            CheckpointWriteError, CheckpointExistsError: on every rank; there is no new checkpoint then.
        """
        self._settle("Saving.wait", name)
        self._raise_failure("Saving.wait")
        if self.has_failed:
            raise CheckpointWriteError.at("Saving.wait", found="a checkpoint that failed before", expected="a new save")
        return self.path

    def _settle(self, where: str, name: str | None = None) -> None:
        """Wait for the threads of all ranks, for the public call `where`.  Collective; keeps its error."""
        if self._is_known:
            return
        try:
            with Call(self._communicator.guard, where, called=name) as call:
                self._join(call)
        except CheckpointError as error:  # on all ranks; after other errors the threads go on
            self._failure = error
            self._abandon()

    def _join(self, call: Call) -> None:
        """Wait for the threads of all ranks; raise the first error on all."""
        for step in ("write a checkpoint", "commit a checkpoint"):
            call.expect_more()
            self._written.wait()
            if step == "commit a checkpoint":
                self._look_now.set()
                self._done.wait()
            if self._error is not None:
                raise self._error
            call.agree(step, destination=self.path, patiently=True)
        self._end(committed=True)

    def _raise_failure(self, where: str) -> None:
        """Raise the error of a failed save, once, on every rank: the same error, in the public call `where`."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        rank = self._communicator.rank if failure.rank is None else failure.rank
        name, text = os.path.basename(self.path), failure.found or str(failure)
        raise type(failure).at(
            where,
            found=f"that the save of {name!r} with wait=False has failed on rank {rank}: {text}",
            expected="a folder that every rank can write to, with room in it",
            fix="Nothing is left of that save. This call has done nothing else; another one will.",
        ) from failure

    # ------------------------------------------------------------------------------------------- completing it

    def _finish(self, marks: Sequence[str]) -> None:
        """Write the manifest and put the checkpoint in its place."""
        fields = [mark.split("-") for mark in sorted(marks)]
        shards = tuple(Shard(int(nbytes), checksum) for _, _, nbytes, checksum in fields)
        text = dataclasses.replace(self._manifest, shards=shards).text(_WHERE)
        files.write(os.path.join(self._folder, NAME), [text])
        files.sync(self._folder)
        parent, name = os.path.split(self.path)
        old, replaces = os.path.join(parent, REPLACED.format(name)), self._check_place(_WHERE)
        if replaces:
            if os.path.lexists(old):  # of a job that was killed: there is at most one
                files.remove(old)
                files.sync(parent)
            files.change(os.rename, self.path, old)
        try:
            files.change(os.rename, self._folder, self.path)
        except OSError as error:
            if replaces:
                files.change(os.rename, old, self.path)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self._overwrite = False
                self._check_place(_WHERE)  # another job was faster
            raise
        files.sync(parent)
        with contextlib.suppress(OSError):
            files.remove(old)

    # ------------------------------------------------------------------------------------------- its end

    def _abandon(self) -> None:
        """Give up the save.  Never raises."""
        self._is_cancelled = True
        self._look_now.set()
        self._done.wait()
        self._remove()
        self._end(committed=False)

    def _remove(self) -> None:
        """Remove the folder on the rank that made it; what cannot be removed is left to the next save."""
        if self._communicator.rank == 0 and self._folder:
            with contextlib.suppress(OSError):
                files.remove(self._folder)

    def _end(self, *, committed: bool) -> None:
        """Note the outcome, which all ranks know now."""
        self._is_known = True
        self.is_committed, self.has_failed = committed, not committed
        self._manifest = dataclasses.replace(self._manifest, items={})
        if self._lock is not None:
            self._lock.close()

    def __repr__(self) -> str:
        how = "committed" if self.is_committed else "failed" if self.has_failed else "not committed yet"
        return f"<Saving {self.path!r}, {how}>"


# ------------------------------------------------------------------------------------------- the end of the program

#: The saves with ``wait=False`` of which the outcome is not known to all ranks.
_open: list[Saving] = []
_watches_the_end = False


def _note(saving: Saving) -> None:
    """Have the end of the program wait for a save."""
    global _watches_the_end
    _open[:] = [earlier for earlier in _open if not earlier._is_known]
    _open.append(saving)
    if not _watches_the_end:
        _watches_the_end = True
        before_abort.append(_at_the_end)
        atexit.register(_at_the_end)
        os.register_at_fork(after_in_child=_open.clear)  # they are the parent's


def _at_the_end() -> None:
    while _open:
        _open.pop()._end_of_program()
