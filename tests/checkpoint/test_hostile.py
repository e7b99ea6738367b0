"""Files that are not as they were written: every one is refused by name, by all ranks, and none is executed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
from checkpoints import many_writers, shared_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, outcomes, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint.storage import shards
from mpistrategy.checkpoint.storage.files import checksum_of
from mpistrategy.checkpoint.storage.manifest import NAME, VERSION, Item, Manifest, Shard, parse, with_head
from mpistrategy.checkpoint.storage.plain_values import NOT_PLAIN, from_json, to_json
from mpistrategy.checkpoint.storage.shards import Stored, loads, own_pieces, parsed, pieces_of, shard_name


class Saved:
    """A checkpoint in a shared folder, to be damaged by rank 0 and read by all."""

    def __init__(self, strategy: ms.Strategy, folder: Path) -> None:
        self.strategy, self.path = strategy, folder / "c"
        with strategy.scope():
            self.x = ms.Variable(np.arange(6.0), name="x")
            total = ms.Variable(1, synchronization="ON_READ", aggregation="SUM")
            rng = np.random.default_rng(1)
            self.checkpoint = ms.Checkpoint(x=self.x, total=total, rng=rng, plain=[1, {"a": 2.5}], kept=[np.ones(2), 1])
        with many_writers():
            self.checkpoint.save(self.path)
        self.x.assign(np.zeros(6))

    def refused_after(self, damage: Callable[[Path], Any]) -> str:
        """Damage a copy; return what all ranks say."""
        path = self.path.with_name("damaged")
        if RANK == 0:
            shutil.copytree(self.path, path)
            damage(path)
        self.strategy.barrier("damaged")
        found = outcomes(self.checkpoint.restore, path)
        self.strategy.barrier("read")
        if RANK == 0:
            shutil.rmtree(path)
        assert {outcome.error for outcome in found} == {errors.CheckpointDamagedError}, found[0].text
        assert self.x.numpy().tolist() == [0] * 6
        return found[0].text


@pytest.fixture(scope="module")
def saved(strategy: ms.MirroredStrategy, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(strategy, shared_folder(tmp_path_factory.mktemp("hostile")))


def changed(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(data: bytearray, bit: int) -> bytearray:
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    return data


FILES = [NAME, *(shard_name(rank) for rank in range(SIZE))]


@pytest.mark.parametrize("file", FILES)
@settings(max_examples=25)
@given(bit=st.integers(0, 2**20))
def test_a_flipped_bit(saved: Saved, file: str, bit: int) -> None:
    text = saved.refused_after(lambda path: changed(path / file, lambda data: flipped(data, bit)))
    assert "damaged" in text


@pytest.mark.parametrize("file", FILES)
def test_files_that_are_cut_grow_are_gone_or_are_links(saved: Saved, file: str) -> None:
    outside = saved.path.with_name(f"outside-{file}")
    if RANK == 0:
        shutil.copy(saved.path / file, outside)

    def linked(path: Path) -> None:
        (path / file).unlink()
        (path / file).symlink_to(outside)

    def piped(path: Path) -> None:
        (path / file).unlink()
        os.mkfifo(path / file)

    def made_folder(path: Path) -> None:
        (path / file).unlink()
        (path / file).mkdir()

    damages: list[Callable[[Path], Any]] = [
        *(lambda path, c=cut: changed(path / file, lambda data: data[:c]) for cut in (0, 1, 8, 100, -1)),
        lambda path: changed(path / file, lambda data: data + b"\0"),
        lambda path: (path / file).unlink(),
        linked, piped, made_folder,
    ]  # fmt: skip
    for damage in damages:
        text = saved.refused_after(damage)
        assert file in text or "no manifest.json" in text or "damaged" in text
    assert still_works(saved.strategy)


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a manifest, and make its checksum right again: what somebody with a purpose would do."""
    content = hostile.body_of(path)
    change(content)
    hostile.write_body(path, content)


def item(content: Any, path: str, place: int, value: Any) -> None:
    content["items"][path][place] = value


LIES: dict[str, Callable[[Any], Any]] = {
    "no ranks": lambda c: c.update(ranks=0),
    "negative ranks": lambda c: c.update(ranks=-1),
    "many ranks": lambda c: c.update(ranks=10**9, shards=c["shards"] * 2),
    "more ranks": lambda c: c.update(ranks=SIZE + 1),
    "shards twice": lambda c: c.update(shards=c["shards"] * 2),
    "a writer that is none": lambda c: c["shards"][0].__setitem__(2, SIZE),
    "a negative writer": lambda c: c["shards"][0].__setitem__(2, -1),
    "words for a writer": lambda c: c["shards"][0].__setitem__(2, "abc"),
    "words for ranks": lambda c: c.update(ranks="1"),
    "no shards": lambda c: c.update(shards=[]),
    "a huge shard": lambda c: c.update(shards=[[2**60, "0" * 32, 0]]),
    "a path for a checksum": lambda c: c.update(shards=[[10, "../../etc/passwd", 0]]),
    "items that are none": lambda c: c.update(items=[1, 2]),
    "an item of numbers": lambda c: c["items"].update(x=5),
    "a shape that overflows": lambda c: item(c, "x", 3, [2**40, 2**40]),
    "a negative shape": lambda c: item(c, "x", 3, [-6]),
    "a dtype of objects": lambda c: item(c, "x", 2, "|O"),
    "a dtype that is none": lambda c: item(c, "x", 2, "os.system"),
    "a shard that is none": lambda c: item(c, "x", 4, [10**6]),
    "another way of copying": lambda c: item(c, "x", 1, "product"),
    "no values": lambda c: item(c, "plain", 6, []),
    "a shape of a value": lambda c: item(c, "plain", 3, ["x"]),
    "values of a rank": lambda c: item(c, "plain", 1, "own"),
    "shards without end": lambda c: item(c, "x", 4, [0] * 10**6),
    "no shard": lambda c: item(c, "x", 4, []),
    "a negative shard": lambda c: item(c, "x", 4, [-1]),
    "a name that stands twice": lambda c: c.update(names=c["names"] * 2),
    "a name of nothing": lambda c: c["names"].append("forged"),
    "words that are to be added": lambda c: c["items"]["x"].__setitem__(slice(1, 5), ["SUM", "<U6", [1], []]),
    "a version that is long": lambda c: c.update(written_by="x" * 1000),
    "deep JSON": lambda c: None,
}


@pytest.mark.parametrize("lie", LIES)
def test_manifests_that_lie(saved: Saved, lie: str) -> None:
    def damage(path: Path) -> None:
        if lie == "deep JSON":
            (path / NAME).write_bytes(with_head(b"[" * 10**6 + b"]" * 10**6))
        else:
            rewritten(path, LIES[lie])

    saved.refused_after(damage)


MISFITS: dict[str, Callable[[Any], Any]] = {
    "an unknown kind": lambda c: item(c, "x", 0, "of"),
    "a kind that is a method's name": lambda c: item(c, "x", 0, "restore_of"),
    "a list of very many": lambda c: item(c, "kept", 5, 10**15),
    "a list of words": lambda c: item(c, "kept", 5, "many"),
    "a random state of another": lambda c: item(c, "rng", 6, [{"dict": [["bit_generator", "os"]]}]),
    "a value of an unknown kind": lambda c: item(c, "plain", 6, [{"pickle": "cos"}]),
    "a variable for a list": lambda c: item(c, "plain", 0, "variable"),
    "an array for a list": lambda c: item(c, "plain", 0, "array"),
    "an optimizer for a list": lambda c: item(c, "plain", 0, "optimizer"),
    "another shape": lambda c: item(c, "x", 3, [7]),
    "one name less": lambda c: c["items"].pop("plain"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_manifests_that_do_not_fit(saved: Saved, misfit: str) -> None:
    path = saved.path.with_name("misfit")
    if RANK == 0:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(saved.path, path)
        rewritten(path, MISFITS[misfit])
    saved.strategy.barrier("damaged")
    found = outcomes(saved.checkpoint.restore, path)
    saved.strategy.barrier("read")
    kinds = {errors.CheckpointMismatchError, errors.CheckpointDamagedError}
    assert {outcome.error for outcome in found} <= kinds, found[0].text
    assert saved.x.numpy().tolist() == [0] * 6


def test_formats_of_others_and_of_the_future(saved: Saved) -> None:
    def of_version(path: Path, version: bytes) -> None:
        changed(path / NAME, lambda data: data.replace(b'"version":%d' % VERSION, b'"version":' + version))

    for version in (b"0", b"%d" % (VERSION + 1)):
        found = saved.refused_after(lambda path, v=version: of_version(path, v))
        assert f"found format version {version.decode()}" in found
    assert "another format" in saved.refused_after(lambda path: of_version(path, b'"x"'))
    foreign = b'{"format": "orbax", "version": 1}'
    assert "another format" in saved.refused_after(lambda path: (path / NAME).write_bytes(foreign))


def test_a_checkpoint_that_is_a_link(saved: Saved) -> None:
    link = saved.path.with_name("link")
    if RANK == 0:
        link.symlink_to(saved.path)
    saved.strategy.barrier("linked")
    found = outcomes(saved.checkpoint.restore, link)
    assert {outcome.error for outcome in found} == {errors.CheckpointDamagedError}
    assert "symbolic link" in found[0].text


class Bomb:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_pickles_are_not_loaded(saved: Saved, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb())
    for file in FILES:
        saved.refused_after(lambda path, f=file: (path / f).write_bytes(bomb))
    np.save(tmp_path / "b.npy", np.array([Bomb()]), allow_pickle=True)
    for name in ("b.npy", "b.npz", "b.safetensors"):
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes(bomb)
        with pytest.raises(errors.CheckpointDamagedError):
            ms.Checkpoint.arrays(tmp_path / name)


# ------------------------------------------------------------------------------------------------ the parsers


def stored_in(data: bytes) -> dict[str, Stored]:
    """Return what the header of a shard with these bytes says."""
    return parsed(lambda start, count: data[start : start + count], len(data), "x")


@given(st.binary(max_size=200) | st.binary(max_size=80).map(lambda text: len(text).to_bytes(8, "little") + text))
def test_any_bytes_as_a_shard_or_a_manifest(data: bytes) -> None:
    for read in (lambda: stored_in(data), lambda: parse(data, "x")):
        with contextlib.suppress(errors.CheckpointDamagedError):
            read()


def entry(dtype: Any = "F64", shape: Any = (1,), places: Any = (0, 8)) -> Any:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": places}}


HEADERS: list[Any] = [
    [], 5, {"a": 5}, entry(places=[0, 9]), entry(places=[8, 0]), entry(dtype=5), entry(shape=[-1]), entry(shape=[True]),
    entry(shape="x"), entry(places=[0]), entry(shape=[1] * 65), entry(places=[4, 8]), entry(places=[0, 4]),
    entry() | {"b": entry()["a"]},
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_headers_of_shards(header: Any) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(errors.CheckpointDamagedError):
        stored_in(len(text).to_bytes(8, "little") + text + bytes(8))


def test_a_header_that_is_too_long() -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    stored_in(len(text).to_bytes(8, "little") + text + b"\0")
    for length in (2**63, 10**8 + 1, len(text) + 2, len(text) - 1):
        with pytest.raises(errors.CheckpointDamagedError):
            stored_in(length.to_bytes(8, "little") + text + b"\0")


@given(st.dictionaries(st.text(max_size=8), st.lists(st.floats(width=32), max_size=5), max_size=4))
def test_shards_come_back(lists: dict[str, list[float]]) -> None:
    arrays = {name: np.array(numbers, np.float32) for name, numbers in lists.items() if name != "__metadata__"}
    data = b"".join(map(bytes, pieces_of(arrays)))
    stored = stored_in(data)
    assert stored.keys() == arrays.keys()
    for name, array in arrays.items():
        assert stored[name].shape == array.shape
        assert data[stored[name].start : stored[name].stop] == array.tobytes()
        assert stored[name].start % array.itemsize == 0


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    assert repr(from_json(json.loads(json.dumps(to_json(value))))) == repr(value)


def test_what_is_not_plain() -> None:
    class Number(int):
        pass

    endless: list[Any] = []
    endless += [endless, endless]
    for value in (Number(1), np.float64(1), {1.5: 2}, [object()], {"a": {(): 1}}, endless):
        assert to_json(value) is NOT_PLAIN


# ------------------------------------------------------------------------------------------------ much in little


@pytest.mark.slow
@pytest.mark.one_rank
@pytest.mark.parametrize("unit", ["[]", '{"":0}', "1000", '{"float":"0x0.0p+0"}'])
def test_what_a_short_text_takes_in_memory(unit: str) -> None:
    """As many of these as are read at all."""
    count = 2**22
    while not shards._can_be_read(text := f"[{','.join([unit] * count)}]".encode()):
        count = count * 3 // 4
    tracemalloc.start()
    loads(text, "x")
    assert tracemalloc.get_traced_memory()[1] < 2**26 + 10 * len(text)
    tracemalloc.stop()
    with pytest.raises(errors.CheckpointDamagedError, match="too much"):
        loads(f"[{','.join([unit] * (count * 4 // 3 + 2))}]".encode(), "x")


def test_a_header_of_very_many_arrays_is_read() -> None:
    entry = {"dtype": "F32", "shape": [128, 64, 3], "data_offsets": [10**9, 10**9 + 98304]}
    header = {f"layers.{number}.weight": entry for number in range(100_000)}
    assert len(loads(json.dumps(header, separators=(",", ":")).encode(), "x")) == 100_000


def forged(folder: Path, item: Item, array: Any, ranks: int = 1) -> Path:
    """Write a checkpoint with one item, `a`, and the same array in each shard, which has what one rank has."""
    folder.mkdir()
    once, own = ({"a": array}, {}) if item.copies == "one" else ({}, {"a": array})
    files = []
    for rank in range(ranks):
        blocks = {rank: own_pieces(own, {"a": array.shape} if item.copies == "own" else {}, "x")} if own else {}
        data = b"".join(bytes(piece) for piece in pieces_of(once, blocks))
        (folder / shard_name(rank)).write_bytes(data)
        files.append(Shard(len(data), checksum_of(data).hexdigest(), rank))
    (folder / NAME).write_bytes(Manifest(ranks, tuple(files), {"a": item}, ("a",), {}, "x").text())
    return folder


@pytest.mark.one_rank
@pytest.mark.parametrize("copies", ["one", "own", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_arrays_of_many_ranks(tmp_path: Path, copies: str) -> None:
    item = Item("array", copies, "<f8", (3,), shards=(39,) if copies == "one" else ())
    arrays = ms.Checkpoint.arrays(forged(tmp_path / "c", item, np.arange(3.0), ranks=40))
    total = 40 if copies == "SUM" else 1
    assert list(arrays) == ([f"a@{rank}" for rank in range(40)] if copies == "own" else ["a"])
    assert [array.tolist() for array in arrays.values()] == [[0.0, total, 2.0 * total]] * len(arrays)


@pytest.mark.one_rank
@pytest.mark.parametrize("shape", [(0, 2**46, 2**46), (2**20, 0, 2**45), (0,) + (2,) * 63])
def test_a_shape_that_no_array_can_have(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = forged(tmp_path / "c", Item("array", "one", "<f8", shape, (0,)), np.zeros((0, 1)))
    with ms.OneDeviceStrategy("CPU:0").scope():
        restore = ms.Checkpoint(a=np.zeros(3)).restore
    for read in (ms.Checkpoint.arrays, restore):
        with pytest.raises(errors.CheckpointDamagedError):
            read(path)


# ------------------------------------------------------------------------------------------------ generators


def local(rng: Any) -> ms.Checkpoint:
    with ms.OneDeviceStrategy("CPU:0").scope():
        return ms.Checkpoint(rng=rng)


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
    ("MT19937", "pos", {"tuple": ["ndarray", "<u8", 10**8]}),
]  # fmt: skip


@pytest.mark.one_rank
@pytest.mark.parametrize(("kind", "name", "value"), NUMBERS)
def test_a_generator_that_points_elsewhere(tmp_path: Path, kind: str, name: str, value: Any) -> None:
    generator = generator_of(kind)
    checkpoint = local(generator)
    checkpoint.save(tmp_path / "c")
    content = hostile.body_of(tmp_path / "c")
    change_number(content["items"]["rng"][6][0], name, value)
    hostile.write_body(tmp_path / "c", content)
    with pytest.raises(errors.CheckpointMismatchError, match=name):
        checkpoint.restore(tmp_path / "c")
    hostile.draw_from(generator)


@pytest.mark.one_rank
def test_a_state_that_is_no_dict(tmp_path: Path) -> None:
    """NumPy takes a tuple, too."""
    checkpoint = local(np.random.RandomState(0))
    checkpoint.save(tmp_path / "c")
    content = hostile.body_of(tmp_path / "c")
    key = {"tuple": ["ndarray", "<u4", [1] * 624]}
    content["items"]["rng"][6] = [{"tuple": ["MT19937", key, 10**8]}]
    hostile.write_body(tmp_path / "c", content)
    with pytest.raises(errors.CheckpointMismatchError, match="a state of type tuple"):
        checkpoint.restore(tmp_path / "c")


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "RandomState", "of PCG64"])
@pytest.mark.one_rank
def test_generators_go_on(tmp_path: Path, kind: str) -> None:
    """Whatever they have drawn before: states that they do have are not refused."""
    rng = np.random.RandomState(np.random.PCG64(3)) if kind == "of PCG64" else generator_of(kind)
    checkpoint = local(rng)
    for number in range(7):
        checkpoint.save(tmp_path / "c", overwrite=True)
        drawn = [rng.random(number).tolist(), rng.standard_normal(1).tolist()]
        drawn.append(rng.bytes(3) if kind in ("RandomState", "of PCG64") else int(rng.integers(9, dtype=np.int32)))
        checkpoint.restore(tmp_path / "c")
        assert drawn[0] == rng.random(number).tolist()
        assert drawn[1] == rng.standard_normal(1).tolist()


# ------------------------------------------------------------------------------------------------ links


@pytest.mark.one_rank
@pytest.mark.parametrize("ending", ["npy", "npz", "safetensors"])
def test_a_file_of_arrays_may_be_named_by_a_link(tmp_path: Path, ending: str) -> None:
    (tmp_path / "real").mkdir()
    file = tmp_path / "real" / f"x.{ending}"
    if ending == "safetensors":
        file.write_bytes(b"".join(bytes(piece) for piece in pieces_of({"a": np.ones(3)})))
    elif ending == "npz":
        np.savez(file, a=np.ones(3))
    else:
        np.save(file, np.ones(3))
    (tmp_path / f"first.{ending}").symlink_to(f"second.{ending}")
    (tmp_path / f"second.{ending}").symlink_to(os.path.join("real", f"x.{ending}"))
    (array,) = ms.Checkpoint.arrays(tmp_path / f"first.{ending}").values()
    assert array.tolist() == [1, 1, 1]
    (tmp_path / f"circle.{ending}").symlink_to(f"circle.{ending}")
    with pytest.raises(errors.CheckpointDamagedError, match=r"a symbolic link"):
        ms.Checkpoint.arrays(tmp_path / f"circle.{ending}")
    (tmp_path / f"nowhere.{ending}").symlink_to("none")
    with pytest.raises(errors.CheckpointMissingError):
        ms.Checkpoint.arrays(tmp_path / f"nowhere.{ending}")


@pytest.mark.one_rank
def test_links_in_the_place_of_checkpoints_lead_nowhere(tmp_path: Path) -> None:
    """What a link leads to is not written to, restored or removed."""
    with ms.OneDeviceStrategy("CPU:0").scope():
        checkpoint = ms.Checkpoint(x=ms.Variable(1.0))
    manager = ms.CheckpointManager(checkpoint, tmp_path / "m", keep=1)
    manager.save(5)
    os.rename(manager.path_of(5), tmp_path / "theirs")
    links = ["c", ".c.replaced", "m/step-000000000001", "m/.step-000000000002.saving-00ff00ff00ff00ff"]
    for name in links:
        (tmp_path / name).symlink_to(tmp_path / "theirs")
    before = {path: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    with pytest.raises(errors.CheckpointExistsError):
        checkpoint.save(tmp_path / "c", overwrite=True)
    manager.close()
    for step in (8, 9):
        manager.save(step)
    assert manager.steps() == [9]
    manager.close()
    assert {path: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == before
