"""Shards: the arrays that one rank has written, in the layout of safetensors, which many programs read.

Eight bytes tell the length of a JSON header, the header tells dtype, shape and place of each array, then the bytes of
the arrays follow.  Nothing in it is ever executed.  A dtype that safetensors has no word for is kept as bytes, and the
manifest says what they are.  Files of others in this layout, and NumPy's own, are read as well.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays import Array
from mpistrategy.checkpoint_files import Folder, reading
from mpistrategy.checkpoint_values import dtype_of, dtype_text
from mpistrategy.errors import CheckpointDamagedError, OptionError

#: What a dtype is called in safetensors.
NAMES = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<f2": "F16",
    "bfloat16": "BF16",
    "<u4": "U32",
    "<i4": "I32",
    "<f4": "F32",
    "<u8": "U64",
    "<i8": "I64",
    "<f8": "F64",
    "<c8": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {name: text for text, name in NAMES.items()}
_LENGTH_BYTES, _ALIGNMENT = 8, 8
#: The longest header, in bytes: safetensors has the same limit.
LONGEST_HEADER = 100_000_000
MOST_BYTES = 2**46
_METADATA = "__metadata__"


class Stored(NamedTuple):
    """An array as it lies in a shard: its bytes, and what the header says that they are."""

    data: memoryview
    name: str
    shape: tuple[int, ...]

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return a copy of it in native byte order; the caller has compared the number of bytes."""
        found = np.frombuffer(self.data, np.uint8).view(dtype) if self.data.nbytes else np.empty(0, dtype)
        return np.array(found.reshape(shape), dtype=dtype.newbyteorder("="))


def pieces_of(arrays: Mapping[str, Array]) -> Iterator[Any]:
    """Yield the bytes of a shard."""
    header: dict[str, Any] = {_METADATA: {"format": "mpistrategy"}}
    start = 0
    for path, array in arrays.items():
        name, shape = NAMES.get(dtype_text(array.dtype, path)), list(array.shape)
        if name is None:
            name, shape = "U8", [array.nbytes]
        header[path] = {"dtype": name, "shape": shape, "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(_LENGTH_BYTES, "little") + text
    for array in arrays.values():
        if array.nbytes:
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            yield little.reshape(-1).view(np.uint8).data


def parsed(data: bytearray, where: str) -> dict[str, Stored]:
    """Return the arrays of a shard by their names.

    Raises:
        CheckpointDamagedError: for what is no shard; nothing is read beyond its end.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if len(data) < _LENGTH_BYTES or length > LONGEST_HEADER or begin > len(data):
        raise _damaged(where, f"a header of {length} bytes in {len(data)}")
    header = loads(data[_LENGTH_BYTES:begin], where)
    if not isinstance(header, dict):
        raise _damaged(where, "a header that is no JSON object")
    arrays = memoryview(data)[begin:]
    return {path: _stored(where, path, entry, arrays) for path, entry in header.items() if path != _METADATA}


def _stored(where: str, path: str, entry: Any, data: memoryview) -> Stored:
    try:
        name, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [start, stop, *shape]
        is_sound = isinstance(name, str) and all(type(number) is int and number >= 0 for number in numbers)
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound or not start <= stop <= len(data):
        raise _damaged(where, f"the entry {str(entry)[:80]} for {path[:80]!r}")
    return Stored(data[start:stop], name, tuple(shape))


def loads(data: bytes | bytearray, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError for what is none, has a key twice or is too deep."""
    try:
        return json.loads(bytes(data).decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"no JSON ({str(error)[:80]})") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _damaged(where: str, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError.at(
        "a checkpoint", found=f"{found}, in {where!r}", expected="a file as it was written"
    )


# ------------------------------------------------------------------------------------------- files of others


def arrays_of_file(path: str) -> dict[str, Array]:
    """Return the arrays in a ``.safetensors``, ``.npz`` or ``.npy`` file by name; that of a ``.npy`` has none, "".

    Raises:
        CheckpointMissingError, CheckpointReadError: when it cannot be read.
        CheckpointDamagedError: when it is something else inside; objects (pickles) are never loaded.
        OptionError: for another ending.
    """
    where, ending = "Checkpoint.arrays", os.path.splitext(path)[1]
    with reading(where, path):
        if ending in (".npz", ".npy"):
            return _numpys(path)
        if ending == ".safetensors":
            with Folder.parent_of(os.path.abspath(path)) as folder:
                data = folder.read(os.path.basename(path), None, MOST_BYTES)
            return {name: _foreign(path, name, stored) for name, stored in parsed(data, path).items()}
    raise OptionError.at(
        where, found=f"{path!r}", expected="a checkpoint's folder, or a .safetensors, .npz or .npy file"
    )


def _foreign(path: str, name: str, stored: Stored) -> Array:
    text = _DTYPES.get(stored.name)
    if text is None:
        raise _damaged(path, f"an array {name!r} of dtype {stored.name[:20]!r}, which NumPy does not have")
    dtype = dtype_of(text)
    if math.prod(stored.shape) * dtype.itemsize != stored.data.nbytes:
        raise _damaged(path, f"{stored.data.nbytes} bytes for {name!r} of shape {stored.shape}")
    return stored.array(dtype, stored.shape)


def _numpys(path: str) -> dict[str, Array]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {"": found}
        with found:
            return {name: found[name] for name in found.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, MemoryError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
