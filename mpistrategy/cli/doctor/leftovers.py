"""What killed jobs of this user have left on this node: memory in /dev/shm, and folders of launchers.

A file counts as left only if no process has it open or mapped, so that a job that runs keeps its own.  That takes a
view of all processes of the user: without one, as in a container, nothing is found.  Files that are only just made
are left alone, and so are those of other users.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mpistrategy.cli.doctor.checks.finding import count, mebibytes
from mpistrategy.objects.text import printable

#: Where Linux keeps shared memory that has a name.
FOLDER = "/dev/shm"
#: The inode of the first PID namespace.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
#: What belongs to a job that has only just begun may not be open yet.
_YOUNG_SECONDS = 10.0
_MOST_ROWS = 16
#: In /dev/shm: whose, and how the names begin, as jobs left them that were killed as a whole.
_IN_MEMORY = {
    "MPICH": r"mpich_shm_|MPICH_shm_",
    "Open MPI": r"sm_segment\.|vader_segment\.|open_mpi\.",
    "Intel MPI": r"Intel_MPI_|shm-col-space-",
    "UCX": r"ucx_shm_posix_",
    "NCCL": r"nccl-",
    "PSM2": r"psm2_shm\.",
}
#: In the folder for temporary files: the number after it is that of the launcher's process, where there is one.
_TEMPORARY = {
    "Open MPI": r"ompi\.(?:(?P<process>\d+)$|.+\.\d+$)|prte\.(?:.+\.)?(?P<prte>\d+)$",
    "MPICH": r"hydra_hwloc_xmlfile_",
}
#: Libraries of Open MPI: while a process has one, a folder that names no process may be its own.
_OPEN_MPI = re.compile(r".*/lib(?:open-pal|open-rte|prrte|pmix|mpi)\.so[.\d]*$")
#: Processes of users that Linux lets nobody look into, and that have nothing to do with MPI; process 1 is another.
_NO_RANKS = ("(sd-pam)", "sshd", "sshd-session", "ssh-agent", "systemd", "gpg-agent", "sudo", "su")


@dataclass(frozen=True)
class Leftover:
    """Something that a killed job has left.

    Attributes:
        owner: whose it is: "MPICH", "NCCL", ...
        path: where.
        nbytes: how much memory or disk it takes.
    """

    owner: str
    path: str
    nbytes: int


def folders() -> tuple[str, str]:
    """Return where leftovers are looked for: shared memory, and temporary files."""
    return FOLDER, os.environ.get("TMPDIR") or tempfile.gettempdir()


def sees_all_processes() -> bool:
    """Return whether no process of this user is hidden from this one."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    return False


def found(memory: str, temporary: str, *, all_processes: bool | None = None) -> list[Leftover]:
    """Return what killed jobs of this user have left, by path.

    Args:
        memory: the folder of shared memory.
        temporary: the folder for temporary files.
        all_processes: whether every process can be seen, or else nothing is known; None: as the system says.

    Raises:
        OSError: when a process of this user does not show what it has open.
    """
    if not (sees_all_processes() if all_processes is None else all_processes):
        return []
    names = [*_candidates(memory, _IN_MEMORY), *_candidates(temporary, _TEMPORARY)]
    if not names:
        return []
    users = _Users.look()
    return sorted(
        (Leftover(owner, path, _size(path)) for owner, path, process in names if not users.have(path, process)),
        key=lambda each: each.path,
    )


def _candidates(folder: str, patterns: dict[str, str]) -> list[tuple[str, str, int]]:
    """Return (owner, path, process) of this user's files with such names; the process is 0 where the name has none."""
    made: list[tuple[str, str, int]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            for owner, pattern in patterns.items():
                match = re.match(pattern, entry.name)
                if match is None:
                    continue
                with suppress(OSError):  # some go meanwhile
                    state = entry.stat(follow_symlinks=False)
                    is_folder, is_file = stat.S_ISDIR(state.st_mode), stat.S_ISREG(state.st_mode)
                    is_right = is_folder if owner == "Open MPI" and patterns is _TEMPORARY else is_file
                    if is_right and state.st_uid == os.geteuid() and time.time() - state.st_ctime > _YOUNG_SECONDS:
                        process = next(filter(None, match.groupdict().values()), "0")
                        made.append((owner, entry.path, int(process)))
                break
    return made


@dataclass(frozen=True)
class _Users:
    """What the processes of this user have open.

    Attributes:
        files: paths of open and mapped files, and of working folders.
        identities: of open and mapped files: device and inode.
    """

    files: frozenset[str]
    identities: frozenset[tuple[int, int]]

    @classmethod
    def look(cls) -> _Users:
        """Return them; OSError where a process of this user keeps them to itself."""
        files: set[str] = set()
        identities: set[tuple[int, int]] = set()
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if _may_be_a_rank(name):
                        _look_into(name, files, identities)
                except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    continue
        return cls(frozenset(files), frozenset(identities))

    def have(self, path: str, process: int) -> bool:
        """Return whether some process uses a file or something in a folder, or may do so."""
        inside = os.path.join(os.path.realpath(path), "")
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return _identity(path) in self.identities or os.path.realpath(path) in self.files
            if process and os.path.exists(f"/proc/{process}"):
                return True
            if any(_identity(each) in self.identities for each in _inside(path)):
                return True
        except OSError:  # it goes just now
            return True
        if any(f"{each}/".startswith(inside) for each in self.files):
            return True
        return not process and any(_OPEN_MPI.match(each) for each in self.files)


def _may_be_a_rank(name: str) -> bool:
    """Return whether a process may have files of this user: root looks at all."""
    with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
        status = file.read()
    users = re.search(r"^Uid:\s+(.+)$", status, re.M)
    if users is None or (os.geteuid() and str(os.geteuid()) not in users[1].split()):
        return False
    return re.search(r"^State:\s+[ZX]", status, re.M) is None


def _look_into(name: str, files: set[str], identities: set[tuple[int, int]]) -> None:
    """Add what a process has open or mapped."""
    try:
        with open(f"/proc/{name}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    files.add(fields[5].strip())
                    major, _, minor = fields[3].partition(":")
                    identities.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
        files.add(os.readlink(f"/proc/{name}/cwd"))
        numbers = os.listdir(f"/proc/{name}/fd")
    except PermissionError as error:
        with open(f"/proc/{name}/comm", encoding="utf-8", errors="replace") as file:
            title = file.read().strip()
        if name == "1" or title in _NO_RANKS:
            return
        raise PermissionError(error.errno, f"process {name} ({title}) does not show which files it uses") from error
    for number in numbers:
        with suppress(FileNotFoundError):  # closed meanwhile
            path = os.readlink(f"/proc/{name}/fd/{number}")
            if path.startswith("/"):
                files.add(path)
                identities.add(_identity(f"/proc/{name}/fd/{number}", follow=True))


def _identity(path: str, *, follow: bool = False) -> tuple[int, int]:
    state = os.stat(path, follow_symlinks=follow)
    return state.st_dev, state.st_ino


def _inside(path: str) -> list[str]:
    """Return the files in a folder, and in those in it."""
    return [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]


def _size(path: str) -> int:
    """Return how many bytes a file, or all files in a folder, take."""
    size = 0
    for each in _inside(path) if os.path.isdir(path) else [path]:
        with suppress(OSError):
            size += 512 * os.lstat(each).st_blocks
    return size


def in_words(left: Sequence[Leftover]) -> str:
    """Return ``3 files of MPICH (6.1 MiB), 1 file of NCCL (9.0 MiB)``."""
    owners = dict.fromkeys(each.owner for each in left)
    parts = []
    for owner in owners:
        sizes = [each.nbytes for each in left if each.owner == owner]
        parts.append(f"{count(len(sizes), 'file')} of {owner} ({mebibytes(sum(sizes))})")
    return ", ".join(parts)


def remove(left: Iterable[Leftover], *, again: Callable[[], Sequence[Leftover]]) -> tuple[list[Leftover], list[str]]:
    """Remove them, each only if it is still left; return those that this call removed, and why others are there.

    Args:
        left: what was found.
        again: finds them once more.
    """
    still, gone, troubles = {each.path for each in again()}, [], []
    for each in left:
        if each.path not in still:
            troubles.append(f"{each.path}: in use by now, or gone")
            continue
        try:
            if stat.S_ISDIR(os.lstat(each.path).st_mode):
                shutil.rmtree(each.path)  # follows no links
            else:
                os.unlink(each.path)
        except OSError as error:
            troubles.append(f"{each.path}: {error.strerror}")
            continue
        gone.append(each)
    return gone, troubles


def run() -> int:
    """Remove what killed jobs of this user have left on this node, and tell; return 2 where it could not be done."""
    host = os.uname().nodename
    if not sees_all_processes():
        sys.stderr.write(
            f"mpistrategy doctor: {host}: this process sees only those of its container, so that what others use is "
            "not known; nothing was removed.\n  -> Call it outside of the container.\n"
        )
        return 2
    try:
        gone, troubles = remove(found(*folders()), again=lambda: found(*folders()))
    except OSError as error:
        sys.stderr.write(f"mpistrategy doctor: {host}: {printable(str(error.strerror))}; nothing was removed\n")
        return 2
    told = f"removed {in_words(gone)}" if gone else "nothing of a killed job of yours is left"
    names = [f"  {printable(each.path)}\n" for each in gone[:_MOST_ROWS]]
    names += [f"  and {len(gone) - _MOST_ROWS} more\n"] * (len(gone) > _MOST_ROWS)
    sys.stdout.write(f"{host}: {told}\n" + "".join(names))
    if troubles:
        sys.stderr.write("".join(f"mpistrategy doctor: not removed: {printable(each)}\n" for each in troubles))
    return 2 if troubles else 0
