"""Writing a checkpoint: it is complete or absent, whatever ends the job and whichever rank fails.

1. Rank 0 makes a folder with a unique name beside the final one.
2. What each rank has for itself goes to the writers (`collecting`).  Each of them writes one shard there and
   syncs it to the disk.
3. Rank 0 gets the sizes and checksums from the writers.  It writes the manifest, last, syncs it, and renames the
   folder.  Before the rename there is no new checkpoint, after it there is a complete one.

An error on one rank raises on all, and the folder is removed; an older checkpoint is not touched before step 3.

With ``wait=False`` threads do steps 2 and 3 from copies, and the ranks exchange no messages: a writer that has finished
makes an empty file in the folder, whose name says the size and the checksum of its shard.  The thread of rank 0 looks
for these files and completes the checkpoint, so the program need not make another call.  An error is raised on all
ranks by the next call that waits for the save.
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
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpistrategy import own_files
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.collecting import Collected
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage import files
from mpistrategy.checkpoint.storage.files import CHECKSUM_BYTES, TOKEN, TOKEN_LETTERS, writing
from mpistrategy.checkpoint.storage.lock import Lock
from mpistrategy.checkpoint.storage.manifest import NAME, ONE, Manifest, Shard, is_checkpoint
from mpistrategy.checkpoint.storage.shards import check_can_be_read, shard_name
from mpistrategy.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.observers import interval
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.job.exit_hooks import before_abort
from mpistrategy.mpi.job.introductions import version
from mpistrategy.objects.copies import NotPickled

#: Names of the folder of checkpoint {}, while it is written and while it is replaced.
SAVING, REPLACED = ".{}.saving-", ".{}.replaced"
#: What a writer tells rank 0: a size and a checksum.
REPORT = np.dtype([("nbytes", np.int64), ("checksum", np.uint8, CHECKSUM_BYTES)])
#: The empty files of threads that have written their shard, with its number, size and checksum; or have failed.
_DONE, _FAILED = "done-{}-{}-{}", "failed-{}"
_MARK = re.compile(r"done-([0-9]{1,9})-([0-9]{1,19})-([0-9a-f]{32})|failed-[0-9]{1,9}")
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
        is_committed: whether the checkpoint is in place, as far as this rank knows: rank 0 sees it at once, the others
            in the next call that waits for it.
        has_failed: whether it has failed, as all ranks know after such a call.
    """

    _instead_of_pickling = "Send its path."

    def __init__(self, communicator: Ranks, path: str, overwrite: bool, layout: dict[str, Any]) -> None:
        self.path = path
        self.is_committed: bool = False
        self.has_failed: bool = False
        self._communicator = communicator
        self._overwrite = overwrite
        self._parent, self._name = os.path.split(path)
        #: The name of the folder that is written, and on rank 0 its lock.
        self._temporary = ""
        self._lock: Lock | None = None
        self._values: dict[str, Any] = {}
        self._collected: Collected | None = None
        self._layout = layout
        #: The thread, where there is one; whether this rank has written its shard, and whether another rank has failed.
        self._thread: threading.Thread | None = None
        self._written, self._cancelled = threading.Event(), threading.Event()
        #: What has failed in the thread of this rank; and what all ranks know of it and no call has raised.
        self._error: BaseException | None = None
        self._failure: CheckpointError | None = None
        #: Whether all ranks know the outcome.
        self._is_known = False

    # ------------------------------------------------------------------------------------------- the steps

    def _begin(self, state: State, call: Call, prepare: Callable[[], object], *, wait: bool) -> None:
        """Do all steps; without `wait`, start steps 2 and 3 in threads.  Collective; the caller cleans up after errors.

        Rank 0 calls `prepare` first.
        """
        call.expect_more()
        digests = state.digests()
        if self._communicator.rank == 0:
            with writing(call.where, self.path):
                prepare()
                self._make_folder(call.where)
        call.agree("make a folder")
        token = np.frombuffer(bytearray(self._temporary[-TOKEN_LETTERS:].encode() or TOKEN_LETTERS), np.uint8)
        self._communicator.bcast(token, 0)
        self._temporary = SAVING.format(self._name) + token.tobytes().decode()
        state.decide(digests, self._communicator)
        collected, self._values = Collected(state, self._communicator, call), state.values
        self._collected = collected
        if collected.shard is not None:
            self._check_is_shared(call.where)
        if wait:
            report = self._write(collected) if collected.shard is not None else np.zeros(0, REPORT)
            call.agree("write a checkpoint", destination=self.path, patiently=True)
            reports = self._gather_reports(report)
            call.expect_more()
            if self._communicator.rank == 0:
                with writing(call.where, self.path):
                    self._finish(call.where, reports)
            call.agree("commit a checkpoint", patiently=True)
            self._end(committed=True)
            return
        collected.pieces = [bytes(piece) for piece in collected.pieces]
        if self._communicator.rank == 0:
            self._text(call.where, np.zeros(len(collected.writers), REPORT))  # too much of it is refused here
        call.agree("begin to write")  # no rank starts to write if another cannot
        _note(self)
        if collected.shard is None:
            self._written.set()
            return
        thread = threading.Thread(target=self._work, name=f"checkpoint {self.path}")
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # no more threads for this user, or no memory for one
            self._work()
        else:
            self._thread = thread

    def _make_folder(self, where: str) -> None:
        own_files.make_folders(self._parent)
        self._check_place(where)
        held = files.sweep(self._parent, saving_names(self._name))  # left by jobs that have ended: no locks
        if not held:
            self._temporary = os.path.basename(files.new_folder(os.path.join(self._parent, SAVING.format(self._name))))
            with contextlib.suppress(BlockingIOError):
                self._lock = files.hold(self._temporary_path)
        if self._lock is None:
            raise CheckpointExistsError.at(
                where,
                found=f"{held or self._temporary!r}: another save to {self.path!r} has begun and not ended",
                expected="one at a time",
                fix="Give each job a folder of its own; and wait() for what save(..., wait=False) returned.",
            )

    def _check_place(self, where: str) -> bool:
        """Return whether there is a checkpoint to replace; raise if the name is taken."""
        if not os.path.lexists(self.path) or (files.is_folder(self.path) and not os.listdir(self.path)):
            return False
        is_one = is_checkpoint(self.path)
        if is_one and self._overwrite:
            return True
        raise CheckpointExistsError.at(
            where,
            found=f"{'a checkpoint' if is_one else 'something else than a checkpoint'} at {self.path!r}",
            expected="nothing there",
            fix="Give each checkpoint a name of its own (CheckpointManager does), or pass overwrite=True, which "
            "replaces a checkpoint and nothing else.",
        )

    def _check_is_shared(self, where: str) -> None:
        if not os.path.lexists(self._temporary_path):
            raise CheckpointWriteError.at(
                where,
                found=f"no {self._temporary!r} in {self._parent!r}, where rank 0 has made it",
                expected="a file system that the nodes of all ranks share",
            )

    def _write(self, collected: Collected) -> Array:
        """Write this rank's shard; return the report."""
        assert collected.shard is not None
        path = os.path.join(self._temporary_path, shard_name(collected.shard))
        with interval("span", "write a checkpoint"), writing("Checkpoint.save", path):
            nbytes, checksum = files.write(path, collected.pieces)
        collected.pieces = []
        report = np.zeros(1, REPORT)
        report[0] = nbytes, np.frombuffer(bytes.fromhex(checksum), np.uint8)
        return report

    # ------------------------------------------------------------------------------------------- in a thread

    def _work(self) -> None:
        """Write this rank's shard; on rank 0, complete the checkpoint when all are written.  Keep errors for `wait`."""
        collected = self._collected
        assert collected is not None
        try:
            report = self._write(collected)
            if self._communicator.rank:
                with writing("Checkpoint.save", self.path):
                    ((nbytes, checksum),) = report
                    self._mark(_DONE.format(collected.shard, nbytes, checksum.tobytes().hex()))
                return
            self._written.set()
            with writing("Checkpoint.save", self.path):
                reports = self._marked_reports(report)
                if reports is None:
                    self._remove()
                    return
                self._finish("Checkpoint.save", reports)
            self.is_committed = True
        except BaseException as error:
            if self._communicator.rank == 0:
                self._error = error
                self._remove()
            elif os.path.lexists(self._temporary_path):  # else rank 0 has removed it, because another rank has failed
                self._error = error
                with contextlib.suppress(OSError):
                    self._mark(_FAILED.format(collected.shard))
        finally:
            collected.pieces = []
            self._written.set()
            self._close()

    def _mark(self, name: str) -> None:
        files.write(os.path.join(self._temporary_path, name), [])

    def _marked_reports(self, mine: Array) -> Array | None:
        """Wait until all writers have made their marks, and remove them; return the reports, None after a failure.

        Raises:
            CheckpointWriteError: when nothing has moved in the folder for as long as a collective may wait.
        """
        assert self._collected is not None
        reports = np.zeros(len(self._collected.writers), REPORT)
        reports[0] = mine[0]
        if len(reports) == 1:
            return reports
        is_alive = _Progress(self._communicator.guard.timeout)
        marks: list[re.Match[str]] = []
        for pause in _pauses():
            folder = self._temporary_path
            marks = [mark for mark in map(_MARK.fullmatch, os.listdir(folder)) if mark is not None]
            if self._cancelled.is_set() or any(mark[1] is None for mark in marks):
                return None
            if len(marks) == len(reports) - 1:
                break
            if not is_alive.look(folder):
                raise CheckpointWriteError.at(
                    "Checkpoint.save",
                    found=f"{len(marks) + 1} of {len(reports)} shards, and nothing that moves in {folder!r}",
                    expected="ranks that write their shards",
                )
            self._cancelled.wait(pause)
        for mark in marks:
            number, nbytes, checksum = int(mark[1]), int(mark[2]), bytes.fromhex(mark[3])
            reports[number] = nbytes, np.frombuffer(checksum, np.uint8)
            files.unlink(os.path.join(self._temporary_path, mark[0]))
        return reports

    @property
    def _temporary_path(self) -> str:
        return os.path.join(self._parent, self._temporary)

    def _is_over(self) -> bool:
        """Return whether the threads of all ranks have ended: then the folder has its final name, or is gone."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._is_known or self._communicator.rank == 0:  # whose thread ends last
            return True
        return not os.path.lexists(self._temporary_path)

    def _wait_until_over(self) -> None:
        """At the end of the program, which no other rank is told of: wait for the threads of all ranks."""
        is_alive = _Progress(_STALLED_SECONDS)
        for pause in _pauses():
            if self._is_over():
                return
            if not is_alive.look(self._temporary_path):
                return
            time.sleep(pause)

    def _is_left(self) -> bool:
        """Return whether the end of the program must look at it."""
        return not self._is_known and (self._error is not None or not self._is_over())

    def _end_of_program(self) -> None:
        """Wait for the threads, and tell of what has failed and no call has raised."""
        if self._is_known:
            return
        with contextlib.suppress(KeyboardInterrupt):  # the user does not want to wait
            self._wait_until_over()
        if self._error is not None:
            rank, reason = self._communicator.rank, _reason(self._error)
            sys.stderr.write(f"[rank {rank}] the checkpoint {self.path!r} was not saved: {reason}\n")

    # ------------------------------------------------------------------------------------------- what ranks wait for

    @property
    def is_written(self) -> bool:
        """Whether this rank's shard is on the disk; the checkpoint is in place when those of all ranks are."""
        return self.is_committed or self._written.is_set()

    def wait(self, *, name: str | None = None) -> str:
        """Wait until the checkpoint is in place; return its path.  Collective.

        The checkpoint comes into place without it: this call says when, and raises what has failed.

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
        """Wait for the threads of all ranks, for the public call `where`.  Collective; keeps what has failed."""
        if self._is_known:
            return
        try:
            with Call(self._communicator.guard, where, called=name) as call:
                call.expect_more()
                self._written.wait()
                self._tell_error()
                call.agree("write a checkpoint", destination=self.path, patiently=True)
                call.expect_more()
                if self._thread is not None:
                    self._thread.join()
                self._tell_error()
                call.agree("commit a checkpoint", patiently=True)
                self._end(committed=True)
        except CheckpointError as error:  # on all ranks; after other errors the threads go on
            self._failure = error
            self._abandon()

    def _tell_error(self) -> None:
        """Raise what has failed in the thread of this rank, for the other ranks to hear."""
        error = self._error
        if error is not None:
            kind = type(error) if isinstance(error, CheckpointError) else CheckpointWriteError
            raise kind(_reason(error)) from error

    def _raise_failure(self, where: str) -> None:
        """Raise what has failed, once, on every rank: the same error, in the public call `where`."""
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        text = str(failure)
        if failure.rank is not None:  # its text says first which call that rank could not make
            text = text.partition(f": {type(failure).__name__}: ")[2] or text
        rank = self._communicator.rank if failure.rank is None else failure.rank
        raise type(failure).at(
            where,
            found=f"that the save of {os.path.basename(self.path)!r} with wait=False has failed on rank {rank}: {text}",
            expected="a folder that every rank can write to, with room in it",
            fix="Nothing is left of that save. This call has done nothing else; another one will.",
        ) from failure

    # ------------------------------------------------------------------------------------------- completing it

    def _gather_reports(self, report: Array) -> Array:
        """Return the reports of the writers, on rank 0."""
        assert self._collected is not None
        ranks, writers = self._communicator, self._collected.writers
        together, reports = np.zeros((2, len(writers)), REPORT)
        counts = np.bincount(writers, minlength=ranks.size).tolist()
        ranks.gatherv(report, counts, together if ranks.rank == 0 else None, 0)
        reports[np.argsort(writers)] = together
        return reports

    def _text(self, where: str, reports: Array) -> bytes:
        """Return the manifest; raise OptionError for one that `restore` would refuse."""
        assert self._collected is not None
        values = self._values
        items = {
            path: item if item.is_array or item.copies != ONE else dataclasses.replace(item, values=(values[path],))
            for path, item in self._collected.items.items()
        }
        shards = tuple(
            Shard(int(nbytes), checksum.tobytes().hex(), writer)
            for (nbytes, checksum), writer in zip(reports, self._collected.writers, strict=True)
        )
        names = tuple(path for path in items if "/" not in path)
        text = Manifest(self._communicator.size, shards, items, names, self._layout, version()).text()
        check_can_be_read(text, where)
        return text

    def _finish(self, where: str, reports: Array) -> None:
        files.write(os.path.join(self._temporary_path, NAME), [self._text(where, reports)])
        files.sync(self._temporary_path)
        old = os.path.join(self._parent, REPLACED.format(self._name))
        is_there = self._check_place(where)
        if is_there:
            _remove_replaced(old)
            files.rename(self.path, old)
        try:
            files.rename(self._temporary_path, self.path)
        except OSError as error:
            if is_there:
                files.rename(old, self.path)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self._overwrite = False
                self._check_place(where)  # another job was faster
            raise
        files.sync(self._parent)
        with contextlib.suppress(OSError):
            _remove_replaced(old)

    # ------------------------------------------------------------------------------------------- its end

    @contextlib.contextmanager
    def _cleaned_up(self) -> Any:
        """Remove the partial checkpoint if the block fails; a note to the error says if it cannot be removed."""
        try:
            yield
        except BaseException as error:
            left = self._abandon()
            if left:
                error.add_note(left)
            raise

    def _abandon(self) -> str:
        """Remove the folder on the rank that made it; return what is left, in words.  Never raises."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()
        left = self._remove()
        self._end(committed=False)
        return left

    def _remove(self) -> str:
        """Remove the folder on the rank that made it; return what is left, in words.  Never raises."""
        if self._communicator.rank == 0 and self._temporary:
            try:
                files.remove(self._temporary_path)
            except FileNotFoundError:  # removed before
                return ""
            except OSError as error:
                path = self._temporary_path
                return f"What was written is left at {path!r} ({error.strerror}). Nothing restores it; remove it."
        return ""

    def _end(self, *, committed: bool) -> None:
        """Note the outcome, which all ranks know now."""
        self._is_known = True
        self.is_committed, self.has_failed = committed, not committed
        self._collected, self._values = None, {}
        self._close()

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __repr__(self) -> str:
        how = "committed" if self.is_committed else "failed" if self.has_failed else "not committed yet"
        return f"<Saving {self.path!r}, {how}>"


def _remove_replaced(path: str) -> None:
    """Remove a checkpoint that was replaced, or what is left of it.  Anything else that is there stays."""
    if files.is_folder(path) and not files.foreign(path):
        files.remove(path)


def saving_names(name: str) -> re.Pattern[str]:
    """Return the pattern of folder names while the checkpoint `name` is written."""
    return re.compile(re.escape(SAVING.format(name)) + TOKEN)


def _pauses() -> Iterator[float]:
    """Yield the seconds between two looks into a folder."""
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def _reason(error: BaseException) -> str:
    found = error.found if isinstance(error, CheckpointError) else ""
    return found or f"{type(error).__name__}: {error}"


class _Progress:
    """Whether something moves in a folder: the names and sizes in it are compared once in a while.

    Args:
        seconds: how long nothing may move.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds
        self._seen: dict[str, int] = {}

    def look(self, folder: str) -> bool:
        """Return False if nothing has moved for so long."""
        if time.monotonic() < self._next:
            return True
        before, self._seen = self._seen, {}
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            self._seen = {entry.name: entry.stat().st_size for entry in entries}
        self._next = time.monotonic() + self._seconds
        return self._seen != before


# ------------------------------------------------------------------------------------------- the end of the program

#: The saves with ``wait=False`` of which the outcome is not known to all ranks.
_open: list[Saving] = []
_watches_the_end = False


def _note(saving: Saving) -> None:
    """Have the end of the program wait for a save."""
    global _watches_the_end
    _open[:] = [other for other in _open if other._is_left()]
    _open.append(saving)
    if not _watches_the_end:
        _watches_the_end = True
        before_abort.append(_at_the_end)
        atexit.register(_at_the_end)
        os.register_at_fork(after_in_child=_open.clear)  # they are the parent's


def _at_the_end() -> None:
    while _open:
        _open.pop()._end_of_program()
