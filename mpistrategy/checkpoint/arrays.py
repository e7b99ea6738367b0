"""`Checkpoint.arrays`: the arrays in a checkpoint, or in another file of arrays.

Files are mapped into memory, so that a large one takes none; archives of NumPy's (.npz) are read.  Writing into an
array does not change the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrategy import own_files
from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.checkpoint.reading import array_of, check_own
from mpistrategy.checkpoint.storage.files import check_is_trusted, checksum_of, damaged, opened, reading
from mpistrategy.checkpoint.storage.manifest import OWN, ROWS, Manifest, parse, read_text
from mpistrategy.checkpoint.storage.shards import (
    MOST_BYTES,
    NAMES,
    Own,
    as_array,
    parsed,
    parts_of,
    ranks_in,
    shard_name,
)
from mpistrategy.errors import MpiStrategyError, OptionError

_WHERE = "Checkpoint.arrays"
_DTYPES = {name: text for text, name in NAMES.items()}
#: The arrays of a .npz file may have so many bytes plus so many times the size of the file; zeros have 1,030 times.
_SMALL_BYTES, _MOST_TIMES = 2**26, 100
#: Memory is reserved only when it is written to: a file may be larger than the memory.
_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number, if Python does not have it


def arrays_of(path: str) -> dict[str, Array]:
    """Return the arrays of a checkpoint by path, per-rank arrays by ``path@rank``; other copies are combined.

    Arrays that are split among shards, and rows, are copied into memory.
    """
    with reading(_WHERE, path), _sound(path):
        check_is_trusted(path)
        manifest = parse(read_text(path), path)
        shards: list[dict[str, Array]] = []
        owns: dict[int, Own] = {}
        for number, shard in enumerate(manifest.shards):
            file = os.path.join(path, shard_name(number))
            data = _mapped(file, shard.nbytes)
            shards.append(parts_of(data, file))
            if checksum_of(data).hexdigest() != shard.checksum:
                raise damaged(file, "a file with another checksum than it was written with")
            owns |= {rank: Own(shards[-1][name], file) for rank, name in ranks_in(shards[-1]).items()}
        if manifest.of_each_rank and owns.keys() != set(range(manifest.ranks)):
            raise damaged(path, f"what {len(owns)} of {manifest.ranks} ranks had for themselves")
        for own in owns.values():
            check_own(own, manifest)
        once = {
            (name, number): as_array(shards[number].get(name), dtype, shape, path)
            for number in range(len(shards))
            for name, (shape, dtype) in manifest.entries_of(number).items()
        }
        return dict(_arrays_in(manifest, once, owns))


def _arrays_in(
    manifest: Manifest, once: dict[tuple[str, int], Array], owns: dict[int, Own]
) -> Iterator[tuple[str, Array]]:
    for path, item in manifest.items.items():
        if not item.is_array:
            continue
        if not item.is_of_each_rank:
            parts = [once[path, shard] for shard in item.shards]
            yield path, parts[0] if len(parts) == 1 else np.concatenate(parts).reshape(item.shape)
            continue
        copies = [array_of(owns[rank], path, manifest) for rank in range(manifest.ranks)]
        if item.copies == OWN:
            yield from ((f"{path}@{rank}", array) for rank, array in enumerate(copies))
        elif item.copies == ROWS:
            yield path, np.concatenate(copies)
        else:
            yield path, copies[0] if item.copies == "ONLY_FIRST_REPLICA" else _combined(copies, item.copies)


def _combined(copies: Sequence[Array], how: str) -> Array:
    """Return the combined copies of a variable, added in rank order; integers wrap around, as everywhere."""
    dtype = copies[0].dtype
    total = copies[0].astype(wire_dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        for copy in copies[1:]:
            np.add(total, copy, out=total)
        return np.asarray(total / len(copies) if how == "MEAN" else total).astype(dtype)


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
    found = np.ndarray(header.shape, header.dtype, _mapped(path), header.offset, header.strides)
    return {"": found}


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


def _mapped(path: str, size: int | None = None) -> Array:
    """Return the bytes of a file, mapped into memory; it stays mapped, and open, as long as an array in it exists."""
    with opened(path, MOST_BYTES, size) as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)
