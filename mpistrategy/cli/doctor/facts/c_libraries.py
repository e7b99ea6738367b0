"""Facts from C libraries: kinds of file systems, threads of linear algebra, and which GPUs can read each other."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

#: By the number that Linux gives each kind of file system.
_KINDS = {
    0x6969: "NFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x00C36400: "CephFS",
    0xFF534D42: "SMB",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x5346414F: "AFS",
    0xAAD7AAEA: "PanFS",
    0x20030528: "PVFS2",
    0x01021997: "9P",
    0x65735546: "FUSE",
    0xEF53: "ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x73717368: "squashfs",
    0xE0F5E1E2: "EROFS",
    0xF2F52010: "F2FS",
}
_STATFS_BYTES = 512  # more than any system's struct statfs


def kind_of(path: str) -> str:
    """Return the kind of the file system: ``"NFS"``; a number for one without a name here; "unknown" for no answer."""
    try:
        statfs = ctypes.CDLL(None, use_errno=True).statfs
        block = ctypes.create_string_buffer(_STATFS_BYTES)
        if statfs(os.fsencode(path), block):
            return "unknown"
    except (OSError, AttributeError):
        return "unknown"
    number = ctypes.c_long.from_buffer(block).value & 0xFFFFFFFF  # its first member
    return _KINDS.get(number, f"file system {number:#x}")


VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_ASK = {
    "openblas": [
        f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "_64")
    ],
    "mkl_rt": ["MKL_Get_Max_Threads"],
    "blis": ["bli_thread_get_num_threads"],
}


def blas_threads(
    files: Sequence[str],
    environment: Mapping[str, str],
    cores: int,
    load: Callable[[str], object] = ctypes.CDLL,
) -> tuple[int, str]:
    """Return how many threads NumPy's linear algebra takes, and how that is known.

    Args:
        files: the libraries that the process has loaded.
        environment: its variables.
        cores: how many it may use; the default number of threads.
        load: opens a library.
    """
    for path in files:
        for part, names in _ASK.items():
            if part not in os.path.basename(path):
                continue
            try:
                library = load(path)
            except OSError:
                continue
            for name in names:
                ask = getattr(library, name, None)
                if ask is not None:
                    return int(ask()), _said(environment)
    told = next((int(environment[name]) for name in VARIABLES if environment.get(name, "").isdigit()), cores)
    return told, _said(environment)


def _said(environment: Mapping[str, str]) -> str:
    told = (f"{name}={environment[name]}" for name in VARIABLES if environment.get(name, "").isdigit())
    return next(told, f"no {VARIABLES[0]} is set")


def pairs_without_peer_access(count: int, library: Any = None) -> tuple[tuple[int, int], ...]:
    """Return the pairs of GPUs that cannot read each other's memory; none if NVIDIA's driver does not say.

    Args:
        count: how many GPUs this process sees.
        library: the loaded driver; None loads it.
    """
    if library is None:
        with suppress(OSError):
            library = ctypes.CDLL("libcuda.so.1")
    if library is None or library.cuInit(0) or not hasattr(library, "cuDeviceCanAccessPeer"):
        return ()
    pairs = []
    for one in range(count):
        for other in range(one + 1, count):
            both = ctypes.c_int(1)
            if library.cuDeviceCanAccessPeer(ctypes.byref(both), one, other) == 0 and not both.value:
                pairs.append((one, other))
    return tuple(pairs)
