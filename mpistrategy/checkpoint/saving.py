"""Writing a checkpoint: it is complete or absent, whatever ends the job and whichever rank fails.

1. Rank 0 makes a folder with a unique name beside the final one.
2. One rank writes a small checkpoint, some on each node a large one.  Per-rank data go to the writers.  Each writer
   writes one shard into the folder and syncs it to the disk: the data of some ranks, and a part of the arrays that are
   saved once, which every rank has.
3. Rank 0 gets the sizes and checksums from the writers.  It writes the manifest, last, syncs it, and renames the
   folder.  Before the rename there is no new checkpoint, after it there is a complete one.

An error on one rank raises on all, and the folder is removed; an older checkpoint is not touched before step 3.

Threads write the shards and do step 3, with ``wait=False`` from copies, and exchange no messages: a writer that has
finished renames its shard, and the name says the size and the checksum.  The thread of rank 0 looks for these names,
gives the shards their final ones and completes the checkpoint, so the program need not make another call.  An error is
raised on all ranks by the call that waits for the save.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrategy import own_files
from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint import files
from mpistrategy.checkpoint.format import (
    LENGTH_BYTES,
    MOST_SHARDS,
    NAME,
    ONE,
    REPLACED,
    Manifest,
    by_width,
    dumps,
    is_checkpoint,
    of_each_rank,
    pieces_of,
    places,
    raw,
    shard_name,
    shares,
)
from mpistrategy.checkpoint.state import State
from mpistrategy.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.observers import interval
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.job.exit_hooks import before_abort
from mpistrategy.mpi.job.launcher import version
from mpistrategy.objects.settings import NotPickled

_WHERE = "Checkpoint.save"
#: The name of the folder of checkpoint {} while it is written, before a token.
SAVING = ".{}.saving-"
#: The name of a shard that is written: its number, size and checksum; and of the empty file of a rank that has failed.
_DONE, _FAILED = "done-{:09}-{}-{}", "failed-"
#: The seconds between two looks of rank 0 at the marks; a metadata server has other things to do.
_PAUSE = 0.03
#: At the end of the program, how long nothing may move in the folder of a save before it is given up.
_STALLED_SECONDS = 60.0

#: A checkpoint gets one writer for so many bytes.
BYTES_A_WRITER = 2**26
#: The most writers of a node, and of the job if it has fewer nodes.  There are more where the ranks have too much
#: per-rank data for one writer to gather.
MOST_A_NODE, MOST_WRITERS = 8, 1024


class Saving(NotPickled):
    """A checkpoint that is being written; what `Checkpoint.save` returns.

    Args:
        communicator: the ranks.
        path: the folder.
        overwrite: whether to replace an existing checkpoint.

    Attributes:
        path: the folder.
        is_committed: whether the checkpoint is in place, as far as this rank knows: rank 0 sees it at once, the other
            ranks in the next call that waits for it.
        has_failed: whether the save has failed, as all ranks know after such a call.
    """

    _instead_of_pickling = "Send its path."

    def __init__(self, communicator: Ranks, path: str, overwrite: bool) -> None:
        self.path = path
        self.is_committed: bool = False
        self.has_failed: bool = False
        self._communicator = communicator
        self._overwrite = overwrite
        self._process = os.getpid()
        #: The folder while it is written, and its lock.
        self._folder = ""
        self._lock: files.Lock | None = None
        #: Whether this rank has written its shard; and whether its thread is done.
        self._written, self._done = threading.Event(), threading.Event()
        self._done.set()
        #: The error in the thread of this rank; then the error that all ranks know and no call has raised.
        self._error: CheckpointError | None = None
        #: Whether all ranks know the outcome.
        self._is_known = False

    # ------------------------------------------------------------------------------------------- the steps

    def _begin(self, state: State, call: Call, *, wait: bool) -> None:
        """Do step 1, start the threads, and with `wait`, wait for them.

        Collective; the caller abandons it on errors.
        """
        state.take_digests()
        if self._communicator.rank == 0:
            with files.writing(call.where, self.path):
                self._make_folder(call.where)
        call.agree("make a folder")
        self._folder = self._communicator.allgather_text(self._folder)[0]
        state.decide()
        writers, own, pieces = collect(state, self._communicator, call)
        manifest = Manifest(self._communicator.size, [], state.items, own, state.strategy.layout(), version())
        if pieces and not files.is_folder(self._folder):
            raise CheckpointWriteError.at(
                call.where,
                found=f"nothing at {self._folder!r}, where rank 0 has made a folder",
                expected="a file system that the nodes of all ranks share",
            )
        if not wait:
            pieces = [bytes(piece) for piece in pieces]
        if self._communicator.rank == 0:
            manifest.text(call.where)  # too much of it is refused here
        call.agree("begin to write")  # no rank starts to write if another cannot
        if pieces:
            self._done.clear()
            try:
                threading.Thread(
                    target=self._work, args=(pieces, manifest, writers), name=f"checkpoint {self.path}"
                ).start()
            except (RuntimeError, MemoryError):  # no more threads for this user, or no memory for one
                self._work(pieces, manifest, writers)
        else:
            self._written.set()
        if wait:
            self._join(call)
        else:
            atexit.register(self._end_of_program)
            before_abort.append(self._end_of_program)

    def _make_folder(self, where: str) -> None:
        parent, name = os.path.split(self.path)
        files.make_folders(parent)
        self._check_place(where)
        # Folders of jobs that have ended: nobody holds their locks.
        if locked := files.sweep(parent, re.compile(re.escape(SAVING.format(name)) + files.TOKEN)):
            raise CheckpointExistsError.at(
                where,
                found=f"{locked!r}: another save to {self.path!r} has begun and not ended",
                expected="one at a time",
                fix="Give each job a folder of its own; and wait() for what save(..., wait=False) returned.",
            )
        self._folder = os.path.join(parent, SAVING.format(name) + os.urandom(8).hex())
        files.change(own_files.make_folder, self._folder)
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

    def _work(self, pieces: list[Any], manifest: Manifest, writers: Sequence[int]) -> None:
        """Write this rank's shard; on rank 0, complete the checkpoint when all are there.  Errors wait for `_join`."""
        rank = self._communicator.rank
        path = os.path.join(self._folder, shard_name(writers.index(rank)))
        try:
            with files.writing(_WHERE, path):
                with interval("span", "write a checkpoint"):
                    name = _DONE.format(writers.index(rank), *files.write(path, pieces))
                    files.change(os.rename, path, os.path.join(self._folder, name))
                pieces.clear()
                self._written.set()
                if rank == 0:
                    self._complete(manifest, len(writers))
        except CheckpointError as error:
            if rank == 0 or os.path.lexists(self._folder):  # else rank 0 has removed it, and says why
                self._error = error
                with contextlib.suppress(OSError):
                    files.write(os.path.join(self._folder, f"{_FAILED}{rank}"), [])
            self._remove()
        finally:
            pieces.clear()  # also what an error's traceback would hold
            self._written.set()
            self._done.set()

    def _looks(self, seconds: float) -> Iterator[list[str]]:
        """Yield the names in the folder, again and again, until no file in it has grown or moved for so many seconds.

        The folder is opened anew for each look: network file systems then ask the server for the names.
        """
        end = time.monotonic() + seconds
        sizes: dict[str, float] = {"": 0.0}
        while True:
            yield os.listdir(self._folder)
            if time.monotonic() > end:
                before, sizes = sizes, {"": end}
                with contextlib.suppress(FileNotFoundError):  # a writer renames its shard in this moment
                    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self._folder)}
                if sizes == before:
                    return
                end = time.monotonic() + seconds
            time.sleep(_PAUSE)

    def _end_of_program(self) -> None:
        """Wait for the threads of all ranks, without a message to them; print the error that no call has raised.

        When they have ended, the folder has its final name, or is gone.
        """
        if self._process != os.getpid():  # a forked child: it is the parent's
            return
        with contextlib.suppress(KeyboardInterrupt, OSError):  # the user does not want to wait; or the folder is gone
            for _ in self._looks(_STALLED_SECONDS):
                if self._communicator.rank == 0 and self._error is not None:
                    break
        if not os.path.lexists(self._folder):
            self._done.wait()
        if self._error is not None:
            sys.stderr.write(
                f"[rank {self._communicator.rank}] the checkpoint {self.path!r} was not saved: {self._error.found}\n"
            )

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
        if self.has_failed:
            raise CheckpointWriteError.at("Saving.wait", found="a checkpoint that failed before", expected="a new save")
        return self.path

    def _settle(self, where: str, name: str | None = None, *, raises: bool = True) -> None:
        """Wait for the threads of all ranks, for the public call `where`.  Collective.

        With `raises`, raise the error of a failed save, once, on every rank: the same error, in that call.
        """
        if not self._is_known:
            try:
                with Call(self._communicator.guard, where, called=name) as call:
                    self._join(call)
            except CheckpointError as error:  # on all ranks; after other errors the threads go on
                self._error = error
                self._abandon()
        if raises and self._error is not None:
            failure, self._error = self._error, None
            rank = self._communicator.rank if failure.rank is None else failure.rank
            name, text = os.path.basename(self.path), failure.found or str(failure)
            raise type(failure).at(
                where,
                found=f"that the save of {name!r} with wait=False has failed on rank {rank}: {text}",
                expected="a folder that every rank can write to, with room in it",
                fix="Nothing is left of that save. This call has done nothing else; another one will.",
            ) from failure

    def _join(self, call: Call) -> None:
        """Wait for the threads of all ranks; raise the first error on all."""
        for event, step in ((self._written, "write a checkpoint"), (self._done, "commit a checkpoint")):
            call.expect_more()
            event.wait()
            if self._error is not None:
                raise self._error
            call.agree(step, destination=self.path, patiently=True)
        self._end()

    # ------------------------------------------------------------------------------------------- completing it

    def _complete(self, manifest: Manifest, shards: int) -> None:
        """Wait for the shards, write the manifest and put the checkpoint in its place; on rank 0.

        Raises:
            CheckpointWriteError: when nothing has moved in the folder for as long as a collective may wait.
        """
        for names in self._looks(self._communicator.guard.timeout):
            if self.has_failed or any(name.startswith(_FAILED) for name in names):
                self._remove()
                return
            marks = sorted(name for name in names if name.startswith(_DONE[:5]))
            if len(marks) == shards:
                break
        else:
            raise CheckpointWriteError.at(
                _WHERE,
                found=f"shards that are missing, and nothing that moves in {self._folder!r}",
                expected="ranks that write their shards",
            )
        written: list[tuple[int, str]] = []
        for number, mark in enumerate(marks):
            _, _, nbytes, checksum = mark.split("-")
            written.append((int(nbytes), checksum))
            files.change(os.rename, *(os.path.join(self._folder, name) for name in (mark, shard_name(number))))
        files.write(os.path.join(self._folder, NAME), [manifest._replace(shards=written).text(_WHERE)])
        files.sync(self._folder)
        parent, name = os.path.split(self.path)
        old, replaces = os.path.join(parent, REPLACED.format(name)), self._check_place(_WHERE)
        if replaces:
            files.remove(old)  # of a job that was killed: there is at most one
            files.sync(parent)
            files.change(os.rename, self.path, old)
        try:
            files.change(os.rename, self._folder, self.path)
        except OSError:
            if replaces:
                files.change(os.rename, old, self.path)
            raise
        files.sync(parent)
        with contextlib.suppress(OSError):
            files.remove(old)
        self.is_committed = True

    # ------------------------------------------------------------------------------------------- its end

    def _abandon(self) -> None:
        """Give up the save.  Never raises."""
        self.has_failed = True
        self._done.wait()
        self._remove()
        self._end()

    def _remove(self) -> None:
        """Remove the folder on the rank that made it; what cannot be removed is left to the next save.

        It gets another name first: a rank that still writes sees that all of it is gone, not a part.
        """
        if self._communicator.rank == 0 and self._folder:
            hidden = self._folder[:-8] + os.urandom(4).hex()  # another token, so that a sweep knows it, too
            with contextlib.suppress(OSError):
                files.change(os.rename, self._folder, hidden)
                self._folder = hidden  # a file may come meanwhile: `_abandon` removes what is left
                files.remove(hidden)

    def _end(self) -> None:
        """Note the outcome, which all ranks know now."""
        self._is_known = True
        self.is_committed = not self.has_failed
        atexit.unregister(self._end_of_program)
        if self._end_of_program in before_abort:
            before_abort.remove(self._end_of_program)
        if self._lock is not None:
            self._lock.close()

    def __repr__(self) -> str:
        return f"<Saving {self.path!r}, is_committed={self.is_committed}, has_failed={self.has_failed}>"


# ------------------------------------------------------------------------------------------- who writes what


def count_of_writers(node_of: Sequence[int], nbytes: int, own_bytes: int) -> int:
    """Return how many ranks write so many bytes, of which the ranks have some for themselves."""
    nodes = max(node_of) + 1
    most = max(min(MOST_A_NODE * nodes, max(nodes, MOST_WRITERS)), -(-own_bytes // BYTES_A_WRITER))
    return max(1, min(-(-nbytes // BYTES_A_WRITER), most, len(node_of), MOST_SHARDS))


def collect(state: State, ranks: Ranks, call: Call) -> tuple[list[int], list[int], list[Any]]:
    """Return the writers, `Manifest.own`, and the bytes of the shard that this rank writes, none if it writes none.

    Collective.  The ranks have agreed on the items that are saved once.  They expect one more agreement: a rank that
    has no memory for its part tells the other ranks.

    Raises:
        OptionError: on every rank, for more plain values of a rank than `restore` accepts.
    """
    call.expect_more()
    block = _own(state, ranks.rank, call.where)
    call.agree("take what each rank has")
    nbytes = sum(array.nbytes for array in block.values())
    sizes = [*map(int, ranks.allgather_text(str(nbytes)))]
    once = sum(item.nbytes for item in state.items.values() if item.dtype and item.copies == ONE)
    count = count_of_writers(ranks.node_of, once + sum(sizes), sum(sizes))
    writers, shard_of = places(ranks.node_of, count, ranks.size)
    call.expect_more()
    contents = {**block}
    if block and count < ranks.size:
        counts = [0] * ranks.size
        counts[writers[shard_of[ranks.rank]]] = nbytes
        received, taken = ranks.exchange(call, np.concatenate([*map(raw, block.values())]), counts)
        call.expect_more()
        blocks = np.split(received, np.cumsum(taken)[:-1])
        contents = {f"_rank {rank}": data for rank, data in enumerate(blocks) if data.size}
    for path, parts in shares(state.items, count).items():
        for number, begin, stop in parts:
            if writers[number] == ranks.rank:
                array, is_whole = state.arrays[path], len(parts) == 1
                name = path if is_whole else f"_part {begin}:{stop} of {path}"
                contents[name] = host_array(array if is_whole else array.reshape(-1)[begin:stop])
    return writers, sizes if block else [], pieces_of(contents) if ranks.rank in writers else []


def _own(state: State, rank: int, where: str) -> dict[str, Array]:
    """Return the data of this rank; nothing if no rank has any."""
    items = of_each_rank(state.items)
    if not items:
        return {}
    values = {path: state.arrays[path].shape if items[path].dtype else state.values[path] for path in items}
    arrays = {f"_rank {rank} {path}": host_array(state.arrays[path]) for path in by_width(items)}
    line = dumps(values, where)
    line += len(line).to_bytes(LENGTH_BYTES, "little")
    return {**arrays, f"_rank {rank}": np.frombuffer(line, np.uint8)}
