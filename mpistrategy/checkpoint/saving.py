"""Writing a checkpoint: it is complete or absent, whatever ends the job and whichever rank fails.

1. Rank 0 makes a folder with a unique name beside the final one.
2. What each rank has for itself goes to the writers (`collecting`).  Each of them writes one shard there and
   syncs it to the disk.  This may run in a thread, from copies.
3. Rank 0 gets the sizes and checksums from the writers.  It writes the manifest, last, syncs it, and renames the
   folder.  Before the rename there is no new checkpoint, after it there is a complete one.

An error on one rank raises on all, and the folder is removed; an older checkpoint is not touched before step 3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.collecting import Collected
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.files import CHECKSUM_BYTES, TOKEN, TOKEN_LETTERS, Folder, make_folders, writing
from mpistrategy.checkpoint.storage.manifest import NAME, ONE, Manifest, Shard, is_checkpoint
from mpistrategy.checkpoint.storage.shards import check_can_be_read, pieces_of, shard_name
from mpistrategy.errors import CheckpointExistsError, CheckpointWriteError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import WRITING, collective
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.job.launcher import version
from mpistrategy.objects.copies import NotPickled

#: Names of the folder of checkpoint {}, while it is written and while it is replaced.
SAVING, REPLACED = ".{}.saving-", ".{}.replaced-"
#: What a writer tells rank 0: a size and a checksum.
REPORT = np.dtype([("nbytes", np.int64), ("checksum", np.uint8, CHECKSUM_BYTES)])


class Saving(NotPickled):
    """A checkpoint that is being written; what `Checkpoint.save` returns.

    Args:
        communicator: the ranks.
        path: the folder.
        overwrite: whether to replace an existing checkpoint.
        layout: `Strategy.layout()`.

    Attributes:
        path: the folder.
        is_committed: whether the checkpoint is complete, as far as this rank knows.
        has_failed: whether it has failed.
    """

    _instead_of_pickling = "Send its path."

    def __init__(self, communicator: Communicator, path: str, overwrite: bool, layout: dict[str, Any]) -> None:
        self.path = path
        self.is_committed: bool = False
        self.has_failed: bool = False
        self._communicator = communicator
        self._overwrite = overwrite
        self._parent: Folder | None = None
        self._folder: Folder | None = None
        self._temporary = ""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._report = np.zeros(1, REPORT)
        self._values: dict[str, Any] = {}
        self._collected: Collected | None = None
        self._layout = layout

    # ------------------------------------------------------------------------------------------- the steps

    def _begin(self, state: State, call: Call, prepare: Callable[[], object], *, wait: bool) -> None:
        """Do steps 1 and 2; without `wait`, start step 2 in a thread.  Collective; the caller cleans up after errors.

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
        self._temporary = SAVING.format(os.path.basename(self.path)) + token.tobytes().decode()
        state.decide(digests, self._communicator)
        collected, self._values = Collected(state, self._communicator, call), state.values
        self._collected = collected
        if collected.shard is not None:
            with writing(call.where, self.path):
                self._open(call.where)
        if wait:
            if collected.shard is not None:
                self._write(collected, collected.shard)
            return
        collected.arrays = {name: np.array(array, copy=True) for name, array in collected.arrays.items()}
        call.agree("begin to write")  # no rank starts to write if another cannot
        if collected.shard is not None:
            self._thread = threading.Thread(
                target=self._write, args=(collected, collected.shard), name=f"checkpoint {self.path}"
            )
            self._thread.start()
        if self._communicator.rank == 0:
            self._reminder: Any = weakref.finalize(self, _remind, self.path, os.getpid())

    def _make_folder(self, where: str) -> None:
        parent, name = os.path.split(self.path)
        make_folders(parent)
        self._parent = Folder.parent_of(self.path)
        self._check_place(where, self._parent, name)
        held = self._parent.sweep(saving_names(name))  # left by jobs that have ended: nobody holds their locks
        if not held:
            self._temporary = self._parent.new_folder(SAVING.format(name))
            self._folder = self._parent.folder(self._temporary)
        if held or (self._folder is not None and self._folder.lock() is False):
            raise CheckpointExistsError.at(
                where,
                found=f"{held or self._temporary!r}: another save to {self.path!r} has begun and not ended",
                expected="one at a time",
                fix="Give each job a folder of its own; and wait() for what save(..., wait=False) returned.",
            )

    def _check_place(self, where: str, parent: Folder, name: str) -> bool:
        """Return whether there is a checkpoint to replace; raise if the name is taken."""
        kind = parent.kind_of(name)
        if kind == "folder":
            with parent.folder(name) as there:
                if not there.names():
                    return False
                is_one = is_checkpoint(there)
            if is_one and self._overwrite:
                return True
            kind = "a checkpoint" if is_one else "a folder with other things in it"
        if kind:
            raise CheckpointExistsError.at(
                where,
                found=f"{kind} at {self.path!r}",
                expected="nothing there",
                fix="Give each checkpoint a name of its own (CheckpointManager does), or pass overwrite=True, which "
                "replaces a checkpoint and nothing else.",
            )
        return False

    def _open(self, where: str) -> None:
        if self._folder is not None:
            return
        self._parent = Folder.parent_of(self.path)
        try:
            self._folder = self._parent.folder(self._temporary)
        except FileNotFoundError as error:
            raise CheckpointWriteError.at(
                where,
                found=f"no {self._temporary!r} in {self._parent.path!r}, where rank 0 has made it",
                expected="a file system that the nodes of all ranks share",
            ) from error

    @collective(WRITING)
    def _write(self, collected: Collected, shard: int) -> None:
        """Write this rank's shard; keep an error for `commit`."""
        assert self._folder is not None
        name = shard_name(shard)
        try:
            with writing("Checkpoint.save", os.path.join(self._folder.path, name)):
                nbytes, checksum = self._folder.write(name, pieces_of(collected.arrays))
            self._report[0] = nbytes, np.frombuffer(bytes.fromhex(checksum), np.uint8)
        except BaseException as error:
            self._error = error
        collected.arrays = {}

    @property
    def is_written(self) -> bool:
        """Whether this rank's shard is on the disk; `wait` is still needed."""
        return self.is_committed or self._thread is None or not self._thread.is_alive()

    def wait(self, *, name: str | None = None) -> str:
        """Wait for all ranks' shards and complete the checkpoint; return its path.  Collective.

        Needed after ``save(wait=False)``; the next save or restore of that Checkpoint does it, too.

        Args:
            name: is compared between the ranks instead of the call site.

        Raises:
            CheckpointWriteError, CheckpointExistsError: on every rank; there is no new checkpoint then.
        """
        if self.has_failed:
            raise CheckpointWriteError.at("Saving.wait", found="a checkpoint that failed before", expected="a new save")
        if not self.is_committed:
            with self._cleaned_up(), Call(self._communicator.guard, "Saving.wait", called=name) as call:
                self._commit(call)
        return self.path

    def _commit(self, call: Call) -> None:
        """Do step 3.  Collective; the caller cleans up after errors."""
        call.expect_more()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        call.agree("write a checkpoint", destination=self.path, patiently=True)
        reports = self._gather_reports()
        call.expect_more()
        if self._communicator.rank == 0:
            with writing(call.where, self.path):
                self._finish(call.where, reports)
        call.agree("commit a checkpoint", patiently=True)
        self._end(committed=True)

    def _gather_reports(self) -> Array:
        """Return the reports of the writers, on rank 0."""
        assert self._collected is not None
        rank, writers = self._communicator.rank, self._collected.writers
        reports = np.zeros(len(writers), REPORT)
        blocks = None
        if rank == 0:
            blocks = [reports[:0]] * self._communicator.size
            for number, writer in enumerate(writers):
                blocks[writer] = reports[number : number + 1]
        self._communicator.gather_blocks(self._report if rank in writers else self._report[:0], blocks, 0)
        return reports

    def _finish(self, where: str, reports: Array) -> None:
        assert self._parent is not None
        assert self._folder is not None
        assert self._collected is not None
        values = self._values
        items = {
            path: item if item.is_array or item.copies != ONE else dataclasses.replace(item, values=(values[path],))
            for path, item in self._collected.items.items()
        }
        shards = tuple(
            Shard(int(nbytes), checksum.tobytes().hex(), runs)
            for (nbytes, checksum), runs in zip(reports, self._collected.runs(), strict=True)
        )
        names = tuple(path for path in items if "/" not in path)
        text = Manifest(self._communicator.size, shards, items, names, self._layout, version()).text()
        check_can_be_read(text, where)
        self._folder.write(NAME, [text])
        self._folder.let_group_in(NAME)
        self._folder.sync()
        self._put_in_place(where, self._parent, os.path.basename(self.path))

    def _put_in_place(self, where: str, parent: Folder, name: str) -> None:
        old = ""
        if self._check_place(where, parent, name):
            # If the job is killed between the renames, there must be one replaced checkpoint, not an older one, too.
            if _remove_replaced(parent, name):
                parent.sync()
            old = f"{REPLACED.format(name)}{self._temporary.rpartition('-')[2]}"
            parent.rename(name, old)
        try:
            parent.rename(self._temporary, name)
            self._check_is_ours(where, parent, name)
        except OSError as error:
            if old:
                parent.rename(old, name)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self._overwrite = False
                self._check_place(where, parent, name)  # another job was faster
            raise
        parent.sync()
        _remove_replaced(parent, name)

    def _check_is_ours(self, where: str, parent: Folder, name: str) -> None:
        """Raise, and undo the rename, if somebody has put something else under the temporary name."""
        assert self._folder is not None
        if not parent.holds(name, self._folder):
            parent.rename(name, self._temporary)
            raise CheckpointWriteError.at(
                where,
                found=f"something else at {self._temporary!r} than the folder that was written there",
                expected=f"nobody else who renames things in {parent.path!r}",
            )

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
        left = ""
        if self._thread is not None:
            self._thread.join()
        if self._communicator.rank == 0 and self._parent is not None and self._temporary and not self.is_committed:
            try:
                self._parent.remove(self._temporary)
            except OSError as error:
                path = os.path.join(self._parent.path, self._temporary)
                left = f"What was written is left at {path!r} ({error.strerror}). Nothing restores it; remove it."
        if not self.is_committed:
            self._end(committed=False)
        return left

    def _end(self, *, committed: bool) -> None:
        self.is_committed, self.has_failed = committed, not committed
        self._collected, self._values = None, {}
        reminder = getattr(self, "_reminder", None)
        if reminder is not None:
            reminder.detach()
        for folder in (self._folder, self._parent):
            if folder is not None:
                folder.close()

    def __repr__(self) -> str:
        how = "committed" if self.is_committed else "failed" if self.has_failed else "not committed yet"
        return f"<Saving {self.path!r}, {how}>"


def _remove_replaced(parent: Folder, name: str) -> int:
    """Remove replaced checkpoints of `name`, which is there again; return how many were found.

    Those of other users stay, and those with foreign files.
    """
    found = [other for other in parent.names() if replaced_names(name).fullmatch(other)]
    for other in found:
        with contextlib.suppress(OSError):
            parent.remove(other)
    return len(found)


def saving_names(name: str) -> re.Pattern[str]:
    """Return the pattern of folder names while the checkpoint `name` is written."""
    return re.compile(re.escape(SAVING.format(name)) + TOKEN)


def replaced_names(name: str) -> re.Pattern[str]:
    """Return the pattern of names of the checkpoint `name` once it was replaced."""
    return re.compile(re.escape(REPLACED.format(name)) + TOKEN)


def _remind(path: str, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        sys.stderr.write(
            f"[rank 0] the checkpoint {path!r} is incomplete: wait() was not called after save(..., wait=False)\n"
        )
