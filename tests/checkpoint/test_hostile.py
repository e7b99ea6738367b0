"""Files that are not as they were written, or made up to harm: each is refused by name, by all ranks, at once.

Nothing in them is executed, takes much memory, is followed elsewhere, or changes what the program has.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hostile
import launching
import numpy as np
import pytest
from checkpoints import many_writers, shared_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, long_lane, outcomes, part_of, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint.format import NAME, VERSION, shard_name, with_head


class Saved:
    """A checkpoint in a shared folder, to be damaged by rank 0 and read by all."""

    def __init__(self, strategy: ms.Strategy, folder: Path) -> None:
        self.strategy, self.path = strategy, folder / "c"
        with strategy.scope():
            self.x = ms.Variable(np.arange(6.0), name="x")
            total = ms.Variable(1, synchronization="ON_READ", aggregation="SUM")
            rng, adam, built = np.random.default_rng(1), ms.optimizers.Adam(), ms.optimizers.Adam()
            for optimizer in (adam, built):
                optimizer.build([self.x])
            self.checkpoint = ms.Checkpoint(
                x=self.x,
                total=total,
                rng=rng,
                adam=adam,
                built=built,
                plain=[1, {"a": 2.5}],
                kept=[np.ones(2), 1],
                named={1: np.ones(2), "b": np.ones(2)},
                empty=np.zeros((0, 1)),
                rows=ms.Rows(np.ones((1, 2))),
            )
        with many_writers():
            self.checkpoint.save(self.path)
        self.checkpoint.objects["adam"] = ms.optimizers.Adam()  # which makes what the checkpoint says it has
        self.x.assign(np.zeros(6))

    def refused_after(self, damage: Callable[[Path], Any], *kinds: type[Exception]) -> str:
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
        assert {outcome.error for outcome in found} <= set(kinds or [errors.CheckpointDamagedError]), found[0].text
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
    assert "damaged" in saved.refused_after(lambda path: changed(path / file, lambda data: flipped(data, bit)))


@pytest.mark.parametrize("file", FILES)
def test_files_that_are_cut_grow_are_gone_or_are_links(saved: Saved, file: str) -> None:
    outside = saved.path.with_name(f"outside-{file}")
    if RANK == 0:
        shutil.copy(saved.path / file, outside)

    def replaced(path: Path, make: Callable[[Path], object]) -> None:
        (path / file).unlink()
        make(path / file)

    damages: list[Callable[[Path], Any]] = [
        *(lambda path, c=cut: changed(path / file, lambda data: data[:c]) for cut in (0, 1, 8, 100, -1)),
        lambda path: changed(path / file, lambda data: data + b"\0"),
        lambda path: (path / file).write_bytes(pickle.dumps(Bomb())),
        lambda path: (path / file).unlink(),
        lambda path: replaced(path, lambda name: name.symlink_to(outside)),
        lambda path: replaced(path, os.mkfifo),
        lambda path: replaced(path, Path.mkdir),
    ]  # fmt: skip
    for damage in damages:
        text = saved.refused_after(damage)
        assert file in text or "no manifest.json" in text or "damaged" in text
    assert still_works(saved.strategy)


class Bomb:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


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
    "words for the bytes of a rank": lambda c: c["own"].__setitem__(0, "abc"),
    "fewer bytes of a rank": lambda c: c["own"].__setitem__(0, c["own"][0] - 8),
    "more bytes of a rank": lambda c: c["own"].__setitem__(0, c["own"][0] + 8),
    "more bytes of a rank than there are": lambda c: c["own"].__setitem__(0, 2**40),
    "no bytes of a rank": lambda c: c["own"].__setitem__(0, 0),
    "bytes of a rank that is none": lambda c: c["own"].append(64),
    "narrower numbers of a rank": lambda c: item(c, "total", 2, "<i4"),
    "other axes of rows": lambda c: item(c, "rows", 3, [0, 3]),
    "no data of ranks": lambda c: c.update(own=[]),
    "words for ranks": lambda c: c.update(ranks="1"),
    "no shards": lambda c: c.update(shards=[]),
    "a huge shard": lambda c: c.update(shards=[[2**60, "0" * 32]]),
    "a path for a checksum": lambda c: c.update(shards=[[10, "../../etc/passwd"]]),
    "items that are none": lambda c: c.update(items=[1, 2]),
    "an item of numbers": lambda c: c["items"].update(x=5),
    "a shape that overflows": lambda c: item(c, "x", 3, [2**40, 2**40]),
    "a negative shape": lambda c: item(c, "x", 3, [-6]),
    "a shape that no array can have": lambda c: item(c, "empty", 3, [0, 2**46, 2**46]),
    "too many axes": lambda c: item(c, "empty", 3, [0] + [2] * 64),
    "a dtype of objects": lambda c: item(c, "x", 2, "|O"),
    "a dtype that is none": lambda c: item(c, "x", 2, "os.system"),
    "another way of copying": lambda c: item(c, "x", 1, "product"),
    "no values": lambda c: item(c, "plain", 5, []),
    "a shape of a value": lambda c: item(c, "plain", 3, ["x"]),
    "an item of nothing": lambda c: c["items"].update({"none/x": c["items"]["x"]}),
    "values of a rank": lambda c: item(c, "plain", 1, "own"),
    "words that are to be added": lambda c: c["items"]["x"].__setitem__(slice(1, 4), ["SUM", "<U6", [1]]),
    "a version that is long": lambda c: c.update(written_by="x" * 1000),
}


@pytest.mark.parametrize("lie", LIES)
def test_manifests_that_lie(saved: Saved, lie: str) -> None:
    saved.refused_after(lambda path: rewritten(path, LIES[lie]))


MISFITS: dict[str, Callable[[Any], Any]] = {
    "an unknown kind": lambda c: item(c, "x", 0, "of"),
    "a list of very many": lambda c: item(c, "kept", 4, 10**15),
    "two keys of one array": lambda c: item(c, "named", 4, [c["items"]["named"][4][0], "1"]),
    "a list of words": lambda c: item(c, "kept", 4, "many"),
    "a random state of another": lambda c: item(c, "rng", 5, [{"dict": [["bit_generator", "os"]]}]),
    "a generator for variables": lambda c: c["items"].update({"built/slots": ["rng", "one", "", [], None, [1]]}),
    "a value of an unknown kind": lambda c: item(c, "plain", 5, [{"pickle": "cos"}]),
    "a variable for a list": lambda c: item(c, "plain", 0, "variable"),
    "an optimizer for a list": lambda c: item(c, "plain", 0, "optimizer"),
    "another shape": lambda c: item(c, "x", 3, [7]),
    "one name less": lambda c: c["items"].pop("plain"),
    "a number of steps of another dtype": lambda c: item(c, "adam/iterations", 2, "<f8"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_manifests_that_do_not_fit(saved: Saved, misfit: str) -> None:
    kinds = errors.CheckpointMismatchError, errors.CheckpointDamagedError
    saved.refused_after(lambda path: rewritten(path, MISFITS[misfit]), *kinds)


HEADS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "an old version": (lambda text: text.replace(b'"version":%d' % VERSION, b'"version":0'), "found format version 0"),
    "a version to come": (
        lambda text: text.replace(b'"version":%d' % VERSION, b'"version":%d' % (VERSION + 1)),
        f"found format version {VERSION + 1}",
    ),
    "no version": (lambda text: text.replace(b'"version":%d' % VERSION, b'"version":"x"'), "another format"),
    "another format": (lambda text: b'{"format": "orbax", "version": 1}', "another format"),
    "deep JSON": (lambda text: with_head(b"[" * 10**6 + b"]" * 10**6), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_formats_of_others_and_of_the_future(saved: Saved, head: str) -> None:
    change, words = HEADS[head]
    assert words in saved.refused_after(lambda path: changed(path / NAME, lambda data: change(bytes(data))))


@pytest.mark.slow
@pytest.mark.one_rank
def test_random_changes(tmp_path: Path) -> None:
    program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
    program.checkpoint.save(tmp_path / "c")
    figures = hostile.read_checkpoints(program, tmp_path / "c", part_of(300), random.Random(5))
    assert figures.foreign == [], figures.line()
    assert 0 < figures.fine < figures.read


@pytest.mark.one_rank
def test_what_a_checkpoint_says_does_not_steer_the_terminal(tmp_path: Path) -> None:
    program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
    program.checkpoint.save(tmp_path / "c")
    steer = "\x1b]0;owned\x07\u202e"

    def lie(content: Any) -> None:
        content |= {"layout": {f"{steer}key": [{"x": steer}, 1.5, None]}, "written_by": "1\x1b[2J"}
        content["items"][f"{steer}name"] = content["items"]["progress/step"]

    rewritten(tmp_path / "c", lie)
    with pytest.raises(ms.errors.CheckpointMismatchError) as caught:
        program.checkpoint.restore(tmp_path / "c")
    restored = program.checkpoint.restore(tmp_path / "c", partial=True)
    shown = [str(caught.value).replace("\n", ""), restored.written_by, *restored.left_out, *restored.notes]
    assert len(shown) > 3
    assert all(map(str.isprintable, shown))


# ------------------------------------------------------------------------------------------------ files of arrays


RIGHT = (2).to_bytes(8, "little") + b"{}" + bytes(8)
LENGTHS = [n.to_bytes(8, "little") + RIGHT[8:] for n in (2**63, 10**8, 3, 1, 0)]


@pytest.mark.one_rank
def test_shards_that_lie(tmp_path: Path) -> None:
    """With a checksum that is right.  What a header says of arrays is not read."""
    with ms.OneDeviceStrategy("CPU:0").scope():
        ms.Checkpoint(x=np.ones(1)).save(tmp_path / "c")
    for data in (RIGHT, *LENGTHS, pickle.dumps(Bomb()), b"", b"\0" * 8, RIGHT[:-1], RIGHT + b"\0"):
        (tmp_path / "c" / shard_name(0)).write_bytes(data)
        hostile.sign(tmp_path / "c", hostile.body_of(tmp_path / "c"))
        with pytest.raises(errors.CheckpointDamagedError) if data != RIGHT else nullcontext():
            assert ms.Checkpoint.arrays(tmp_path / "c")["x"].tolist() == [0]


# ------------------------------------------------------------------------------------------------ large ones

MOST_MIB = 400
MEASURED = """
import sys, time
from pathlib import Path
sys.path[:0] = {tests!r}
import numpy as np
import mpistrategy as ms
import hostile

path = Path(sys.argv[1])
program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
for read in (
    lambda: max(array.nbytes for array in ms.Checkpoint.arrays(path).values()),
    lambda: program.checkpoint.restore(path).path,
    lambda: program.checkpoint.restore(path, partial=True).path,
):
    began = time.monotonic()
    try:
        said = "fine " + str(read())
    except ms.errors.MpiStrategyError as error:
        said = type(error).__name__ + " " + str(error)[:200]
    seconds = time.monotonic() - began
    (peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(int(peak.split()[1]) // 1024, round(seconds, 2), said)
"""
GIB = 2**30
LISTS, MANY_SHARDS = b"[%s1]" % (b"[]," * 22_000_000), [[0, ""]] * 400_000


def bigger_shard(path: Path) -> None:
    """Make a shard of 40 GiB, as the manifest says."""
    rewritten(path, lambda content: content["shards"][0].__setitem__(0, 40 * GIB))
    os.truncate(path / shard_name(0), 40 * GIB)


#: What damages a checkpoint, and a word of what is said.
LARGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a manifest of 64 MiB of lists": (lambda p: (p / NAME).write_bytes(with_head(LISTS)), "Damaged"),
    "a manifest of 20 MB of numbers": (
        lambda p: (p / NAME).write_bytes(with_head(b"[" + b"1000," * 4_100_000 + b"1]")), "Damaged"
    ),
    "a manifest of 200 MB": (lambda p: (p / NAME).write_bytes(with_head(b'"%s"' % (b"x" * 2 * 10**8))), "Damaged"),
    "a sparse manifest": (lambda p: os.truncate(p / NAME, 40 * GIB), "Damaged"),
    "a sparse shard": (lambda p: os.truncate(p / shard_name(0), 40 * GIB), "Damaged"),
    "a shard that is as large as it should be": (bigger_shard, "Damaged"),
    "a shape of 2^45 numbers": (lambda p: rewritten(p, lambda c: item(c, "progress/kept", 3, [2**42])), "Damaged"),
    "very many shards": (lambda p: rewritten(p, lambda c: c.update(shards=MANY_SHARDS, ranks=10**6)), "Damaged"),
    "a list of very many": (lambda p: rewritten(p, lambda c: item(c, "nest/x", 4, 10**15)), "Checkpoint"),
}  # fmt: skip
#: These take seconds of a core; smaller ones of their kinds are tried in the short lane, too.
SLOW = ("a manifest of 200 MB", "a manifest of 64 MiB of lists")


@pytest.mark.slow
@pytest.mark.one_rank
@pytest.mark.parametrize("what", [pytest.param(what, marks=long_lane if what in SLOW else ()) for what in LARGE])
def test_large_files(tmp_path: Path, what: str) -> None:
    """Read in a process of its own, quickly and without much memory."""
    make, word = LARGE[what]
    path = tmp_path / "c"
    hostile.Program(ms.OneDeviceStrategy("CPU:0")).checkpoint.save(path)
    make(path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(tests=launching.HELPERS), str(path)],
        env={**launching.environment(), "PYTHONPATH": str(Path(__file__).parents[2]), "MPISTRATEGY_ALONE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    for peak, seconds, said in lines[1:]:
        assert int(peak) < MOST_MIB, f"{peak} MiB: {said}"
        assert float(seconds) < hostile.MOST_SECONDS, f"{seconds} s: {said}"
        assert word in said


# ------------------------------------------------------------------------------------------------ generators


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
    ("RandomState", "tuple", None),
]  # fmt: skip


@pytest.mark.one_rank
@pytest.mark.parametrize(("kind", "name", "value"), NUMBERS)
def test_a_generator_that_points_elsewhere(tmp_path: Path, kind: str, name: str, value: Any) -> None:
    generator: Any = np.random.RandomState(0)
    if kind != "RandomState":
        generator = np.random.Generator(getattr(np.random, kind)(0))
    with ms.OneDeviceStrategy("CPU:0").scope():
        checkpoint = ms.Checkpoint(rng=generator)
    checkpoint.save(tmp_path / "c")
    content = hostile.body_of(tmp_path / "c")
    if value is None:  # NumPy takes a tuple, too
        item(content, "rng", 5, [{"tuple": ["MT19937", [1] * 624, 10**8]}])
    else:
        change_number(content["items"]["rng"][5][0], name, value)
    hostile.write_body(tmp_path / "c", content)
    with pytest.raises(errors.CheckpointMismatchError, match=name):
        checkpoint.restore(tmp_path / "c")
    hostile.draw_from(generator)
