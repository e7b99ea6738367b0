"""Restoring a checkpoint: everything is read and checked on all ranks before the first object changes.

1. Rank 0 reads the manifest, and tells the others.
2. Each shard is read by one rank, on as many ranks as saved by its writer, and its checksum is compared.  The readers
   are spread over the nodes.  So each byte is read once, and then sent: networks are faster than the file system that
   the nodes share.
3. Each rank gets the plain values that it had, and compares the checkpoint with its objects, path by path.
4. The arrays go to the ranks, and the objects change.

An array that was saved once goes to all ranks.  If each rank had a copy, each rank gets its own copy back; on another
number of ranks all ranks get the combined copies, and keep their shares of a sum.  The rows of a global array are split
again, equally many for each rank.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import (
    as_target,
    as_tensor,
    hand_back,
    library_of,
    like_given,
    on_device_of,
    placed_as,
)
from mpistrategy.arrays.dtypes import Array, quietly, wire_dtype
from mpistrategy.checkpoint.files import check_is_trusted, damaged, opened, reading
from mpistrategy.checkpoint.format import (
    ABSENT,
    ARRAYS,
    COMBINED,
    LENGTH_BYTES,
    LONGEST_TEXT,
    NAME,
    ONE,
    OWN,
    ROWS,
    Item,
    Manifest,
    as_array,
    by_width,
    checked_state,
    dtype_of,
    from_json,
    is_shape,
    loads,
    parse,
    raw,
    read_shard,
    require,
    set_state,
    shard_name,
    shares,
)
from mpistrategy.checkpoint.saving import NOTHING, REPLACED, exchange, places
from mpistrategy.checkpoint.state import (
    DICTS,
    KEPT,
    REPLACEABLE,
    UNDECIDED,
    Rows,
    State,
    is_array,
    is_tuple,
)
from mpistrategy.errors import CheckpointMismatchError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Alone, Ranks
from mpistrategy.objects.kept import Kept
from mpistrategy.objects.text import printable
from mpistrategy.variables.variable import Variable, share_of

#: What is raised over items that no save has written.
_UNSOUND = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
#: The longest text about one problem, and how many problems are shown.
_LONGEST, _MOST_PROBLEMS = 1000, 10
#: Below these kinds, arrays and values come from the checkpoint, whatever the program has.
_FREE = KEPT | {"object"}


@dataclass(frozen=True)
class Restored:
    """What `Checkpoint.restore` did.

    Attributes:
        path: the checkpoint.
        ranks: how many ranks saved it.
        written_by: the version of mpistrategy that saved it.
        layout: `Strategy.layout()` of that job.
        notes: differences between that layout and the present one; they may change the last bits of later sums.
        left_out: with partial=True, the names that are on one side only.
        objects: the restored objects by name: the program's objects, changed in place where possible, and new objects
            for numbers, strings, tuples and JAX arrays, and for the results of functions.
    """

    path: str
    ranks: int
    written_by: str
    layout: dict[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def restore(objects: dict[str, Any], state: State, path: str, partial: bool, call: Call) -> Restored:
    """Restore `objects`, and put new objects into it, from the checkpoint at `path`.  Collective."""
    communicator = state.strategy.extended.communicator
    text = b""
    if communicator.rank == 0:
        with reading(call.where, path):
            text = read_text(path)
    call.agree("read a manifest")
    text = from_rank_0(communicator, text)
    call.expect_more()
    with reading(call.where, path):
        source = Reading(communicator, path, text)
        source.read_shards(objects)
    call.agree("read shards", patiently=True)
    source.tell_owns(call)
    fit = Comparison(source, state, objects, partial)
    fit.compare(call.where)
    call.agree("compare a checkpoint with the objects")
    fit.prepare(objects)
    fit.fetch(call)
    call.expect_more()
    manifest = source.manifest
    objects.update({name: fit.restored(name) for name in manifest.names if name in objects})
    fit.reset()
    call.agree("restore a checkpoint")
    left_out = tuple(printable(name, "") for name in fit.one_sided)
    notes = _notes(manifest, state.strategy.layout())
    return Restored(path, manifest.ranks, manifest.written_by, manifest.layout, notes, left_out, dict(objects))


class Comparison:
    """Compares a checkpoint with these objects, path by path; alike on all ranks but for per-rank data.

    Args:
        source: the checkpoint, with the plain values of this rank.
        state: the objects.
        names: the names of the objects.
        partial: restore the objects that are on both sides, and leave the others.

    Attributes:
        one_sided: the names that are on one side only.
    """

    def __init__(self, source: Reading, state: State, names: Collection[str], partial: bool) -> None:
        self._source, self._state, self._is_partial = source, state, partial
        items = source.manifest.items
        self._items = {path: item for path, item in items.items() if path.partition("/")[0] in names}
        self.one_sided: list[str] = sorted({*source.manifest.names} ^ {*names})
        #: The arrays that have come and go into no variable, by path.
        self._arrays: dict[str, Array] = {}
        #: The paths right below each path; and the kind of the object there or nearest above that tells its own state.
        self._paths_below: dict[str, list[str]] = defaultdict(list)
        self._inside: dict[str, str] = {"": ""}
        for path, item in self._items.items():
            above = path.rpartition("/")[0]
            self._paths_below[above].append(path)
            self._inside[path] = item.kind if item.kind in _FREE | {"module"} else self._inside[above]

    # ------------------------------------------------------------------------------------------- what does not fit

    def compare(self, where: str) -> None:
        """Raise CheckpointMismatchError, with a list, for what does not fit."""
        problems = [printable(line, "")[:_LONGEST] for line in islice(self._problems(), _MOST_PROBLEMS + 1)]
        if problems:
            problems[_MOST_PROBLEMS:] = ["and more"] * (len(problems) > _MOST_PROBLEMS)
            raise CheckpointMismatchError.at(
                where,
                found=f"a checkpoint, {self._source.path!r}, that does not fit the objects",
                expected="the same names, kinds, dtypes and shapes",
                fix="\n  ".join(["Nothing has changed. These do not fit (partial=True leaves names out):", *problems]),
            )

    def _problems(self) -> Iterator[str]:
        """Yield what does not fit; the text may come from a checkpoint."""
        saved = self._source.manifest.items
        for name in () if self._is_partial else self.one_sided:
            if name in saved:
                yield f"{name}: {saved[name].kind} in the checkpoint, nothing here"
            else:
                yield f"{name}: {self._in_words(name)} here, nothing in the checkpoint"
        for path, own_item in self._state.items.items():
            inside = self._inside.setdefault(path, self._inside[path.rpartition("/")[0]])
            is_free = inside == "object" or own_item.kind in REPLACEABLE or path in self._state.firsts
            if path not in self._items and path.partition("/")[0] in self._items and not is_free:
                yield f"{path}: {self._in_words(path)} here, nothing in the checkpoint"
        for path, item in self._items.items():
            try:
                trouble = self._trouble(path, item)
            except _UNSOUND as error:
                trouble = f"{type(error).__name__}: {error}"
            if trouble:
                yield f"{path}: {trouble}"

    def _trouble(self, path: str, item: Item) -> str:
        """Return why an item does not fit the program's object; "" if it does."""
        value, kind = self._target(path, item), item.kind
        if item.copies == OWN and not self._source.same_ranks and kind != "rng":
            return (
                f"each of the {self._source.manifest.ranks} ranks that saved had a {kind} of its own; "
                f"now there are {self._source.communicator.size}; "
                "save rows of a global array as ms.Rows(array), sums and means in an ON_READ Variable with that "
                "aggregation, or make it equal on all ranks"
            )
        if not self._fits(path, item, value):
            shape = f" {item.dtype}{list(self._shape_of(path, item))}" if item.is_array else ""
            how = f" with aggregation {item.copies}" if item.copies in COMBINED else ""
            return f"{kind}{shape}{how} in the checkpoint, {self._in_words(path)} here"
        if kind in ARRAYS and isinstance(value, np.ndarray) and not value.flags.writeable:
            return "a read-only array here"
        content = self._content(path, item)
        if kind == "module":
            saved, own = ({*items[content["state"]].keys} for items in (self._items, self._state.items))
            if saved != own:
                return f"not in the checkpoint: {sorted(own - saved)}; not in the module here: {sorted(saved - own)}"
        return value._check(self._zero_state(path), self._state.live.get) if kind in KEPT else ""

    def _fits(self, path: str, item: Item, value: Any) -> bool:
        """Return whether there is an object of this kind, dtype and shape, or a replaceable object."""
        own_item, kind = self._state.items.get(path), item.kind
        here = "" if own_item is None else own_item.kind
        if value is ABSENT:
            # An optimizer has looked at the variables that it will make.
            is_planned = kind == "variable" and self._inside[path] == "optimizer"
            return is_planned or (kind in REPLACEABLE and here != ROWS) or (kind == ROWS and here in ("", ROWS))
        if kind in ("variable", ROWS) or _is_in_place(value):
            return (here == kind or kind in ARRAYS) and self._has_layout(path, item)
        if kind == "plain" or kind in ARRAYS:
            return here in REPLACEABLE
        if kind == "tuple":
            count = len(self._paths_below[path])
            return is_tuple(value) and len(getattr(value, "_fields", range(count))) == count
        if kind in ("dict", "list"):
            return type(value) in (DICTS if kind == "dict" else (list,))
        return here == kind

    def _has_layout(self, path: str, item: Item) -> bool:
        """Return whether the array here has this dtype and shape; and whether its copies are combined, if these are."""
        own_item = self._state.items.get(path)
        return (
            own_item is not None
            and item.is_array
            and (own_item.dtype, own_item.shape) == (item.dtype, self._shape_of(path, item))
            and not (item.copies in COMBINED and own_item.copies == UNDECIDED)
        )

    def _shape_of(self, path: str, item: Item) -> tuple[int, ...]:
        """Return the shape of the array that this rank gets; of rows, without their number."""
        is_own = item.copies == OWN and self._source.same_ranks
        return tuple(self._source.values[path]) if is_own else item.shape

    def _in_words(self, path: str) -> str:
        """Return the program's object at a path, in words."""
        own_item, live = self._state.items.get(path), self._state.live.get(path)
        if own_item is None:
            return "nothing"
        return (
            f"{own_item.kind} {own_item.dtype}{list(own_item.shape)}"
            if own_item.is_array
            else f"a {type(live).__name__}"
        )

    # ------------------------------------------------------------------------------------------- objects and values

    def _target(self, path: str, item: Item) -> Any:
        """Return the object at a path that an item goes into; `ABSENT` if the item makes a new object."""
        is_new = item.kind in REPLACEABLE | {ROWS} and self._inside[path] in _FREE
        return ABSENT if is_new else self._state.live.get(path, ABSENT)

    def _content(self, path: str, item: Item) -> Any:
        """Return what a checkpoint has for this rank, without arrays: the paths below by key, or a value or state.

        The value is another rank's if this rank did not save; its generator then gets a new stream.

        Raises:
            ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError: for what no save wrote.
        """
        if item.kind not in ("plain", "rng"):
            paths = self._paths_below[path]
            keys = ["state"] if item.kind in ("module", "object") else item.keys or range(len(paths))
            return dict(zip(keys, paths, strict=True))
        value = from_json(item.values[0] if item.copies == ONE else self._source.values[path])
        times = 0 if item.copies == ONE else self._source.communicator.rank // self._source.manifest.ranks
        return checked_state(self._state.live[path], value, times) if item.kind == "rng" else value

    def _zero_state(self, path: str) -> Any:
        """Return the saved state of an object of this package, with zeros in its arrays."""
        item = self._items[path]
        if item.is_array:
            return np.broadcast_to(np.zeros((), dtype_of(item.dtype)), self._shape_of(path, item))
        content = self._content(path, item)
        if item.kind in ("plain", "rng"):
            return content
        children = {key: self._zero_state(inner) for key, inner in content.items()}
        return [*children.values()] if item.kind == "list" else children

    # ------------------------------------------------------------------------------------------- restoring

    def prepare(self, objects: Mapping[str, Any]) -> None:
        """Make the missing variables.  Collective."""
        state = self._state
        for path, value in state.live.items():
            if isinstance(value, Kept) and path in self._items:
                value._prepare(self._zero_state(path), state.live.get, state.strategy)
        self._state = State(objects, state.strategy, state.where)

    def fetch(self, call: Call) -> None:
        """Write arrays into variables; keep the other arrays until objects are made of them.  Collective."""
        for path, item in self._items.items():
            live = self._state.live.get(path)
            if item.kind == "variable" and isinstance(live, Variable) and self._has_layout(path, item):
                store(live, fetched(self._source, path, self._state.items[path].copies, call))
            elif item.is_array:
                self._arrays[path] = fetched(self._source, path, item.copies, call)

    def reset(self) -> None:
        """Fill the variables of optimizers that the checkpoint does not have."""
        for path, first in self._state.firsts.items():
            if path not in self._items and path.partition("/")[0] in self._items:
                var = self._state.live[path]
                store(var, np.full(var.shape, first, var.dtype))

    def restored(self, path: str) -> Any:
        """Return the restored object at a path: the program's object, changed in place if possible."""
        item = self._items[path]
        value, live, kind = self._target(path, item), self._state.live.get(path, ABSENT), item.kind
        if kind == "variable":
            return live
        if item.is_array:
            return self._restored_array(self._arrays.pop(path), item, value, live)
        content = self._content(path, item)
        if kind == "plain":
            return _in_place(content, value)
        if kind == "rng":
            set_state(live, content)
            return live
        children = {key: self.restored(inner) for key, inner in content.items()}
        if kind == "dict":
            return _in_place(children, live.copy() if value is ABSENT and type(live) in DICTS else value)
        if kind == "list":
            return _in_place([*children.values()], value)
        if kind == "tuple":
            return getattr(type(live), "_make", tuple)(children.values())
        if kind in ("module", "object"):
            live.load_state_dict(children["state"])
        elif kind in KEPT:
            live._load(children)
        return live

    def _restored_array(self, array: Array, item: Item, value: Any, live: Any) -> Any:
        if item.kind == ROWS:
            rows = value if isinstance(value, Rows) else Rows(array)
            rows.value = like_given(array, live.value) if isinstance(live, Rows) else array
            return rows
        if _is_in_place(value) and library_of(value) != "jax":
            target = as_target(value, "Checkpoint.restore", "an array")
            target[...] = placed_as(array, target)
            hand_back(target, value)
            return value
        if _is_in_place(live):
            return like_given(array, live)
        if item.kind == "tensor":
            return as_tensor(array)
        return array[()] if item.kind == "scalar" else array


def _is_in_place(value: Any) -> bool:
    """Return whether a value is an array that can be written in place."""
    return is_array(value) and not isinstance(value, np.generic)


def _in_place(value: Any, container: Any) -> Any:
    """Return the container with the contents of a value, if both are lists or both are dicts; else the value."""
    if type(container) is list and type(value) is list:
        container[:] = value
        return container
    if type(container) in DICTS and type(value) is dict:
        container.clear()
        container.update(value)
        return container
    return value


def _notes(manifest: Manifest, now: dict[str, Any]) -> tuple[str, ...]:
    # Gradient buckets are often made after a checkpoint was restored.
    no_news = {"source"} if now.get("gradient_buckets") else {"source", "gradient_buckets"}
    return tuple(
        printable(f"{key}: {then!r:.500} when it was saved, {now.get(key)!r:.500} now", "")
        for key, then in manifest.layout.items()
        if now.get(key) != then and key not in no_news
    )


# ------------------------------------------------------------------------------------------- reading on all ranks


def read_text(path: str) -> bytes:
    """Return the folder of a checkpoint and its manifest; on one rank."""
    above, name = os.path.split(path)
    replaced = os.path.join(above, REPLACED.format(name))  # a job may have ended between the two renames
    folder = replaced if os.path.lexists(replaced) and not os.path.lexists(path) else path
    check_is_trusted(folder)
    with opened(os.path.join(folder, NAME), LONGEST_TEXT) as file:
        return os.fsencode(folder) + b"\0" + file.read()


def from_rank_0(ranks: Ranks, text: bytes) -> bytes:
    """Return the text of rank 0 on every rank.  Collective."""
    length = np.array([len(text)], np.int64)
    ranks.bcast(length, 0)
    message = np.frombuffer(text, np.uint8).copy() if ranks.rank == 0 else np.empty(int(length[0]), np.uint8)
    ranks.bcast(message, 0)
    return message.tobytes()


class Own:
    """The data of a rank, as its shard has them.

    Args:
        data: the bytes: the arrays, those of the widest dtypes first; the values as JSON; the length of that.
        items: the arrays and values that differ between the ranks.
        where: the name of the checkpoint, for errors.

    Attributes:
        data: as given.
        end: the bytes of the values and the length: the data of a rank without arrays.
        values: by path; of arrays whose shape may differ between ranks, the shape.
        arrays: by path, in native byte order, not copied where that can be.

    Raises:
        CheckpointDamagedError: for other data than the items say.
    """

    def __init__(self, data: Array, items: Mapping[str, Item], where: str) -> None:
        self.data = data
        stop = data.size - LENGTH_BYTES
        begin = stop - int.from_bytes(data[max(0, stop) :].tobytes(), "little")
        self.end: Array = data[max(0, begin) :]
        self.values: dict[str, Any] = loads(self.end[:-LENGTH_BYTES].tobytes(), where)
        self.arrays: dict[str, Array] = {}
        start = 0
        try:
            for path in by_width(items):
                item = items[path]
                shape = self.values[path] if item.copies in (OWN, ROWS) else item.shape
                require(is_shape(shape, item.itemsize), "shape")
                require(item.copies != ROWS or tuple(shape[1:]) == item.shape[1:], "rows")
                stop = start + math.prod(shape) * item.itemsize
                self.arrays[path] = as_array(data[start:stop], item.dtype, shape)
                start = stop
            require(start == begin, "size")
        except (TypeError, ValueError, LookupError) as error:
            raise damaged(where, f"other data of a rank than the manifest names ({str(error)[:80]})") from error


class Reading:
    """A checkpoint that some ranks read together.

    Args:
        communicator: the ranks.
        path: the checkpoint.
        text: what `read_text` has returned on rank 0.

    Attributes:
        communicator, path: as given.
        manifest: as all ranks know it.
        parts: of each array that was saved once: the ranks that read it, its first elements for them, and those after.
        arrays: the parts that this rank has read, by path and first element.
        owns: the per-rank data that this rank has read, by the rank that saved them.
        reader_of: the rank that reads the data of each rank that saved; in ascending order.
        same_ranks: whether as many ranks saved as there are now.
        own_arrays: the arrays of this rank, on as many ranks as saved.
        values: the plain values of this rank; of another rank if this rank did not save.

    Raises:
        CheckpointDamagedError: for a manifest of no save.
    """

    def __init__(self, communicator: Ranks, path: str, text: bytes) -> None:
        self.communicator = communicator
        self.path = path
        self.parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self.arrays: dict[tuple[str, int], Array] = {}
        self.owns: dict[int, Own] = {}
        self.own_arrays: dict[str, Array] = {}
        self.values: dict[str, Any] = {}
        folder, _, data = text.partition(b"\0")
        self._folder = os.fsdecode(folder)
        self.manifest: Manifest = parse(data, path)
        shards, saved = len(self.manifest.shards), self.manifest.ranks
        self._readers, self._shard_of = places(communicator.node_of, shards, saved)
        self.reader_of: Array = np.array(self._readers)[self._shard_of]
        self.same_ranks: bool = saved == communicator.size

    def read_shards(self, names: Collection[str]) -> None:
        """Read this rank's shards, whole; keep the arrays below some names, and the per-rank data.

        Raises:
            CheckpointDamagedError: for another size or checksum than the manifest says.
        """
        items, own = self.manifest.items, self.manifest.own
        shared = shares(items, len(self.manifest.shards))
        for number, (reader, size_and_sum) in enumerate(zip(self._readers, self.manifest.shards, strict=True)):
            for path, (begin, stop) in shared[number].items():
                self.parts[path].append((reader, begin, stop))
            if reader == self.communicator.rank:
                ranks = np.flatnonzero(self._shard_of == number).tolist() if own else []
                entries = [(f"_rank {rank}", own[rank], True) for rank in ranks]
                for path, (begin, stop) in shared[number].items():
                    is_kept = path.partition("/")[0] in names
                    entries.append((path, (stop - begin) * items[path].itemsize, is_kept))
                file = os.path.join(self._folder, shard_name(number))
                contents = read_shard(file, *size_and_sum, entries)
                for rank in ranks:
                    self.owns[rank] = Own(contents.pop(f"_rank {rank}"), self.manifest.of_each_rank, self.path)
                for path, data in contents.items():
                    self.arrays[path, shared[number][path][0]] = as_array(data, items[path].dtype, [-1])

    def tell_owns(self, call: Call) -> None:
        """Make `own_arrays` and `values`.  Collective; the ranks expect one more agreement then."""
        ranks, manifest, received = self.communicator, self.manifest, list[Array]()
        if manifest.own and not (self.same_ranks and (self.reader_of == np.arange(ranks.size)).all()):
            read = {rank: own.data if self.same_ranks else own.end for rank, own in self.owns.items()}
            outgoing = [[read.get(rank % manifest.ranks, NOTHING)] for rank in range(ranks.size)]
            received = exchange(ranks, outgoing, "send what each rank had", call)
        call.expect_more()
        items = manifest.of_each_rank if self.same_ranks else {}
        own = Own(max(received, key=len), items, self.path) if received else self.owns.get(ranks.rank)
        if own is not None:
            self.own_arrays, self.values = own.arrays, own.values


def arrays_of(path: str) -> dict[str, Array]:
    """Return the arrays of a checkpoint by path, per-rank arrays by ``path@rank``; other copies are combined."""
    ranks = Alone()
    with Call(ranks.guard, "Checkpoint.arrays") as call, reading(call.where, path):
        source = Reading(ranks, path, read_text(path))
        manifest = source.manifest
        source.read_shards(manifest.names)
        source.own_arrays = source.owns[0].arrays if source.owns else {}
        items = {name: item for name, item in manifest.items.items() if item.is_array}
        arrays = {name: fetched(source, name, item.copies, call) for name, item in items.items() if item.copies != OWN}
        for name, item in items.items():
            for rank, own in sorted(source.owns.items()) if item.copies == OWN else ():
                arrays[f"{name}@{rank}"] = own.arrays[name]
    return arrays


def fetched(source: Reading, path: str, copies: str, call: Call) -> Array:
    """Return the array of an item, as this rank gets it.  Collective.

    Args:
        source, path: the checkpoint, and where the array is in it.
        copies: how copies are saved (`Item.copies`) there that the array goes to.
        call: has agreed.
    """
    ranks, item = source.communicator, source.manifest.items[path]
    if item.copies == OWN or (source.same_ranks and item.copies == copies in COMBINED):
        return source.own_arrays[path]  # this rank gets its own copy back
    if item.copies == ROWS:
        return _rows(source, path, item, call)
    array = (_total if item.copies in COMBINED else _copy)(source, path, item)
    return share_of(array, ranks.rank, ranks.size) if copies == "SUM" else array


def store(var: Variable, array: Array) -> None:
    """Write an ndarray of its dtype and shape into this rank's copy of a variable, whatever its policy is."""
    storage = var._storage
    with on_device_of(storage):
        storage[...] = placed_as(array, storage)


def _copy(source: Reading, path: str, item: Item) -> Array:
    """Return the only copy on all ranks; the ranks that have read its parts send them."""
    ranks, parts = source.communicator, source.parts[path]
    array = np.empty(item.elements, dtype_of(item.dtype))
    for root, begin, stop in parts:
        if root == ranks.rank:
            stored = source.arrays.pop((path, begin))
            if len(parts) == 1:
                array = stored  # which need not be copied
            else:
                array[begin:stop] = stored
        if stop > begin:
            ranks.bcast(array[begin:stop], root)
    return array.reshape(item.shape)


@quietly
def _total(source: Reading, path: str, item: Item) -> Array:
    """Return the sum or mean of all copies, or the first one: added in rank order by each reader, then by all."""
    dtype = wire_dtype(dtype_of(item.dtype))
    if dtype.kind not in "iufc":  # of bools, their number; of the smallest floats
        dtype = np.dtype(np.int32 if dtype.kind == "b" else np.float32)
    # -0.0: from 0.0 on, a copy's -0.0 would come back as 0.0
    total = np.negative(np.zeros(item.shape, dtype), out=np.empty(item.shape, dtype))
    for rank, own in sorted(source.owns.items()):
        if rank == 0 or item.copies != "ONLY_FIRST_REPLICA":
            total += own.arrays[path].astype(dtype, copy=False)
    if total.size:
        source.communicator.allreduce(total.reshape(-1))
    return (total / source.manifest.ranks if item.copies == "MEAN" else total).astype(dtype_of(item.dtype))


def _rows(source: Reading, path: str, item: Item, call: Call) -> Array:
    """Return this rank's part of a global array: the next rows, equally many on each rank but the last ranks."""
    ranks, lengths = source.communicator, np.zeros(source.manifest.ranks, np.int64)
    for saved, own in source.owns.items():
        lengths[saved] = len(own.arrays[path])
    ranks.allreduce(lengths)
    ends = np.cumsum(lengths)
    length = max(1, -(-int(ends[-1]) // ranks.size))
    outgoing: list[list[Array]] = [[] for _ in range(ranks.size)]
    for saved, own in sorted(source.owns.items()):
        end, block = int(ends[saved]), own.arrays[path]
        begin = end - len(block)
        for rank in range(begin // length, -(-end // length)):
            part = block[max(0, rank * length - begin) : (rank + 1) * length - begin]
            outgoing[rank].append(raw(part))
    received = np.concatenate(exchange(ranks, outgoing, "send rows", call))  # readers are in the order of rows
    count = max(0, min(length, int(ends[-1]) - ranks.rank * length))
    return as_array(received, item.dtype, (count, *item.shape[1:]))
