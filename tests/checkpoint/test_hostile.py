"""Files that are not as they were written: every one is refused by name, by all ranks, and none is executed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import many_writers, shared_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, outcomes, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint.storage.files import Folder, checksum_of
from mpistrategy.checkpoint.storage.manifest import NAME, VERSION, parse
from mpistrategy.checkpoint.storage.plain_values import NOT_PLAIN, from_json, to_json
from mpistrategy.checkpoint.storage.shards import Stored, parsed, pieces_of, shard_name


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
    head, _, body = (path / NAME).read_bytes().partition(b"\n")
    content = json.loads(body[len(b'"body":') : -len(b"}\n")])
    change(content)
    inner = b'"body":' + json.dumps(content).encode() + b"}\n"
    fields = json.loads(head[:-1] + b"}")
    fields["checksum"] = checksum_of(inner).hexdigest()
    (path / NAME).write_bytes(json.dumps(fields, separators=(",", ":")).encode()[:-1] + b",\n" + inner)


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
    "values of a rank": lambda c: item(c, "plain", 1, "own"),
    "shards without end": lambda c: item(c, "x", 4, [0] * 10**6),
    "no shard": lambda c: item(c, "x", 4, []),
    "a negative shard": lambda c: item(c, "x", 4, [-1]),
    "deep JSON": lambda c: None,
}


@pytest.mark.parametrize("lie", LIES)
def test_manifests_that_lie(saved: Saved, lie: str) -> None:
    def damage(path: Path) -> None:
        if lie == "deep JSON":
            inner = b'"body":' + b"[" * 10**6 + b"]" * 10**6 + b"}\n"
            checksum = checksum_of(inner).hexdigest().encode()
            head = b'{"format":"mpistrategy checkpoint","version":%d,"checksum":"' % VERSION + checksum + b'",\n'
            (path / NAME).write_bytes(head + inner)
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


def test_a_key_that_stands_twice_and_a_header_that_is_too_long() -> None:
    one = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f"{{{one},{one}}}".encode()
    for length in (len(text), 2**63, 10**8 + 1, len(text) + 2):
        with pytest.raises(errors.CheckpointDamagedError):
            stored_in(length.to_bytes(8, "little") + text + b"\0")


@given(st.dictionaries(st.text(max_size=8), st.lists(st.floats(width=32), max_size=5), max_size=4))
def test_shards_come_back(lists: dict[str, list[float]]) -> None:
    arrays = {name: np.array(numbers, np.float32) for name, numbers in lists.items() if name != "__metadata__"}
    data = b"".join(pieces_of(arrays))
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

    for value in (Number(1), np.float64(1), {1.5: 2}, [object()], {"a": {(): 1}}):
        assert to_json(value) is NOT_PLAIN


# ------------------------------------------------------------------------------------------------ the folder


def test_nothing_is_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "manifest.json").symlink_to(tmp_path / "precious")
    (tmp_path / "f" / "shard-00000.safetensors").symlink_to(tmp_path / "precious" / "file")
    (tmp_path / "g").symlink_to(tmp_path / "precious")
    with Folder.at(str(tmp_path)) as folder:
        with folder.folder("f") as inner, pytest.raises(FileExistsError):
            inner.write("shard-00000.safetensors", [b"x"])
        folder.remove("f")
        with pytest.raises(OSError, match="g"):
            folder.remove("g")
        with pytest.raises(OSError, match="g"):
            folder.folder("g")
    assert (tmp_path / "precious" / "file").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["g", "precious"]
