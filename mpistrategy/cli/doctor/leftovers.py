"""What killed jobs of this user have left on this node: memory in /dev/shm, and folders of launchers.

One rule: the file belongs to this user, has a name that MPI libraries use, is older than a moment, and no process of
the user has it open or mapped.  A folder of a launcher names the launcher's process, which must be gone, too.  So a
running job keeps its files.  The rule needs to see all processes of the user: in a container, nothing is found.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
import time
from contextlib import suppress
from glob import glob
from pathlib import Path

from mpistrategy.cli.doctor.findings import count
from mpistrategy.objects.text import printable

#: The inode of the first PID namespace.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
#: A file of a job that has just begun may not be open yet.
_YOUNG_SECONDS = 10.0
#: How the names of files begin in /dev/shm, as jobs left them that were killed as a whole.
_IN_MEMORY = re.compile(
    r"(?i:mpich_shm_)|sm_segment\.|vader_segment\.|open_mpi\.|Intel_MPI_|shm-col-space-|ucx_shm_posix_|nccl-|psm2_shm\."
)
#: Folders for temporary files end with the number of the launcher's process.  (Others of Open MPI end with a user's
#: number, ``ompi.HOST.UID``: they may belong to a running job, and stay.)
_TEMPORARY = re.compile(r"(?:ompi|prte\..+|prte)\.(\d+)$")
#: Processes of users that Linux lets nobody look into, and that have nothing to do with MPI.
_NO_RANKS = ("(sd-pam)", "sshd", "sshd-session", "ssh-agent", "systemd", "gpg-agent", "sudo", "su")


def folders() -> tuple[str, str]:
    """Return where leftovers are looked for: shared memory, and temporary files."""
    return "/dev/shm", os.path.realpath(os.environ.get("TMPDIR") or tempfile.gettempdir())


def sees_all_processes() -> bool:
    """Return whether no process of this user is hidden from this one."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    return False


def leftover_paths() -> list[str]:
    """Return the paths of the files and folders that killed jobs of this user have left.

    Raises:
        OSError: when not all processes of this user show their open files.
    """
    if not sees_all_processes():
        raise OSError(0, "this process sees only those of its container: call it outside of the container")
    matches = [
        (path, match)
        for folder, pattern in zip(folders(), (_IN_MEMORY, _TEMPORARY), strict=True)
        for path in Path(folder).iterdir()
        if (match := pattern.match(path.name))
    ]
    old = [str(path) for path, match in matches if _is_old(path, *match.groups())]
    used = in_use() if old else ""
    return sorted(path for path in old if path not in used)


def _is_old(path: Path, launcher: str = "") -> bool:
    """Return whether this is an old file of this user; or an old folder of a launcher, whose process is gone."""
    with suppress(OSError):  # some files go meanwhile
        state = path.lstat()
        is_kind = stat.S_ISREG(state.st_mode)
        if launcher:
            is_kind = stat.S_ISDIR(state.st_mode) and not os.path.exists(f"/proc/{launcher}")
        return is_kind and state.st_uid == os.geteuid() and time.time() - state.st_ctime > _YOUNG_SECONDS
    return False


def in_use() -> str:
    """Return a text with the paths of files that processes of this user have open or mapped, and of their folders.

    Raises:
        OSError: where a process of this user keeps them to itself.
    """
    paths = []
    for folder in glob("/proc/[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            status = Path(folder, "status").read_text(errors="replace")
            users = re.findall(r"^Uid:(.*)$", status, re.M)[0].split()
            if os.geteuid() == 0 or str(os.geteuid()) in users:
                paths += used_by(folder)
    return "\n".join({*paths})


def used_by(folder: str) -> list[str]:
    """Return what `in_use` does, of one process: of its folder in /proc."""
    try:
        paths = re.findall("/.*", Path(folder, "maps").read_text(errors="replace"))
        links = [f"{folder}/cwd", *(f"{folder}/fd/{number}" for number in os.listdir(f"{folder}/fd"))]
    except PermissionError as error:
        title = Path(folder, "comm").read_text(errors="replace").strip()
        if folder == "/proc/1" or title in _NO_RANKS:
            return []
        raise PermissionError(error.errno, f"{folder} ({title}) does not show which files it uses") from error
    for link in links:
        with suppress(OSError):  # closed meanwhile
            paths.append(os.readlink(link))
    return paths


def in_words() -> str:
    """Return ``3 files of MPI``; "" where nothing is left, or that cannot be known."""
    with suppress(OSError):
        number = len(leftover_paths())
        return f"{count(number, 'file')} of MPI" if number else ""
    return ""


def run() -> int:
    """Remove what killed jobs of this user have left on this node, and tell; return 2 where it could not be done."""
    host = os.uname().nodename
    try:
        paths = leftover_paths()
        for path in paths:
            if os.path.isdir(path):
                shutil.rmtree(path)  # follows no links
            else:
                os.unlink(path)
            sys.stdout.write(f"{host}: removed {printable(path)}\n")
    except OSError as error:
        reason = printable(f"{error.filename or ''} {error.strerror}".strip())
        sys.stderr.write(f"mpistrategy doctor: {host}: {reason}; nothing more was removed\n")
        return 2
    if not paths:
        sys.stdout.write(f"{host}: nothing of a killed job of yours is left\n")
    return 0
