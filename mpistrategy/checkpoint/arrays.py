"""`Checkpoint.arrays`: the arrays in a checkpoint, or in another file of arrays.

A checkpoint is read as by one rank, and so are NumPy's archives (.npz).  Other files are mapped into memory, so that
large files take no memory.  Writing into an array does not change the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrategy import own_files
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.delivering import deliver
from mpistrategy.checkpoint.reading import Reading, array_of
from mpistrategy.checkpoint.storage.files import damaged, opened, reading
from mpistrategy.checkpoint.storage.manifest import OWN
from mpistrategy.checkpoint.storage.shards import MOST_BYTES, NAMES, as_array, parsed
from mpistrategy.errors import MpiStrategyError, OptionError
from mpistrategy.mpi.interface.ranks import Alone

_WHERE = "Checkpoint.arrays"
_DTYPES = {name: text for text, name in NAMES.items()}
#: The arrays of a .npz file may have so many bytes plus so many times the size of the file; zeros have 1,030 times.
_SMALL_BYTES, _MOST_TIMES = 2**26, 100
#: Memory is reserved only when it is written to: a file may be larger than the memory.
_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number, if Python does not have it


def arrays_of(path: str) -> dict[str, Array]:
    """Return the arrays of a checkpoint by path, per-rank arrays by ``path@rank``; other copies are combined."""
    source = Reading(Alone(), path)
    with reading(_WHERE, path), _sound(path):
        manifest = source.tell_manifest(source.read_manifest())
        source.read_shards(manifest.names)
        if manifest.of_each_rank:
            source.note_owns()
        items = {name: item for name, item in manifest.items.items() if item.is_array}
        arrays = deliver(source, {name: None for name, item in items.items() if item.copies != OWN})
        for name, item in items.items():
            for rank, own in sorted(source.owns.items()) if item.copies == OWN else ():
                arrays[f"{name}@{rank}"] = array_of(own, name, manifest)
    return arrays


def arrays_of_file(path: str) -> dict[str, Array]:
    """Return the arrays in a ``.safetensors``, ``.npz`` or ``.npy`` file by name; "" is the name in a ``.npy`` file.

    Raises:
        CheckpointMissingError, CheckpointReadError: if it cannot be read.
        CheckpointDamagedError: for other contents; objects (pickles) are never loaded.
        OptionError: for another suffix.
    """
    read = _READERS.get(os.path.splitext(path)[1])
    if read is None:
        raise OptionError.at(
            _WHERE, found=f"{path!r}", expected="a checkpoint's folder, or a .safetensors, .npz or .npy file"
        )
    file = os.path.realpath(path)
    with reading(_WHERE, path), _sound(path):
        os.close(own_files.open_trusted(file))
        return read(file)


@contextmanager
def _sound(path: str) -> Iterator[None]:
    """Turn errors of NumPy and zipfile into ours: the file may contain anything."""
    try:
        yield
    except (MpiStrategyError, MemoryError, OSError):
        raise
    except Exception as error:
        raise damaged(path, f"{type(error).__name__}: {str(error)[:200]}") from error


def _safetensors(path: str) -> dict[str, Array]:
    data = _mapped(path)
    arrays = {}
    for name, stored in parsed(lambda start, count: data[start : start + count].tobytes(), data.size, path).items():
        if stored.name not in _DTYPES:
            raise damaged(path, f"an array {name[:80]!r} of dtype {stored.name[:20]!r}, which NumPy does not have")
        array = as_array(data[stored.start : stored.stop], _DTYPES[stored.name], stored.shape, path)
        arrays[name] = array if array.flags.aligned else array.copy()
    return arrays


def _npy(path: str) -> dict[str, Array]:
    header: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    array = np.ndarray(header.shape, header.dtype, _mapped(path), header.offset, header.strides)
    return {"": array}


def _npz(path: str) -> dict[str, Array]:
    with opened(path, MOST_BYTES) as file, np.load(file, mmap_mode="r", allow_pickle=False) as archive:
        nbytes = sum(member.file_size for member in archive.zip.infolist())
        if nbytes > _SMALL_BYTES + _MOST_TIMES * os.path.getsize(path):
            raise damaged(path, f"{nbytes} bytes of arrays, far too much for its size (numpy.load reads it)")
        arrays = dict(archive)
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise damaged(path, f"{name[:80]!r}, which is no array")
    return arrays


_READERS = {".safetensors": _safetensors, ".npy": _npy, ".npz": _npz}


def _mapped(path: str) -> Array:
    """Return the bytes of a file, mapped into memory; it stays mapped, and open, as long as an array in it exists."""
    with opened(path, MOST_BYTES) as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)
