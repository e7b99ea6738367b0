"""`Checkpoint.arrays`: the arrays in a checkpoint, or in another file of arrays.

Files are mapped into memory, so that a large one takes none; archives of NumPy's (.npz) are read.  Writing into an
array does not change the file.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.checkpoint.reading import array_of, check_own
from mpistrategy.checkpoint.storage.files import Folder, OpenFile, check_is_trusted, reading
from mpistrategy.checkpoint.storage.manifest import OWN, ROWS, Manifest, parse, read_text
from mpistrategy.checkpoint.storage.shards import (
    MOST_BYTES,
    NAMES,
    Own,
    byte_count,
    dtype_of,
    is_shape,
    open_shard,
    parsed,
)
from mpistrategy.errors import CheckpointDamagedError, CheckpointReadError, MpiStrategyError, OptionError

_WHERE = "Checkpoint.arrays"
_DTYPES = {name: text for text, name in NAMES.items()}
#: The most elements that are combined at a time.
_PIECE_ELEMENTS = 2**20
#: So many links are followed, as Linux does.
_MOST_LINKS = 40
#: The longest header of a NumPy file that NumPy reads.
_LONGEST_HEADER = 2**16
#: The largest table of contents of a .npz file.
_MOST_CONTENTS_BYTES = 2**23
#: The arrays of a .npz file may have so many bytes plus so many times the size of the file; zeros have 1,030 times.
_SMALL_BYTES, _MOST_TIMES = 2**26, 100
#: Memory is reserved only when it is written to: a file may be larger than the memory.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number, if Python does not have it
_FLAGS, _PROTECTION = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE


def arrays_of(path: str) -> dict[str, Array]:
    """Return the arrays of a checkpoint by path, per-rank arrays by ``path@rank``; other copies are combined.

    Arrays that are split among shards, and rows, are copied into memory.
    """
    name = os.path.basename(path)
    with (
        reading(_WHERE, path),
        Folder.parent_of(path) as parent,
        parent.trusted_folder(name) as folder,
        _sound(path),
    ):
        manifest, found, owns = parse(read_text(folder), path), {}, {}
        for number, each in enumerate(manifest.shards):
            entries = manifest.entries_of(number)
            with open_shard(folder, number, each.nbytes, each.checksum, entries) as shard:
                shard.check()
                memory = _mapped(shard.file)
                for name, (_, shape, dtype) in entries.items():
                    found[name] = _array_in(memory, dtype_of(dtype), shape, shard.stored[name].start)
                for rank, name in shard.ranks.items():
                    stored = shard.stored[name]
                    owns[rank] = Own(np.frombuffer(memory, np.uint8, stored.nbytes, stored.start), path)
                    check_own(owns[rank], manifest)
        if manifest.of_each_rank and owns.keys() != set(range(manifest.ranks)):
            raise _damaged(path, f"what {len(owns)} of {manifest.ranks} ranks had for themselves")
        return dict(_arrays_in(manifest, found, owns))


def _arrays_in(manifest: Manifest, once: dict[str, Array], owns: dict[int, Own]) -> Iterator[tuple[str, Array]]:
    for path, item in manifest.items.items():
        if not item.is_array:
            continue
        if not item.is_of_each_rank:
            parts = [once[name] for _, name, _, _ in item.parts(path)]
            yield path, parts[0] if len(parts) == 1 else np.concatenate(parts).reshape(item.shape)
            continue
        copies = [array_of(owns[rank], path, manifest) for rank in range(manifest.ranks)]
        if item.copies == OWN:
            yield from ((f"{path}@{rank}", array) for rank, array in enumerate(copies))
        elif item.copies == ROWS:
            yield path, np.concatenate(copies)
        elif item.copies == "ONLY_FIRST_REPLICA":
            yield path, copies[0]
        else:
            yield path, _combined(copies, item.copies)


def _combined(copies: list[Array], how: str) -> Array:
    """Return the combined copies.  A piece at a time: a MEAN of small integers takes twelve times their memory."""
    found = np.empty(copies[0].shape, copies[0].dtype)
    flat, parts = found.reshape(-1), [array.reshape(-1) for array in copies]
    for start in range(0, flat.size, _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        flat[piece] = combined((part[piece] for part in parts), how, len(parts))
    return found


def combined(copies: Iterable[Array], how: str, count: int) -> Array:
    """Return the combined copies of a variable, added in rank order; integers wrap around, as everywhere."""
    total, dtype = None, np.dtype(bool)
    for copy in copies:
        if total is None:
            total, dtype = copy.astype(wire_dtype(copy.dtype)), copy.dtype
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(total, copy, out=total)
    assert total is not None
    with np.errstate(over="ignore"):
        return np.asarray(total / count if how == "MEAN" else total).astype(dtype)


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
    whole = _followed(os.path.abspath(path))
    with (
        reading(_WHERE, path),
        Folder.parent_of(whole) as folder,
        folder.file(os.path.basename(whole), None, MOST_BYTES) as file,
        _sound(path),
    ):
        return read(file, path)


def _followed(path: str) -> str:
    """Follow the symbolic links that a file's name is; CheckpointReadError as `check_is_trusted`, for each link."""
    for _ in range(_MOST_LINKS):
        if not os.path.islink(path):
            break
        folder = os.path.dirname(path)
        check_is_trusted(os.lstat(path), os.stat(folder), path)
        path = os.path.join(folder, os.readlink(path))
    return path


@contextmanager
def _sound(path: str) -> Iterator[None]:
    """Turn errors of NumPy and zipfile into ours: the file may contain anything."""
    try:
        yield
    except MpiStrategyError:
        raise
    except MemoryError as error:
        raise CheckpointReadError.at(
            _WHERE, found=f"no memory for the arrays in {path!r}", expected="enough memory"
        ) from error
    except OSError:
        raise
    except Exception as error:
        raise _damaged(path, f"{type(error).__name__}: {str(error)[:200]}") from error


def _safetensors(file: OpenFile, path: str) -> dict[str, Array]:
    stored, memory, found = parsed(file.read, file.size, path), _mapped(file), {}
    for name, one in stored.items():
        text = _DTYPES.get(one.name)
        if text is None:
            raise _damaged(path, f"an array {name[:80]!r} of dtype {one.name[:20]!r}, which NumPy does not have,")
        dtype = dtype_of(text)
        if byte_count(one.shape, dtype) != one.nbytes:
            raise _damaged(path, f"{one.nbytes} bytes for {name[:80]!r} of shape {list(one.shape)}")
        found[name] = _array_in(memory, dtype, one.shape, one.start)
    return found


def _npy(file: OpenFile, path: str) -> dict[str, Array]:
    text = io.BytesIO(file.read(0, min(file.size, _LONGEST_HEADER)))
    version = np.lib.format.read_magic(text)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise _damaged(path, f"version {version} of NumPy's format, which only numpy.load reads,")
    shape, is_fortran, dtype = readers[version](text)
    if dtype.hasobject or not dtype.itemsize:
        raise _damaged(path, f"an array of dtype {dtype}")
    if not is_shape(list(shape), dtype):
        raise _damaged(path, f"an array of shape {shape}"[:200])
    return {"": np.ndarray(shape, dtype, _mapped(file), text.tell(), order="F" if is_fortran else "C")}


class _Limited(io.BufferedReader):
    """A file that refuses to read more at once than the largest table of contents."""

    def read(self, size: int | None = -1, /) -> bytes:
        most = _MOST_CONTENTS_BYTES + 1
        data = super().read(most if size is None or size < 0 else min(size, most))
        if len(data) > _MOST_CONTENTS_BYTES:
            raise ValueError(f"more than {_MOST_CONTENTS_BYTES} bytes of names")
        return data


def _npz(file: OpenFile, path: str) -> dict[str, Array]:
    with _Limited(io.FileIO(file.descriptor, closefd=False)) as limited:
        loaded = np.load(limited, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise _damaged(path, "no archive")
        archive: Any = loaded
        nbytes = sum(member.file_size for member in archive.zip.infolist())
        if nbytes > _SMALL_BYTES + _MOST_TIMES * file.size:
            told = f"{nbytes} bytes of arrays in {file.size}, which is far too much,"
            raise _damaged(path, told, "If you trust it, read it with numpy.load.")
        found = dict(archive)
    for name, array in found.items():
        if not isinstance(array, np.ndarray):
            raise _damaged(path, f"{name[:80]!r}, which is no array,")
    return found


_READERS = {".safetensors": _safetensors, ".npy": _npy, ".npz": _npz}


def _damaged(path: str, found: str, fix: str = "") -> CheckpointDamagedError:
    return CheckpointDamagedError.at(_WHERE, found=f"{found} in {path!r}", expected="a whole file of arrays", fix=fix)


# ------------------------------------------------------------------------------------------------ mapped files


def _mapped(file: OpenFile) -> mmap.mmap:
    """Return a file mapped into memory; it stays mapped, and open, as long as an array in it exists."""
    return mmap.mmap(file.descriptor, file.size, flags=_FLAGS, prot=_PROTECTION)


def _array_in(memory: mmap.mmap, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> Array:
    """Return the array that begins at a byte of a mapped file; a copy, if it is not aligned there."""
    if not byte_count(shape, dtype):
        return np.empty(shape, dtype)
    found: Array = np.ndarray(shape, dtype, memory, start)
    return found if found.flags.aligned else found.copy()
