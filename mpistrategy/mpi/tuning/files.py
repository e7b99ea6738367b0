"""Files of measured thresholds: one for each MPI, number of ranks on a node and number of nodes.

`mpistrategy bench --save` writes them to ``$XDG_CACHE_HOME/mpistrategy`` (``~/.cache/mpistrategy``), where every new
strategy looks for its own.  MPISTRATEGY_PATHS=FILE names another file; MPISTRATEGY_PATHS= (empty) means the defaults.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds, default_for
from mpistrategy.objects.later import later

if TYPE_CHECKING:
    import tempfile
    from pathlib import Path

    from mpistrategy import own_files
else:
    later(globals(), "tempfile")
    later(globals(), "pathlib", "Path")
    later(globals(), "mpistrategy.own_files")

VARIABLE = "MPISTRATEGY_PATHS"
_FORMAT = 3
_NAMES = tuple(DEFAULT.sizes())
_LARGEST = 2**40
_LONGEST = 80
#: A file is a thousand times smaller.
MOST_BYTES = 2**20
#: Parts of buffers: small ones would be mere overhead; they are cut at cache lines.
_LEAST = {"chunk_bytes": 4096, "piece_bytes": 4096, "cell_bytes": 64}
#: Memory that every rank reserves.
_MOST = {"chunk_bytes": 2**28, "cell_bytes": 2**20}


class Ranks(Protocol):
    """What is used of a communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def node_of(self) -> tuple[int, ...]: ...

    def allgather_text(self, text: str) -> list[str]: ...


@dataclass(frozen=True)
class Machine:
    """What thresholds depend on.

    Attributes:
        library: the MPI library and its version; `library_name`.
        ranks_on_node: how many ranks the fullest node has.
        nodes: how many nodes there are.
    """

    library: str
    ranks_on_node: int
    nodes: int

    @classmethod
    def of(cls, version: str, node_of: tuple[int, ...]) -> Machine:
        """Return the machine of ranks on these nodes, with what MPI says about its version."""
        return cls(library_name(version), max(Counter(node_of).values()), max(node_of) + 1)

    @property
    def file(self) -> Path:
        """Where its thresholds are kept; FileNotFoundError where no home folder is known."""
        return Path(self.path)

    @property
    def path(self) -> str:
        """The same, as text."""
        return _kept_path(self.library, f"{self.ranks_on_node}x{self.nodes}")


def kept_file(library: str, of_what: str) -> Path:
    """Return the file that keeps a finding about an MPI library from one job to the next.

    Raises:
        FileNotFoundError: where no home folder is known.
    """
    return Path(_kept_path(library, of_what))


def _kept_path(library: str, of_what: str) -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = re.sub(r"[^a-z0-9.]+", "-", library.lower()).strip("-.")
    return os.path.join(_expanded(cache), "mpistrategy", f"{name}-{of_what}.json")


def expanded(path: str) -> Path:
    """Return a path with the home folder in place of ``~`` and ``~user``.

    Raises:
        FileNotFoundError: where none is known: without HOME and an entry for this user, or for no user.
    """
    return Path(_expanded(path))


def _expanded(path: str) -> str:
    found = os.path.expanduser(path)
    if found.startswith("~"):
        user = path.partition("/")[0]
        of = "this user (set HOME, or XDG_CACHE_HOME)" if user == "~" else f"a user {user[1:]!r}"
        raise FileNotFoundError(errno.ENOENT, f"No home folder is known of {of}", path)
    return found


def library_name(version: str) -> str:
    """Return the library and its version from MPI's version text: ``"Open MPI v5.0.11"``."""
    first = (version.strip("\0 \n").splitlines() or ["unknown"])[0]
    return " ".join(re.split(r",| for ", first)[0].replace("Version:", "").replace("(R)", "").split())


def check_can_save(file: Path) -> None:
    """Raise OSError when `file` cannot be written."""
    own_files.make_folders(str(file.parent))
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name):
        pass


def replace_whole(file: Path, text: str) -> None:
    """Write a file that others may read meanwhile, maybe on another node with the same home: the old one, or the new.

    Raises:
        OSError: when it cannot be written.
    """
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8") as draft:
        draft.write(text)
    os.chmod(draft.name, 0o644)
    os.replace(draft.name, file)


def save(thresholds: Thresholds, machine: Machine, file: Path | None = None) -> Path:
    """Write thresholds for `machine`; return the file, its own by default.

    Raises:
        OSError: when it cannot be written.
    """
    file = file or machine.file
    content = {
        "format": _FORMAT,
        "machine": asdict(machine),
        "source": thresholds.source,
        "paths": thresholds.sizes(),
    }
    check_can_save(file)
    replace_whole(file, json.dumps(content, indent=1) + "\n")
    return file


def load(file: Path) -> Thresholds:
    """Return the thresholds of a file.

    Raises:
        OSError: when it cannot be read, or is not a small file of this user's, or root's, own.
        ValueError: when it is none of these files; the text says what is wrong.
    """
    try:
        content = json.loads(own_files.read(str(file), MOST_BYTES).decode())
    except (ValueError, RecursionError) as error:  # also for what is no UTF-8
        raise ValueError(f"it is not JSON ({_shown(error)})") from error
    values = content.get("paths") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    if not isinstance(values, dict) or set(values) != set(_NAMES):
        raise ValueError(f"it does not have the thresholds {', '.join(_NAMES)} in format {_FORMAT}")
    by_dtype = values["window_bytes_by_dtype"]
    if not isinstance(by_dtype, dict) or not all(map(_is_dtype, by_dtype)):
        raise ValueError(
            f"window_bytes_by_dtype is {_shown(by_dtype)}, expected names of dtypes and their window_bytes"
        )
    checked = [(name, value) for name, value in values.items() if value is not by_dtype]
    checked += ((f"window_bytes of {name}", value) for name, value in by_dtype.items())
    for name, value in checked:
        least, most = _LEAST.get(name, 0), _MOST.get(name, _LARGEST)
        if type(value) is not int or not least <= value <= most or value % 64:
            raise ValueError(f"{name} is {_shown(value)}, expected a multiple of 64 from {least} to {most}")
    return _from_json(values, str(file))


def _is_dtype(name: str) -> bool:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", name):  # NumPy takes whole structures for the name of a dtype
        return False
    try:
        return np.dtype(name).name == name
    except (TypeError, ValueError):
        return False


def _shown(value: Any) -> str:
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except (ValueError, RecursionError) as error:  # an int of very many digits, a nest that is too deep
        text = str(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def agreed(version: str, ranks: Ranks) -> Thresholds:
    """Return the thresholds for these ranks, the same on all of them: those that rank 0 finds.  Collective.

    A file that cannot be used means the defaults, and one warning on rank 0.

    Args:
        version: what MPI says about its version.
        ranks: who has to agree.
    """
    if _tried:
        return _tried[-1]
    found, complaint = _found(Machine.of(version, ranks.node_of)) if ranks.rank == 0 else (DEFAULT, "")
    sizes, source = json.loads(ranks.allgather_text(json.dumps([found.sizes(), found.source]))[0])
    if complaint:  # not before: a warning may be an error, and the others wait
        warn(complaint, FallbackWarning)
    return _from_json(sizes, source)


def _found(machine: Machine) -> tuple[Thresholds, str]:
    """Return the thresholds of a machine's file, and why it cannot be used; then the shipped ones."""
    named = os.environ.get(VARIABLE)
    file = named if named is not None else _own_file(machine)
    if file:
        try:
            return load(expanded(file)), ""
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error.strerror}" if isinstance(error, OSError) else str(error)
            return default_for(machine.library), (
                f"the thresholds in {file} cannot be used: {reason}; all ranks use the defaults. Measure anew with "
                f"`mpistrategy bench --save`, remove the file, or name another one: {VARIABLE}=FILE."
            )
    return default_for(machine.library), ""


def _from_json(sizes: dict[str, Any], source: str) -> Thresholds:
    by_dtype = tuple(sizes.pop("window_bytes_by_dtype").items())
    return Thresholds(**sizes, window_bytes_by_dtype=by_dtype, source=source)


def _own_file(machine: Machine) -> str:
    """Return the file of a machine's thresholds; "" where there is none, or no home folder to look in."""
    try:
        return machine.path if os.path.isfile(machine.path) else ""
    except OSError:
        return ""


_tried: list[Thresholds] = []


@contextmanager
def trying(thresholds: Thresholds) -> Iterator[None]:
    """Give these thresholds to strategies that are made meanwhile, on all ranks: for whoever searches better ones."""
    _tried.append(thresholds)
    try:
        yield
    finally:
        _tried.pop()
