"""The format of a checkpoint: a manifest, and shards with the arrays.

The manifest is two JSON objects, each on a line.  The first one has the format and the checksum of the second, which
has the rest: the items, the sizes and checksums of the shards, and which bytes belong to which array.  It is written
last, when all else is complete.  Everything is checked before it is used.  Names of files are made from numbers, so
that a forged manifest cannot name other files.

The shards are files in the format safetensors, which many programs read: eight bytes have the length of a JSON header;
the header has the dtype, shape and offsets of each array; the bytes of the arrays follow.  The header is for other
programs.  An array of a dtype that safetensors does not have is stored as bytes.

A shard has the data of some ranks: for each rank arrays, then a line of JSON and the length of that.  Each shard has
those of equally many ranks, in rank order.  After them it has its parts of the arrays that are saved once.  Large
arrays are cut, so that the shards are of about equal sizes.  In the header an array that is whole has its own name, and
other data have names that begin with `_`.

Plain values are JSON as Python writes it: ints of any size, all bits of floats, NaN.  Tuples stay tuples.  A type that
JSON does not have is an object with one key, which names the type; a dict is a list of pairs, so that none of its keys
is taken for such a name.  The states of NumPy's random generators are such values.  NumPy checks little of a state, so
it is checked here.

A file may be forged: sizes are checked before memory is allocated for them.
"""

from __future__ import annotations

import copy
import heapq
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrategy import own_files
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.files import checksum_of, damaged, is_ours, parts_of
from mpistrategy.errors import DTypeError, OptionError

NAME = "manifest.json"
#: The name of the folder of checkpoint {} while it is replaced.
REPLACED = ".{}.replaced"
VERSION = 1
#: How copies are saved: one for all ranks; one for each rank; rows of a global array, some on each rank; one for each
#: rank, combined on another number of ranks.
ONE, OWN, ROWS = "one", "own", "rows"
COMBINED = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
#: Kinds of arrays, beside variables and rows.
ARRAYS = frozenset({"array", "tensor", "scalar"})
#: The most ranks that save, and the most shards.
MOST_RANKS, MOST_SHARDS = 1_000_000, 2**16
#: The most levels of objects, and of plain values in one of them.
DEEPEST = 100
_HEAD = re.compile(rb'\{"format":"mpistrategy checkpoint","version":([0-9]{1,9}),"checksum":"([0-9a-f]{32})"\}\n')


class Item(NamedTuple):
    """One item of a checkpoint: an array, a value, or an object that only holds other items.

    Attributes:
        kind: a word of `mpistrategy.checkpoint.state`; `Kept._kept_as` of this package's own objects.
        copies: `ONE`, `OWN`, `ROWS` or one of `COMBINED`; "" for an object that only holds other items.
        dtype: of an array; "" for others, which are not in the shards.
        shape: of an array; where each rank has its own array, of rank 0's.  The first axis of rows is 0 here.
        keys: of the items below it; of a list or tuple, the positions.
        values: a tuple of the value, if it was saved once; else empty.
    """

    kind: str
    copies: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    keys: Sequence[Any] = ()
    values: tuple[Any, ...] = ()

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of an array of `shape`."""
        return math.prod(self.shape) * self.itemsize


#: Items by path.
Items: TypeAlias = Mapping[str, Item]
#: Of an array, by path: a shard, the first element in it, and the one after the last.
Parts: TypeAlias = dict[str, list[tuple[int, int, int]]]


def by_width(items: Items) -> list[str]:
    """Return the paths of the arrays among some items, those of the widest dtypes first."""
    return sorted((path for path, item in items.items() if item.dtype), key=lambda path: -items[path].itemsize)


def of_each_rank(items: Items) -> Items:
    """Return the arrays and values that differ between the ranks."""
    return {path: item for path, item in items.items() if item.copies not in ("", ONE)}


def shares(items: Items, count: int) -> Parts:
    """Return the parts of the arrays that are saved once, in so many shards: each goes to the emptiest shard."""
    once = {path: item for path, item in items.items() if item.dtype and item.copies == ONE}
    total = sum(item.nbytes for item in once.values())
    most = total // (4 * count) if count > 1 else total  # bytes of a part
    emptiest = [(0, number) for number in range(count)]
    parts: Parts = {}
    for path in by_width(once):
        itemsize, size = once[path].itemsize, math.prod(once[path].shape)
        step = max(1, most // itemsize)
        for begin in range(0, size, step):
            nbytes, number = emptiest[0]
            heapq.heapreplace(emptiest, (nbytes + min(step, size - begin) * itemsize, number))
            parts.setdefault(path, []).append((number, begin, min(begin + step, size)))
    return parts


def places(node_of: Sequence[int], count: int, ranks: int) -> tuple[list[int], Array]:
    """Return the rank that writes or reads each of so many shards, and the shard of each rank's data.

    Args:
        node_of: the nodes of the ranks.  Those that write or read are spread over the nodes; the first is rank 0.
        count: how many shards there are.
        ranks: how many ranks have data.
    """
    by_node, size = np.argsort(node_of, kind="stable"), len(node_of)
    chosen = np.sort(by_node[np.arange(count) * max(size, count) // count % size])
    return chosen.tolist(), np.arange(ranks) * count // ranks


class Manifest(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        ranks: how many ranks saved it.
        shards: the size and the checksum of each of its files.
        items: the items, by path.
        own: how many bytes the data of each rank have; empty without per-rank data.
        layout: `Strategy.layout()` of the job that wrote it.
        written_by: the version of this package.
    """

    ranks: int
    shards: Sequence[tuple[int, str]]
    items: dict[str, Item]
    own: list[int]
    layout: dict[str, Any]
    written_by: str

    @property
    def names(self) -> list[str]:
        """The names of the objects."""
        return [path for path in self.items if "/" not in path]

    def text(self, where: str) -> bytes:
        """Return the bytes of the file; raise OptionError for more names and plain values than `parse` accepts."""
        return with_head(dumps(self._asdict(), where))


def with_head(body: bytes) -> bytes:
    """Return the bytes of a manifest with this JSON."""
    checksum = checksum_of(body).hexdigest()
    return f'{{"format":"mpistrategy checkpoint","version":{VERSION},"checksum":"{checksum}"}}\n'.encode() + body


def manifest_in(folder: str) -> bytes:
    """Return the bytes of the manifest in a folder; raise OSError if it cannot be read, or is too large."""
    return own_files.read(os.path.join(folder, NAME), LONGEST_TEXT, only_own=False)


def is_checkpoint(folder: str) -> bool:
    """Return whether a folder has a manifest of this package's, of any version, and no files but a checkpoint's."""
    with suppress(OSError):
        return is_ours(folder) and _HEAD.match(manifest_in(folder)) is not None
    return False


def parse(data: bytes, where: str) -> Manifest:
    """Return a manifest from its bytes.

    Raises:
        CheckpointDamagedError: for bytes that `Manifest.text` does not return.
    """
    head = _HEAD.match(data)
    if head is None:
        raise damaged(where, "a manifest of another format, or a damaged one")
    if int(head[1]) != VERSION:
        raise damaged(where, f"format version {int(head[1])} (this is {VERSION}; another mpistrategy wrote it)")
    text = data[head.end() :]
    if checksum_of(text).hexdigest().encode() != head[2]:
        raise damaged(where, "a manifest with another checksum than it was written with")
    body = loads(text, where)
    try:
        return _manifest(**body)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise damaged(where, f"a manifest that contradicts itself ({error!s:.80})") from error


def _manifest(*, ranks: Any, shards: Any, items: Any, own: Any, layout: Any, written_by: Any) -> Manifest:
    require(_is_count(ranks, MOST_RANKS) and 1 <= len(shards) <= min(ranks, MOST_SHARDS), "ranks")
    for nbytes, _ in shards:
        require(_is_count(nbytes, MOST_BYTES), "shards")
    checked: dict[str, Item] = {}
    for path, packed in items.items():
        require("/" not in path or path.rpartition("/")[0] in checked, "paths")
        require(path.count("/") <= DEEPEST, "levels")
        checked[path] = _item(*packed)
    require(isinstance(written_by, str) and len(written_by) <= 100 and isinstance(layout, dict), "layout")
    require(len(own) == (ranks if of_each_rank(checked) else 0), "data of the ranks")
    require(all(_is_count(nbytes, MOST_BYTES) for nbytes in own), "data of a rank")
    return Manifest(ranks, shards, checked, own, layout, written_by)


def _item(kind: Any, copies: Any, dtype: Any, shape: Any, keys: Any, values: Any) -> Item:
    """Return the item of these values."""
    require(copies in ("", ONE, OWN, ROWS, *COMBINED), "copies")
    require((kind == ROWS) == (copies == ROWS) and (kind in ARRAYS | {"variable", ROWS}) == bool(dtype), "kinds")
    if dtype:
        elements = dtype_of(dtype)
        require(is_shape(shape, elements.itemsize) and copies != "" and not values, "sizes")
        require(copies not in COMBINED or elements.kind not in "mMSU", "copies")
        require(copies != ROWS or bool(shape), "rows")
    else:
        require(copies in ("", ONE, OWN) and len(values) == int(copies == ONE) and not shape, "values")
    return Item(kind, copies, dtype, tuple(shape), keys, tuple(values))


def _is_count(number: Any, most: int) -> bool:
    return type(number) is int and 0 <= number <= most


def require(holds: bool, subject: str) -> None:
    """Raise ValueError, with the subject, for what no save has written."""
    if not holds:
        raise ValueError(subject)


# ------------------------------------------------------------------------------------------------ shards

#: The largest array, in bytes, and the most axes of a NumPy array.
MOST_BYTES, MOST_AXES = 2**46, 32 if np.__version__.startswith("1.") else 64
#: The longest JSON text (a header or a manifest) in bytes.
LONGEST_TEXT = 2**26
#: NumPy's names of dtypes.  NumPy would also accept whole structures.
_NUMPYS = re.compile(r"[<|](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,8}\])?)")
#: The names of dtypes in safetensors.
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
#: The bytes of a number that says how long a text is.
LENGTH_BYTES = 8
#: The arrays begin at a multiple of this.  Arrays of the widest dtypes come first, so that each array is aligned.
ALIGNMENT = 64


def shard_name(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:05}.safetensors"


# ------------------------------------------------------------------------------------------------ writing


def raw(array: Array) -> Array:
    """Return the bytes of an array, little-endian."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)


def pieces_of(contents: Mapping[str, Array]) -> list[Any]:
    """Return the bytes of a shard with these arrays, in pieces."""
    header: dict[str, Any] = {"__metadata__": {"format": "mpistrategy"}}
    start = 0
    for path, array in contents.items():
        name = NAMES.get(dtype_text(array.dtype, path))
        stop = start + array.nbytes
        shape = array.shape if name else [array.nbytes]
        header[path] = {"dtype": name or "U8", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return [len(text).to_bytes(LENGTH_BYTES, "little") + text, *map(raw, contents.values())]


# ------------------------------------------------------------------------------------------------ reading


def read_shard(path: str, nbytes: int, checksum: str, sizes: Mapping[Any, int]) -> Iterator[tuple[Any, Array]]:
    """Read a shard whole, once; yield its header and each array as bytes, which count once the iterator has ended.

    Args:
        path: the file.
        nbytes, checksum: its size and its checksum, as the manifest says.
        sizes: what is in it after the header: how many bytes, by key.

    Raises:
        CheckpointDamagedError: for another size or checksum, and for other sizes of what is in it.
        OSError, MemoryError: if it cannot be read.
    """
    with os.fdopen(own_files.open_trusted(path), "rb") as file:
        actual, head = os.fstat(file.fileno()).st_size, file.read(LENGTH_BYTES)
        length, running_checksum = int.from_bytes(head, "little"), checksum_of(head)
        if not actual == nbytes == LENGTH_BYTES + length + sum(sizes.values()) or length > LONGEST_TEXT:
            raise damaged(path, f"{actual} bytes with a header of {length}, which the manifest does not name")
        for key, size in {("",): length, **sizes}.items():
            data = np.empty(size, np.uint8)
            for part in parts_of(data):
                if file.readinto(part.data) != part.size:
                    raise damaged(path, "a file that ends too early")
                running_checksum.update(part)
            yield key, data
    if running_checksum.hexdigest() != checksum:
        raise damaged(path, "a file with another checksum than it was written with")


def as_array(data: Array, dtype: str, shape: Sequence[int]) -> Array:
    """Return an array of these bytes in native byte order, not copied where that can be."""
    kind = dtype_of(dtype)
    return data.view(kind.newbyteorder("<")).reshape(shape).astype(kind, copy=False)


# ------------------------------------------------------------------------------------------------ JSON text


def loads(data: bytes, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError if it is invalid, too deep or too large."""
    if not _can_be_read(data):
        raise damaged(where, f"{len(data)} bytes of names and plain values, which is too much")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"no JSON ({error!s:.80})") from error


def dumps(value: Any, where: str) -> bytes:
    """Return JSON; raise OptionError for a text that `loads` would refuse as too large."""
    text = json.dumps(value, separators=(",", ":")).encode()
    if not _can_be_read(text):
        raise OptionError.at(
            where,
            found=f"{len(text)} bytes of names and plain values",
            expected="less, to be read again",
            fix="Keep long lists of numbers in arrays.",
        )
    return text


def _can_be_read(text: bytes) -> bool:
    """Return whether a JSON text is not too long.

    Parsed, it must not take more than a constant and 8 times its length: an empty list is two bytes of text, and 88 of
    memory.
    """
    memory = 256 * text.count(b"{") + 88 * text.count(b"[") + 64 * text.count(b",")
    return len(text) <= LONGEST_TEXT and memory <= 2**26 + 8 * len(text)


# ------------------------------------------------------------------------------------------------ dtypes


def dtype_text(dtype: np.dtype[Any], where: str) -> str:
    """Return the name of a dtype in a manifest: ``<f8``, ``|b1``, ``bfloat16``; little-endian whatever the machine.

    Raises:
        DTypeError: for objects, structures and other dtypes that have no such name.
    """
    if dtype.type.__module__ == "ml_dtypes":  # which may have a kind of NumPy's, such as float8_e5m2
        return dtype.name
    if dtype.kind in "biufcmMSU":
        return dtype.newbyteorder("<").str
    raise DTypeError.at(where, found=f"an array of dtype {dtype}", expected="numbers, bools, strings or times")


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name, in native byte order.

    Raises:
        ValueError: for a name that `dtype_text` does not return, or an unknown name.
    """
    with suppress(ImportError, AttributeError, TypeError, ValueError, OverflowError):
        name = text if _NUMPYS.fullmatch(text) else getattr(importlib.import_module("ml_dtypes"), text)
        dtype: np.dtype[Any] = np.dtype(name)
        if dtype_text(dtype, "") == text and dtype.itemsize:
            return dtype.newbyteorder("=")
    raise ValueError(f"the dtype {text!r:.80}")


def is_shape(shape: Any, itemsize: int) -> bool:
    """Return whether it is the shape of an array that NumPy can make, and is not too large.

    An axis of length 0 does not lift the limit for the other axes.
    """
    return (
        len(shape) <= MOST_AXES
        and all(type(count) is int and 0 <= count <= MOST_BYTES for count in shape)
        and math.prod(max(count, 1) for count in shape) * itemsize <= MOST_BYTES
    )


# ------------------------------------------------------------------------------------------------ plain values

#: Stands for the JSON of a value that is not plain; None is plain.
NOT_PLAIN = object()
#: Stands for an object that is not there; None is a value.
ABSENT = object()


def to_json(value: Any, depth: int = 0) -> Any:
    """Return a nest of Python's own numbers, strings, None, lists, tuples and dicts as JSON; else raise TypeError.

    Keys of dicts are strings or ints.  Subclasses (named tuples, enums) are not plain: they would lose their class.
    Nor is what holds itself.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if depth <= DEEPEST and kind in (list, tuple):
        items = [to_json(item, depth + 1) for item in value]
        return items if kind is list else {"tuple": items}
    if depth <= DEEPEST and kind is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, to_json(item, depth + 1)] for key, item in value.items()]}
    raise TypeError("not plain")


#: What returns the value, by the type that is named.
_READERS: dict[str, Callable[[Any], Any]] = {
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(from_json, items)),
    "dict": lambda pairs: {key: from_json(item) for key, item in pairs},
}


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: for JSON that it does not return.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [from_json(item) for item in value]
    ((kind, inner),) = value.items()
    return _READERS[kind](inner)


# ------------------------------------------------------------------------------------------------ random generators

AnyGenerator: TypeAlias = np.random.Generator | np.random.RandomState
#: The largest values of numbers in states.  NumPy does not check positions before it reads memory at them.
_LARGEST = {
    "pos": 624,  # of MT19937, among the words of its key
    "buffer_pos": 4,  # of Philox, among the numbers that it has ready
    "has_uint32": 1,
    "uinteger": 2**32 - 1,
    "has_gauss": 1,
    "inc": 2**128 - 1,
}


def state_of(generator: AnyGenerator) -> Any:
    """Return the state of a generator as a nest of plain values."""
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def set_state(generator: AnyGenerator, state: Any) -> None:
    """Set the state of a generator to a state that `state_of` returned.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: for an invalid state, or a state of another bit generator.
    """
    numbers = {**state, **state["state"]}  # not of a tuple, which NumPy would take
    for name, most in _LARGEST.items():
        require(_is_count(numbers.get(name, 0), most), f"{name} in the state of a generator: not from 0 to {most}")
    if isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def checked_state(generator: AnyGenerator, state: Any, times: int) -> Any:
    """Return a state for `set_state`; with `times`, of a stream independent of it and of the streams of fewer times.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: as `set_state`.
        AttributeError: for a bit generator that has no other streams.
    """
    require(isinstance(generator, AnyGenerator), "no generator here")
    set_state(copy.deepcopy(generator), state)
    if not times:
        return state
    bits = getattr(np.random, state["bit_generator"])(0)
    bits.state = {key: state[key] for key in bits.state}
    return {**state, **_plain(bits.jumped(times).state)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
