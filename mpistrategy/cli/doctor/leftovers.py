"""What killed jobs of this user have left on this node: memory in /dev/shm, and folders of launchers.

One rule: a file of this user with the name of one of MPI's, that is older than a moment and that no process has open
or mapped.  A folder of a launcher names the launcher's process, which must be gone, too.  So a job that runs keeps its
own.  That takes a view of all processes of the user: without one, as in a container, nothing is found.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
#: In the folder for temporary files: folders, which end with the number of the launcher's process.  (Others of
#: Open MPI end with a user's number, ``ompi.HOST.UID``: they may be those of a job that runs, and stay.)
_TEMPORARY = {"Open MPI": r"(?:ompi|prte\..+|prte)\.(\d+)$"}
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
    used = in_use() if names else set()
    left = []
    for owner, path in names:
        with suppress(FileNotFoundError):  # it goes just now
            files = [path, *_inside(path)]
            if used.isdisjoint(map(_identity, files)):
                left.append(Leftover(owner, path, sum(512 * os.lstat(each).st_blocks for each in files)))
    return sorted(left, key=lambda each: each.path)


def _candidates(folder: str, patterns: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield owner and path of this user's files, or folders, with such names."""
    is_right = stat.S_ISDIR if patterns is _TEMPORARY else stat.S_ISREG
    for name in os.listdir(folder):
        for owner, pattern in patterns.items():
            match, path = re.match(pattern, name), os.path.join(folder, name)
            if match is None or (match.groups() and os.path.exists(f"/proc/{match[1]}")):
                continue
            with suppress(OSError):  # some go meanwhile
                state = os.lstat(path)
                is_old = time.time() - state.st_ctime > _YOUNG_SECONDS
                if is_right(state.st_mode) and state.st_uid == os.geteuid() and is_old:
                    yield owner, path


def in_use() -> set[tuple[int, int]]:
    """Return device and inode of what the processes of this user have open or mapped, and of their folders.

    Raises:
        OSError: where a process of this user keeps them to itself.
    """
    used: set[tuple[int, int]] = set()
    for name in os.listdir("/proc"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if name.isdigit() and _may_be_a_rank(name):
                used |= used_by(name)
    return used


def _may_be_a_rank(name: str) -> bool:
    """Return whether a process may have files of this user: root looks at all."""
    with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
        status = file.read()
    users = re.search(r"^Uid:\s+(.+)$", status, re.M)
    if users is None or (os.geteuid() and str(os.geteuid()) not in users[1].split()):
        return False
    return re.search(r"^State:\s+[ZX]", status, re.M) is None


def used_by(name: str) -> set[tuple[int, int]]:
    """Return what `in_use` does, of one process."""
    used = set()
    try:
        with open(f"/proc/{name}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                major, minor, inode = re.split("[ :]", line.split(maxsplit=3)[3])[:3]
                used.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
        links = [f"/proc/{name}/cwd", *(f"/proc/{name}/fd/{number}" for number in os.listdir(f"/proc/{name}/fd"))]
    except PermissionError as error:
        with open(f"/proc/{name}/comm", encoding="utf-8", errors="replace") as file:
            title = file.read().strip()
        if name == "1" or title in _NO_RANKS:
            return set()
        raise PermissionError(error.errno, f"process {name} ({title}) does not show which files it uses") from error
    for link in links:
        with suppress(OSError):  # closed meanwhile
            used.add(_identity(link, follow=True))
    return used


def _identity(path: str, *, follow: bool = False) -> tuple[int, int]:
    state = os.stat(path, follow_symlinks=follow)
    return state.st_dev, state.st_ino


def _inside(path: str) -> list[str]:
    """Return what is in a folder, and in those in it; nothing for a file."""
    return [os.path.join(folder, name) for folder, names, files in os.walk(path) for name in (*names, *files)]


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
