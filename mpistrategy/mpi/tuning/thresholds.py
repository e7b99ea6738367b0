"""Which route a value takes, by its size: thresholds that were measured, one set for all ranks; and their files.

There is a file for each MPI, number of ranks on a node and number of nodes.  `mpistrategy bench --save` writes them to
``$XDG_CACHE_HOME/mpistrategy`` (``~/.cache/mpistrategy``), where every new strategy looks for its own.
MPISTRATEGY_PATHS=FILE names another file; MPISTRATEGY_PATHS= (empty) means the defaults.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from mpistrategy import own_files
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call_sites import warn

#: The route of `Ranks.allreduce`: none (one rank), between threads, in a node's shared memory; within nodes and
#: between them, with every rank as a lane; by MPI's Allreduce; and by MPI's Reduce and Bcast, which an algorithm may
#: want instead.
RouteName = Literal["none", "threads", "node_sum", "lanes", "mpi", "root", "alltoallv"]


@dataclass(frozen=True)
class Thresholds:
    """The thresholds, in bytes.

    Attributes:
        cell_bytes: up to here a value travels in the mailboxes of two ranks, with the check of the call; of more ranks
            in proportion less, since every rank reads all mailboxes.
        window_bytes: from here on the ranks of a node add up an array themselves; below it MPI does it.
        chunk_bytes: the bytes that each rank has under way at a time in a sum of the node.
        pack_bytes: arrays below this are packed with others of their dtype.
        lanes_bytes: on several nodes of equally many ranks a buffer is reduced by lanes from here on.  Below it the
            waits for all ranks of the node cost more than they save (4 nodes of 4 ranks, MPICH, CPU over that of a bare
            Allreduce, by lanes and by one Allreduce: 256 KiB 1.9 and 1.4, 1 MiB 1.2 and 1.3).
        source: where the thresholds come from, in words.
    """

    cell_bytes: int = 256 * 2**10
    window_bytes: int = 8 * 2**10
    chunk_bytes: int = 512 * 2**10
    pack_bytes: int = 64 * 2**10
    lanes_bytes: int = 512 * 2**10
    source: str = "the defaults"

    def sizes(self) -> dict[str, int]:
        """Return the thresholds by name: they decide the route of a value, and so the bits of its sum."""
        return {name: size for name, size in asdict(self).items() if name != "source"}


DEFAULT = Thresholds()
#: Where the shipped thresholds differ, by the beginning of the library's name. Intel's own Allreduce is faster up
#: to there (2 ranks, times raw: 512 KiB 1.3, else 1.4; with far cores and `out=` 1.1, else 5).
#: Open MPI's own Allreduce is faster up to there on several nodes.
_OF_LIBRARIES = {
    "Intel": replace(DEFAULT, window_bytes=3 * 2**19),
    "Open MPI": replace(DEFAULT, lanes_bytes=2**20),
}


def default_for(library: str) -> Thresholds:
    """Return the shipped thresholds for an MPI library."""
    return next((thresholds for name, thresholds in _OF_LIBRARIES.items() if library.startswith(name)), DEFAULT)


VARIABLE = "MPISTRATEGY_PATHS"
#: A file is a thousand times smaller.
MOST_BYTES = 2**20
_MOST = 2**40


def file_for(library: str, ranks_on_node: int, nodes: int) -> Path:
    """Return where thresholds are kept for an MPI library, so many ranks on the fullest node, and so many nodes.

    Raises:
        FileNotFoundError: where neither `VARIABLE` names a file nor a home folder is known.
    """
    path = os.environ.get(VARIABLE)
    return expanded(path) if path else kept_file(library, f"{ranks_on_node}x{nodes}")


def kept_file(library: str, of_what: str) -> Path:
    """Return the file that keeps a finding about an MPI library from one job to the next.

    Raises:
        FileNotFoundError: where no home folder is known.
    """
    name = re.sub(r"[^a-z0-9.]+", "-", library.lower()).strip("-.")
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mpistrategy" / f"{name}-{of_what}.json"


def expanded(path: str) -> Path:
    """Return a path with the home folder in place of ``~``.

    Raises:
        FileNotFoundError: where no home folder is known: without HOME and an entry for this user.
    """
    text = os.path.expanduser(path)
    if text.startswith("~"):
        raise FileNotFoundError(errno.ENOENT, "no home folder is known (set HOME, or XDG_CACHE_HOME)", path)
    return Path(text)


def library_name(version: str) -> str:
    """Return the library and its version from MPI's version text: ``"Open MPI v5.0.11"``."""
    first = (version.strip("\0 \n").splitlines() or ["unknown"])[0]
    return " ".join(re.split(r",| for ", first)[0].replace("Version:", "").replace("(R)", "").split())


def replace_whole(file: Path, text: str) -> None:
    """Write a file that others may read meanwhile, maybe on another node with the same home: the old one, or the new.

    Raises:
        OSError: when it cannot be written.
    """
    own_files.make_folders(str(file.parent))
    with own_files.whole_file(str(file)) as draft:
        draft.write(text.encode())
        os.fchmod(draft.fileno(), 0o644)


def save(thresholds: Thresholds, file: Path) -> None:
    """Write thresholds to a file.

    Raises:
        OSError: when it cannot be written.
    """
    replace_whole(file, json.dumps(asdict(thresholds), indent=1) + "\n")


def load(file: Path) -> Thresholds:
    """Return the thresholds of a file.

    Raises:
        OSError: when it cannot be read, or is not a small file of this user's, or root's, own.
        ValueError: when it is not such a file; the text says what is wrong.
    """
    try:
        content = json.loads(own_files.read(str(file), MOST_BYTES).decode())
        found = Thresholds(**{**content, "source": str(file)})
        sizes = found.sizes()
    except (ValueError, RecursionError, TypeError) as error:  # also for what is no UTF-8
        raise ValueError(f"it is no file of thresholds ({reprlib.repr(str(error))})") from error
    for name, size in sizes.items():
        if type(size) is not int or not 64 <= size <= _MOST or size % 64:
            raise ValueError(f"{name} is {reprlib.repr(size)}, expected a multiple of 64 from 64 to {_MOST}")
    return found


def agreed(version: str, rank: int, node_of: Sequence[int], allgather_text: Callable[[str], list[str]]) -> Thresholds:
    """Return the thresholds for these ranks, the same on all of them: the thresholds of rank 0.  Collective.

    A file that cannot be used means the defaults, and one warning on rank 0.

    Args:
        version: MPI's version text.
        rank: this rank.
        node_of: the node of each rank.
        allgather_text: returns the texts of all ranks.
    """
    if _tried:
        return _tried[-1]
    thresholds, complaint = _thresholds_of(library_name(version), node_of) if rank == 0 else (DEFAULT, "")
    values = json.loads(allgather_text(json.dumps(asdict(thresholds)))[0])
    if complaint:  # not before: a warning may be an error, and the others wait
        warn(complaint, FallbackWarning)
    return Thresholds(**values)


def _thresholds_of(library: str, node_of: Sequence[int]) -> tuple[Thresholds, str]:
    """Return the thresholds of a file, and why it cannot be used; then the shipped ones."""
    default, named = default_for(library), os.environ.get(VARIABLE)
    file = named or ""
    try:
        path = file_for(library, max(Counter(node_of).values()), max(node_of) + 1)
        file = file or str(path)
        return (load(path) if named or (named is None and os.path.isfile(path)) else default), ""
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error.strerror}" if isinstance(error, OSError) else str(error)
        complaint = (
            f"the thresholds in {file} cannot be used: {reason}; all ranks use the defaults. Measure anew with "
            f"`mpistrategy bench --save`, remove the file, or name another one: {VARIABLE}=FILE."
        )
        return default, complaint if file else ""  # without a home folder there is no file


_tried: list[Thresholds] = []


@contextmanager
def trying(thresholds: Thresholds) -> Iterator[None]:
    """Give these thresholds to strategies that are made meanwhile, on all ranks: for whoever searches better ones."""
    _tried.append(thresholds)
    try:
        yield
    finally:
        _tried.pop()
