"""`Checkpoint.arrays`: the arrays in a checkpoint, or in another file of arrays, mapped into memory.

The data are read for the checksum and then again when an array is used, so that a large file takes no memory.  Writing
into an array does not change the file.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.checkpoint.storage.files import Folder, OpenFile, check_is_trusted, reading
from mpistrategy.checkpoint.storage.manifest import OWN, ROWS, Item, Manifest, parse, read_text
from mpistrategy.checkpoint.storage.shards import (
    MOST_AXES,
    MOST_BYTES,
    NAMES,
    Stored,
    byte_count,
    dtype_of,
    open_shard,
    parsed,
    part_name,
    shown,
)
from mpistrategy.errors import CheckpointDamagedError, CheckpointReadError, MpiStrategyError, OptionError

_WHERE = "Checkpoint.arrays"
_DTYPES = {name: text for text, name in NAMES.items()}
#: The longest chain of symbolic links; Linux follows as many.
_MOST_LINKS = 40
#: The most elements that are combined at a time.
_PIECE_ELEMENTS = 2**20
#: The longest header of a NumPy file that NumPy reads.
_LONGEST_HEADER = 2**16
#: The largest table of contents of a .npz file.
_MOST_CONTENTS_BYTES = 2**23
#: Compressed data may become so many bytes plus so many times the size of the file; zeros would become 1,030 times.
_SMALL_BYTES, _MOST_TIMES = 2**26, 100
_LOCAL_HEADER_BYTES, _ENCRYPTED = 30, 1
#: Memory is reserved only when it is written to.  Linux's number, if Python does not have it.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FLAGS, _PROTECTION = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
#: The most bytes of a file that are copied to align arrays that are not aligned in it (often in .npz files).
_MOST_COPIED_BYTES = 2**28

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = ctypes.CDLL(None).munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


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
        manifest, shards = parse(read_text(folder), path), {}
        for number, each in enumerate(manifest.shards):
            entries = manifest.entries_of(number, manifest.members_of(number))
            with open_shard(folder, number, each.nbytes, each.checksum, entries, each.members) as shard:
                shard.check()
                if shard.entries:
                    shards[number] = Map(shard.file), shard.stored
        return dict(_arrays_in(manifest, shards))


def _arrays_in(manifest: Manifest, shards: dict[int, tuple[Map, dict[str, Stored]]]) -> Iterator[tuple[str, Array]]:
    def found(name: str, number: int, item: Item, shape: tuple[int, ...]) -> Array:
        memory, stored = shards[number]
        return memory.array(dtype_of(item.dtype), shape, stored[name].start)

    def only(path: str, item: Item) -> Array:
        if not item.parts:
            return found(path, item.shard, item, item.shape)
        parts = [found(part_name(path, start), number, item, (count,)) for number, start, count in item.places]
        return np.concatenate(parts).reshape(item.shape)

    def of_ranks(path: str, item: Item) -> Iterator[Array]:
        """Yield the arrays of the ranks, in their order."""
        parts = {}
        for number in np.unique(manifest.shard_of).tolist():
            counts = item.counts(manifest.members_of(number))
            flat = found(path, number, item, (int(counts.sum()),))
            parts[number] = iter(np.split(flat, np.cumsum(counts)[:-1]))
        for rank, number in enumerate(manifest.shard_of.tolist()):
            yield next(parts[number]).reshape(item.shape_of(rank))

    for path, item in manifest.items.items():
        if not item.is_array:
            continue
        if not item.is_of_each_rank:
            yield path, only(path, item)
        elif item.copies == OWN:
            yield from ((f"{path}@{rank}", array) for rank, array in enumerate(of_ranks(path, item)))
        elif item.copies == ROWS:
            yield path, np.concatenate(list(of_ranks(path, item)))
        elif item.copies == "ONLY_FIRST_REPLICA":
            yield path, next(of_ranks(path, item))
        else:
            yield path, _combined(list(of_ranks(path, item)), item.copies)


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
    with reading(_WHERE, path):
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
    stored, memory, found = parsed(file.read, file.size, path), Map(file), {}
    for name, one in stored.items():
        text = _DTYPES.get(one.name)
        if text is None:
            raise _damaged(path, f"an array {name[:80]!r} of dtype {one.name[:20]!r}, which NumPy does not have,")
        dtype = dtype_of(text)
        if byte_count(one.shape, dtype) != one.nbytes:
            raise _damaged(path, f"{one.nbytes} bytes for {name[:80]!r} of shape {list(one.shape)}")
        found[name] = memory.array(dtype, one.shape, one.start)
    return found


def _npy(file: OpenFile, path: str) -> dict[str, Array]:
    dtype, shape, order, start = _numpys_header(file.read(0, min(file.size, _LONGEST_HEADER)), path)
    if start + byte_count(shape, dtype) > file.size:
        raise _damaged(path, f"{file.size} bytes for an array {dtype}{list(shape)}")
    return {"": Map(file).array(dtype, shape, start, order)}


def _numpys_header(head: bytes, path: str) -> tuple[np.dtype[Any], tuple[int, ...], Any, int]:
    """Return the dtype, shape and order of an array in NumPy's format, and where its bytes begin."""
    text = io.BytesIO(head)
    version = np.lib.format.read_magic(text)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise _damaged(path, f"version {version} of NumPy's format, which only numpy.load reads,")
    shape, is_fortran, dtype = readers[version](text)
    if dtype.hasobject or not dtype.itemsize:
        raise _damaged(path, f"an array of dtype {dtype}")
    if len(shape) > MOST_AXES or any(type(count) is not int or not 0 <= count <= MOST_BYTES for count in shape):
        raise _damaged(path, f"an array of shape {shown(shape)}")
    if byte_count(shape, dtype) > MOST_BYTES:
        raise _damaged(path, f"an array of {byte_count(shape, dtype)} bytes")
    return dtype, shape, "F" if is_fortran else "C", text.tell()


class _Limited(io.BufferedReader):
    """A file that refuses to read more at once than the largest table of contents."""

    def read(self, size: int | None = -1, /) -> bytes:
        most = _MOST_CONTENTS_BYTES + 1
        data = super().read(most if size is None or size < 0 else min(size, most))
        if len(data) > _MOST_CONTENTS_BYTES:
            raise ValueError(f"more than {_MOST_CONTENTS_BYTES} bytes of names")
        return data


def _npz(file: OpenFile, path: str) -> dict[str, Array]:
    found, memory = {}, Map(file)
    raw = io.FileIO(file.descriptor, closefd=False)
    with _Limited(raw) as limited, zipfile.ZipFile(limited) as archive:
        room = {True: file.size, False: _SMALL_BYTES + _MOST_TIMES * file.size}
        for member in archive.infolist():
            is_stored = member.compress_type == zipfile.ZIP_STORED
            room[is_stored] -= member.file_size
            if room[is_stored] < 0:
                told = f"{member.file_size} bytes in {member.compress_size}, which is far too much,"
                raise _damaged(path, told, "" if is_stored else "If you trust it, read it with numpy.load.")
            if member.flag_bits & _ENCRYPTED:
                raise _damaged(path, f"{member.filename[:80]!r}, encrypted,")
            array = _stored(file, memory, member, path) if is_stored else _compressed(archive, member, path)
            found[member.filename.removesuffix(".npy")] = array
    return found


def _stored(file: OpenFile, memory: Map, member: zipfile.ZipInfo, path: str) -> Array:
    """Return an uncompressed array of an archive, once its checksum was compared."""
    head = file.read(member.header_offset, _LOCAL_HEADER_BYTES)
    begin = (
        member.header_offset + len(head) + sum(struct.unpack_from("<HH", head, 26))
    )  # the lengths of its name and of extra fields
    if not head.startswith(b"PK\3\4") or begin + member.file_size > file.size:
        raise _damaged(path, f"{member.filename[:80]!r}, which is not at its offset,")
    dtype, shape, order, start = _numpys_header(file.read(begin, min(member.file_size, _LONGEST_HEADER)), path)
    if start + byte_count(shape, dtype) != member.file_size:
        raise _of_wrong_size(path, member, dtype, shape)
    checksum = 0
    for piece in file.pieces(begin, begin + member.file_size):
        checksum = zlib.crc32(piece, checksum)
    if checksum != member.CRC:
        raise _damaged(path, f"another checksum of {member.filename[:80]!r} than its header has,")
    return memory.array(dtype, shape, begin + start, order)


def _compressed(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str) -> Array:
    with archive.open(member) as inside:
        head = inside.read(_LONGEST_HEADER)
        dtype, shape, order, start = _numpys_header(head, path)
        nbytes = byte_count(shape, dtype)
        if start + nbytes != member.file_size:
            raise _of_wrong_size(path, member, dtype, shape)
        flat = np.empty(nbytes, np.uint8)
        done = min(nbytes, len(head) - start)
        flat[:done] = np.frombuffer(head, np.uint8, done, start)
        while piece := inside.read(_LONGEST_HEADER):  # the last read compares the checksum
            flat[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
    if done != nbytes:
        raise _damaged(path, f"the end of {member.filename[:80]!r} after {done} bytes of {nbytes}")
    return np.ndarray(shape, dtype, flat, order=order)


def _of_wrong_size(path: str, member: zipfile.ZipInfo, dtype: np.dtype[Any], shape: object) -> CheckpointDamagedError:
    return _damaged(path, f"{member.file_size} bytes for {member.filename[:80]!r}, an array {dtype} of {shape},")


_READERS = {".safetensors": _safetensors, ".npy": _npy, ".npz": _npz}


def _damaged(path: str, found: str, fix: str = "") -> CheckpointDamagedError:
    return CheckpointDamagedError.at(_WHERE, found=f"{found} in {path!r}", expected="a whole file of arrays", fix=fix)


# ------------------------------------------------------------------------------------------------ mapped files


class _Mapping:
    """A mapped file, as an array of bytes for NumPy; unmapped when this object ends.

    Python's mmap keeps a descriptor of each file (before 3.13), a process may have few, and a checkpoint has a file for
    each rank.  So mmap(2) is called directly.

    Raises:
        OSError: if mmap(2) fails.
    """

    def __init__(self, file: OpenFile) -> None:
        self._size = 0
        address = _mmap(None, file.size, _PROTECTION, _FLAGS, file.descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), file.path)
        self._address, self._size, self._unmap = address, file.size, _munmap
        self.__array_interface__ = {"data": (address, False), "shape": (file.size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._size:
            self._unmap(self._address, self._size)


class Map:
    """A mapped file; stays mapped as long as an array in it exists.  Writing into arrays does not change the file.

    Args:
        file: the open file; may be closed afterwards.
    """

    def __init__(self, file: OpenFile) -> None:
        self._room = _MOST_COPIED_BYTES
        self._memory: Any = np.asarray(_Mapping(file)) if file.size else b""

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, order: Any = "C") -> Array:
        """Return the array that begins at a byte of the file; a copy, if it is not aligned there."""
        if not byte_count(shape, dtype):
            return np.empty(shape, dtype)
        found: Array = np.ndarray(shape, dtype, self._memory, start, order=order)
        if found.flags.aligned or found.nbytes > self._room:
            return found
        self._room -= found.nbytes
        return found.copy(order="K")
