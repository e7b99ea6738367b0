"""Manifests that were made up to harm: their checksums are right, and what they say is not."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
from replicas import long_lane

import mpistrategy as ms
from mpistrategy.checkpoint import arrays as checkpoint_arrays
from mpistrategy.checkpoint import generators
from mpistrategy.checkpoint.storage import shards
from mpistrategy.checkpoint.storage.files import checksum_of
from mpistrategy.checkpoint.storage.manifest import NAME, Item, Manifest, Shard, parse
from mpistrategy.checkpoint.storage.plain_values import to_json
from mpistrategy.checkpoint.storage.shards import loads, own_pieces, pieces_of, shard_name

pytestmark = pytest.mark.one_rank


def local(**objects: Any) -> ms.Checkpoint:
    with ms.OneDeviceStrategy("CPU:0").scope():
        return ms.Checkpoint(**objects)


def peak_of(call: Callable[[], object]) -> int:
    """Return how many bytes a call takes meanwhile, maps of files apart."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def forged(folder: Path, items: dict[str, Item], arrays: dict[str, Any] | None = None, ranks: int = 1) -> Path:
    """Write a checkpoint with these items, and the same arrays in each shard, which has what one rank has."""
    folder.mkdir()
    once = {path: array for path, array in (arrays or {}).items() if items[path].copies == "one"}
    own = {path: array for path, array in (arrays or {}).items() if path not in once}
    values = {path: own[path].shape if path in own else 1.0 for path in items if items[path].copies in ("own", "rows")}
    shards = []
    for rank in range(ranks):
        blocks = {} if all(item.copies in ("", "one") for item in items.values()) else own_pieces(own, values, "x")
        data = b"".join(bytes(piece) for piece in pieces_of(once, {rank: blocks} if blocks else {}))
        (folder / shard_name(rank)).write_bytes(data)
        shards.append(Shard(len(data), checksum_of(data).hexdigest(), rank))
    names = tuple(path for path in items if "/" not in path)
    (folder / NAME).write_bytes(Manifest(ranks, tuple(shards), items, names, {}, "x").text())
    return folder


# ------------------------------------------------------------------------------------------------ generators


def generator_of(kind: str) -> Any:
    if kind == "RandomState":
        return np.random.RandomState(0)
    return np.random.Generator(getattr(np.random, kind)(0))


def change_number(state: Any, name: str, value: Any) -> None:
    """Change a number in the state of a generator as a manifest has it."""
    for pair in state["dict"]:
        if pair[0] == name:
            pair[1] = value
        elif isinstance(pair[1], dict) and "dict" in pair[1]:
            change_number(pair[1], name, value)


#: NumPy takes most of these, and reads elsewhere in memory with the next number that is drawn.
NUMBERS = [
    ("MT19937", "pos", 10**8), ("MT19937", "pos", -1), ("MT19937", "pos", 625), ("RandomState", "pos", 10**8),
    ("RandomState", "pos", True), ("RandomState", "has_gauss", 2), ("Philox", "buffer_pos", -(10**8)),
    ("Philox", "buffer_pos", 5), ("Philox", "has_uint32", 7), ("PCG64", "has_uint32", -1), ("PCG64", "uinteger", 2**32),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value"), NUMBERS)
def test_a_generator_that_points_elsewhere(tmp_path: Path, kind: str, name: str, value: Any) -> None:
    generator = generator_of(kind)
    checkpoint = local(rng=generator)
    checkpoint.save(tmp_path / "c")
    content = hostile.body_of(tmp_path / "c")
    change_number(content["items"]["rng"][6][0], name, value)
    hostile.write_body(tmp_path / "c", content)
    with pytest.raises(ms.errors.CheckpointMismatchError, match=name):
        checkpoint.restore(tmp_path / "c")
    hostile.draw_from(generator)


def test_a_state_that_is_no_dict(tmp_path: Path) -> None:
    """NumPy takes a tuple, too."""
    checkpoint = local(rng=np.random.RandomState(0))
    checkpoint.save(tmp_path / "c")
    content = hostile.body_of(tmp_path / "c")
    key = {"tuple": ["ndarray", "<u4", [1] * 624]}
    content["items"]["rng"][6] = [{"tuple": ["MT19937", key, 10**8]}]
    hostile.write_body(tmp_path / "c", content)
    with pytest.raises(ms.errors.CheckpointMismatchError, match="a state of type tuple"):
        checkpoint.restore(tmp_path / "c")


def test_streams_that_point_elsewhere() -> None:
    streams = ms.Streams(1, 0)
    state = generators.state_of_streams(streams)
    state["replica"] = generators.state_of(np.random.RandomState(0))
    state["replica"]["state"]["pos"] = 10**8
    with pytest.raises(ValueError, match="pos"):
        generators.set_streams(streams, state["shared"], state["replica"], 0)
    with pytest.raises(ValueError, match="pos"):
        generators.jumped(state["replica"], 1)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "RandomState", "of PCG64"])
def test_generators_go_on(tmp_path: Path, kind: str) -> None:
    """Whatever they have drawn before: states that they do have are not refused."""
    rng = np.random.RandomState(np.random.PCG64(3)) if kind == "of PCG64" else generator_of(kind)
    checkpoint = local(rng=rng)
    for number in range(7):
        checkpoint.save(tmp_path / "c", overwrite=True)
        drawn = [rng.random(number).tolist(), rng.standard_normal(1).tolist()]
        drawn.append(rng.bytes(3) if kind in ("RandomState", "of PCG64") else int(rng.integers(9, dtype=np.int32)))
        checkpoint.restore(tmp_path / "c")
        assert drawn[0] == rng.random(number).tolist()
        assert drawn[1] == rng.standard_normal(1).tolist()


# ------------------------------------------------------------------------------------------------ more than there is


def lists(count: int) -> dict[str, Item]:
    """Return nested lists, each of which says that it has all the others."""
    return {"a": Item("list", more=count)} | {f"a/{number}": Item("list", more=count) for number in range(count - 1)}


def lists_with_ends(count: int) -> dict[str, Item]:
    """Return lists that have a last element, and say that there are many before it."""
    items = {"a": Item("list", more=count)}
    for number in range(count):
        items |= {f"a/{number}": Item("list", more=2 * count), f"a/{number}/{2 * count - 1}": Item("list", more=0)}
    return items


def dicts(count: int) -> dict[str, Item]:
    """Return a dict whose keys are all missing, at a path that is long."""
    keys: list[Any] = list(range(10 * count))
    return {"a": Item("dict", more=["x" * 1000 * count]), f"a/{'x' * 1000 * count}": Item("dict", more=keys)}


def slots(count: int) -> dict[str, Item]:
    """Return an optimizer of many variables that are nowhere."""
    settings = {"dict": [["learning_rate", {"float": "0x1p-3"}], ["skipped_steps", 0]]}
    more = {"class": "SGD", "variables": [None] * 200 * count, "slots": []}
    return {"a": Item("optimizer", more=more), "a/settings": Item("plain", "one", values=(settings,))}


@pytest.mark.parametrize("make", [lists, lists_with_ends, dicts, slots])
def test_a_small_manifest_that_speaks_of_much(tmp_path: Path, make: Callable[[int], dict[str, Item]]) -> None:
    path = forged(tmp_path / "c", make(1500))
    checkpoint = local(a=ms.optimizers.SGD(0.1) if make is slots else {} if make is dicts else [])
    began = time.process_time()  # on a busy machine, too
    for partial in (False, True):
        with pytest.raises(ms.errors.CheckpointMismatchError):
            checkpoint.restore(path, partial=partial)
    assert time.process_time() - began < 4


@pytest.mark.slow
def test_of_many_problems_only_some_are_kept(tmp_path: Path) -> None:
    path, checkpoint = forged(tmp_path / "c", slots(1000)), local(a=ms.optimizers.SGD(0.1))
    found: list[str] = []

    def restore() -> None:
        with pytest.raises(ms.errors.CheckpointMismatchError) as caught:
            checkpoint.restore(path)
        found.append(str(caught.value))

    assert peak_of(restore) < 2**25
    assert found[0].endswith("and 199990 more")


def test_a_name_that_stands_twice(tmp_path: Path) -> None:
    checkpoint = local(a=1)
    checkpoint.save(tmp_path / "c")
    content = hostile.body_of(tmp_path / "c")
    content["names"] *= 2
    hostile.write_body(tmp_path / "c", content)
    with pytest.raises(ms.errors.CheckpointDamagedError):
        checkpoint.restore(tmp_path / "c", partial=True)


# ------------------------------------------------------------------------------------------------ their arrays


@pytest.mark.parametrize("copies", ["one", "own", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_arrays_of_many_ranks(tmp_path: Path, copies: str) -> None:
    item = Item("array", copies, "<f8", (3,), shards=(39,) if copies == "one" else ())
    path = forged(tmp_path / "c", {"a": item}, {"a": np.arange(3.0)}, ranks=40)
    found = ms.Checkpoint.arrays(path)
    total = 40 if copies == "SUM" else 1
    assert list(found) == ([f"a@{rank}" for rank in range(40)] if copies == "own" else ["a"])
    assert [array.tolist() for array in found.values()] == [[0.0, total, 2.0 * total]] * len(found)


def test_a_map_ends_with_its_arrays(tmp_path: Path) -> None:
    path = forged(tmp_path / "c", {"a": Item("array", "one", "<f8", (3,), (0,))}, {"a": np.arange(3.0)})

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    found = ms.Checkpoint.arrays(path)
    part = found.pop("a")[1:]
    assert maps() == 1
    assert part.tolist() == [1, 2]
    del part
    assert maps() == 0


@pytest.mark.parametrize("shape", [(0, 2**46, 2**46), (2**20, 0, 2**45), (0,) + (2,) * 63])
def test_a_shape_that_no_array_can_have(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = forged(tmp_path / "c", {"a": Item("array", "one", "<f8", shape, (0,))}, {"a": np.zeros((0, 1))})
    for read in (ms.Checkpoint.arrays, local(a=np.zeros(3)).restore, local(a=1.0).restore):
        with pytest.raises(ms.errors.CheckpointDamagedError):
            read(path)


def test_no_memory_for_the_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = forged(tmp_path / "c", {"a": Item("array", "SUM", "<f8", (3,))}, {"a": np.zeros(3)})

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checkpoint_arrays, "combined", refuse)
    with pytest.raises(ms.errors.CheckpointReadError, match="no memory for the arrays"):
        ms.Checkpoint.arrays(path)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        *(("|i1", "SUM"), ("<f2", "MEAN"), ("<i8", "MEAN"), ("|b1", "SUM")),
        *(
            pytest.param(*each, marks=long_lane)
            for each in (("|i1", "MEAN"), ("<f2", "SUM"), ("<i8", "SUM"), ("|b1", "MEAN"))
        ),
    ],
)
@pytest.mark.slow
def test_copies_are_combined_without_much_memory(tmp_path: Path, dtype: str, how: str) -> None:
    count = 2**25 // np.dtype(dtype).itemsize
    array = (np.arange(count) % 50).astype(dtype)
    path = forged(tmp_path / "c", {"a": Item("array", how, dtype, array.shape)}, {"a": array}, ranks=2)
    found: list[Any] = []
    assert peak_of(lambda: found.append(ms.Checkpoint.arrays(path)["a"])) < 2.5 * array.nbytes
    assert found[0].dtype == array.dtype
    assert np.array_equal(found[0], array if how == "MEAN" else array + array)


# ------------------------------------------------------------------------------------------------ text

OTHERS = ["{}", "[]", '{"float":"0x0.0p+0"}', "1000", '"ab"', '{"tuple":[1,2]}', '{"a":[{"b":[[]]}]}']
UNITS = ['{"":0}', "[1]", *(pytest.param(unit, marks=long_lane) for unit in OTHERS)]


def list_of(unit: str, count: int) -> bytes:
    return f"[{','.join([unit] * count)}]".encode()


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_what_a_short_text_takes_in_memory(unit: str) -> None:
    """As many of these as are read at all."""
    count = 2**22
    while shards._too_much(text := list_of(unit, count)):
        count = count * 3 // 4
    assert peak_of(lambda: loads(text, "x")) < 2**26 + 10 * len(text)
    with pytest.raises(ms.errors.CheckpointDamagedError, match=r"at most \d+"):
        loads(list_of(unit, count * 4 // 3 + 2), "x")


@long_lane
def test_large_checkpoints_that_are_as_they_should_be() -> None:
    entry = {"dtype": "F32", "shape": [128, 64, 3], "data_offsets": [10**9, 10**9 + 98304]}
    header = {f"layers.{number}.weight": entry for number in range(100_000)}
    assert loads(json.dumps(header, separators=(",", ":")).encode(), "x") == header
    ranks, floats = 1000, np.random.default_rng(0).random(500_000).tolist()
    state = to_json(generators.state_of(np.random.RandomState(1)))
    items = {"rng": Item("rng", "one", values=(state,)), "a": Item("plain", "one", values=(to_json(floats),))}
    items |= {f"{number}": Item("variable", "one", "<f4", (128, 64), (0,)) for number in range(20_000)}
    shards = tuple(Shard(10**6, "0" * 32, rank) for rank in range(ranks))
    text = Manifest(ranks, shards, items, ("rng", "a"), {}, "x").text()
    assert parse(text, "x").items["rng"].values[0] == state


# ------------------------------------------------------------------------------------------------ what is shown


def test_what_is_said_of_a_restored_checkpoint_does_not_steer_the_terminal(tmp_path: Path) -> None:
    local(a=1).save(tmp_path / "c")
    content = hostile.body_of(tmp_path / "c")
    steer = "\x1b]0;owned\x07\u202e"
    content["layout"] = {f"{steer}key": [{"x": steer}, 1.5, None]}
    content["items"][f"{steer}name"] = content["items"]["a"]
    content["names"].append(f"{steer}name")
    hostile.write_body(tmp_path / "c", content)
    restored = local(a=0).restore(tmp_path / "c", partial=True)
    assert restored.layout == {"\\x1b]0;owned\\x07\\u202ekey": [{"x": "\\x1b]0;owned\\x07\\u202e"}, 1.5, None]}
    (note,), (left_out,) = restored.notes, restored.left_out
    assert (note + left_out).isprintable()
    assert left_out == "\\x1b]0;owned\\x07\\u202ename"
