"""A few hundred files that were made up to harm, of each kind: errors of ours, at once, and without much memory.

scripts/soak hostile_files reads many thousands of them.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import hostile_others
import launching
import numpy as np
import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE, long_lane, outcomes, part_of

import mpistrategy as ms
from mpistrategy.checkpoint import arrays as checkpoint_arrays
from mpistrategy.checkpoint.storage.manifest import NAME, with_head
from mpistrategy.checkpoint.storage.shards import shard_name

pytestmark = pytest.mark.slow

one_rank = pytest.mark.one_rank
#: These take seconds of a core; smaller ones of their kinds are tried in the short lane, too.
SLOW = ("a bomb", "a manifest of 200 MB", "a manifest of 64 MiB of lists")


def check(figures: hostile.Figures) -> None:
    assert figures.is_good, "\n".join([figures.line(), *figures.foreign, *figures.hangs])


@one_rank
@pytest.mark.parametrize(("partial", "count"), [(False, part_of(200)), (True, part_of(100))])
def test_checkpoints(tmp_path: Path, partial: bool, count: int) -> None:
    program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
    program.checkpoint.save(tmp_path / "c")
    figures = hostile.read_checkpoints(program, tmp_path / "c", count, random.Random(5 + partial), partial=partial)
    check(figures)
    assert 0 < figures.fine < figures.read


@one_rank
def test_thresholds(tmp_path: Path) -> None:
    check(hostile_others.read_thresholds(tmp_path, 200, random.Random(7)))


SETTINGS = [
    ("MPISTRATEGY_PATHS", "{folder}/pipe"), ("MPISTRATEGY_PATHS", "/dev/zero"),
    ("MPISTRATEGY_TIMEOUT_SECONDS", "9" * 5000),
    ("MPISTRATEGY_TRACE", "{folder}/pipe"), ("MPISTRATEGY_RUN_DIR", "/dev/full"), ("MPISTRATEGY_CHECK", "\x1b[2J"),
    ("XDG_CACHE_HOME", "x" * 5000),
]  # fmt: skip


def test_settings(launch: object, tmp_path: Path) -> None:
    check(hostile_others.read_environment(tmp_path, SETTINGS))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("partial", [False, True])
def test_checkpoints_on_all_ranks(strategy: ms.MirroredStrategy, tmp_path: Path, partial: bool) -> None:
    """Every rank says the same, and goes on."""
    folder, dice = shared_folder(tmp_path), random.Random(11)
    program = hostile.Program(strategy)
    program.checkpoint.save(folder / "c")
    for number in range(part_of(90)):
        path, way = folder / f"{number}", ""
        if RANK == 0:
            shutil.copytree(folder / "c", path)
            way = hostile.mutate_checkpoint(path, dice)
        strategy.barrier("mutated")
        found = outcomes(functools.partial(program.checkpoint.restore, path, partial=partial))
        kinds = {outcome.error for outcome in found}
        assert len(kinds) == 1, (way, found)
        assert kinds == {None} or issubclass(next(iter(kinds)), ms.errors.MpiStrategyError), (way, found[0].text)
        strategy.barrier("read")
        if kinds == {None}:
            program.check()
            program = hostile.Program(strategy)


@one_rank
def test_what_a_checkpoint_says_does_not_steer_the_terminal(tmp_path: Path) -> None:
    program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
    program.checkpoint.save(tmp_path / "c")
    steer = "\x1b]0;owned\x07\u202e"

    def lie(content: Any) -> None:
        content["layout"] = {f"{steer}key": [{"x": steer}, 1.5, None]}
        content["items"][f"{steer}name"] = content["items"]["words"]
        content["names"].append(f"{steer}name")
        content["written_by"] = "1\x1b[2J"

    lied(lie)(tmp_path / "c")
    with pytest.raises(ms.errors.CheckpointMismatchError) as caught:
        program.checkpoint.restore(tmp_path / "c")
    assert str(caught.value).replace("\n", "").isprintable()
    restored = program.checkpoint.restore(tmp_path / "c", partial=True)
    assert restored.written_by == "1\\x1b[2J"
    (left_out,), (note, *_) = restored.left_out, restored.notes
    assert left_out == "\\x1b]0;owned\\x07\\u202ename"
    assert note.isprintable()


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
reads = [lambda: max(array.nbytes for array in ms.Checkpoint.arrays(path).values())]
if path.is_dir():
    reads.append(lambda: program.checkpoint.restore(path).path)
    reads.append(lambda: program.checkpoint.restore(path, partial=True).path)
for read in reads:
    began = time.monotonic()
    try:
        said = "fine " + str(read())
    except ms.errors.MpiStrategyError as error:
        said = type(error).__name__ + " " + str(error)[:200]
    seconds = time.monotonic() - began
    (peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(int(peak.split()[1]) // 1024, round(seconds, 2), said)
"""


def measured(path: Path) -> list[str]:
    """Read something in a process of its own, quickly and without much memory; return what was said."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(tests=launching.HELPERS), str(path)],
        env={**launching.environment(), "PYTHONPATH": str(Path(__file__).parents[2]), "MPISTRATEGY_ALONE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = [line.split(" ", 2) for line in done.stdout.splitlines()]
    for peak, seconds, said in told:
        assert int(peak) < MOST_MIB, f"{peak} MiB: {said}"
        assert float(seconds) < hostile.MOST_SECONDS, f"{seconds} s: {said}"
    return [said for _, _, said in told]


def long_header(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def sparse(path: Path, head: bytes, size: int) -> None:
    path.write_bytes(head)
    os.truncate(path, size)


def safetensors(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def npy(shape: str, dtype: str = "<f8") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text


def zeros(path: Path) -> None:
    """Write a .npz file of 1 MiB with 1,000 MiB of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as member:
        member.write(npy(f"({1000 * 2**20},)", "|u1"))
        for _ in range(1000):
            member.write(bytes(2**20))


GIB = 2**30
LISTS = b"[%s1]" % (b"[]," * 22_000_000)
ARRAYS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "40 GiB of nothing": (
        "safetensors",
        lambda p: sparse(p, (h := safetensors(entry(40 * GIB))), len(h) + 40 * GIB),
        f"fine {40 * GIB}",
    ),
    "a header of 90 MB": ("safetensors", lambda p: long_header(p, b'{"a":"' + b"x" * 90_000_000 + b'"}'), "Damaged"),
    "a header of 64 MiB of lists": ("safetensors", lambda p: long_header(p, LISTS), "Damaged"),
    "a sparse header": ("safetensors", lambda p: sparse(p, (2**26).to_bytes(8, "little"), 2**26 + 8), "Damaged"),
    "a header of 2^60 bytes": ("safetensors", lambda p: sparse(p, (2**60).to_bytes(8, "little"), 40 * GIB), "Damaged"),
    "40 GiB that are not there": ("npy", lambda p: p.write_bytes(npy("(5368709120,)")), "Damaged"),
    "40 GiB of nothing in .npy": (
        "npy",
        lambda p: sparse(p, (h := npy("(5368709120,)")), len(h) + 40 * GIB),
        f"fine {40 * GIB}",
    ),
    "a shape that overflows": ("npy", lambda p: p.write_bytes(npy(f"({2**63 - 1}, {2**63 - 1})")), "Damaged"),
    "a bomb": ("npz", zeros, "Damaged"),
    "an expression for a shape": ("npy", lambda p: p.write_bytes(npy("(" + "-" * 5000 + "1,)")), "Damaged"),
}  # fmt: skip


def entry(nbytes: int) -> Any:
    return {"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}


@one_rank
@pytest.mark.parametrize("what", [pytest.param(what, marks=long_lane if what in SLOW else ()) for what in ARRAYS])
def test_large_files_of_others(tmp_path: Path, what: str) -> None:
    ending, make, word = ARRAYS[what]
    path = tmp_path / f"x.{ending}"
    make(path)
    (said,) = measured(path)
    assert word in said


@one_rank
def test_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy("(12000000,)", "|u1") + bytes(12_000_000))
    assert ms.Checkpoint.arrays(tmp_path / "x.npz")["a"].nbytes == 12_000_000
    monkeypatch.setattr(checkpoint_arrays, "_SMALL_BYTES", 10_000_000)
    with pytest.raises(ms.errors.CheckpointDamagedError, match="far too much"):
        ms.Checkpoint.arrays(tmp_path / "x.npz")


def lied(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content = hostile.body_of(path)
        change(content)
        hostile.write_body(path, content)

    return write


def signed(path: Path, body: bytes) -> None:
    """Write a manifest with this body."""
    (path / NAME).write_bytes(with_head(body))


def bigger_shard(path: Path) -> None:
    """Make a shard of 40 GiB, as the manifest says."""
    content = hostile.body_of(path)
    content["shards"][0][0] = 40 * GIB
    hostile.write_body(path, content)
    os.truncate(path / shard_name(0), 40 * GIB)


WIDE_STATE = {
    "dict": [["bit_generator", "MT19937"], ["state", {"tuple": ["ndarray", "<U100000000", ["a"] * 1000]}]],
}
CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "a manifest of 64 MiB of lists": lambda p: signed(p, LISTS),
    "a manifest of 20 MB of numbers": lambda p: signed(p, b"[" + b"1000," * 4_100_000 + b"1]"),
    "a manifest of 200 MB": lambda p: signed(p, b'"' + b"x" * 200_000_000 + b'"'),
    "a sparse manifest": lambda p: os.truncate(p / NAME, 40 * GIB),
    "a sparse shard": lambda p: os.truncate(p / shard_name(0), 40 * GIB),
    "a shard that is as large as it should be": bigger_shard,
    "a shape of 2^45 numbers": lied(lambda c: c["items"]["progress/kept"].__setitem__(3, [2**42])),
    "a list of very many": lied(lambda c: c["items"]["nest/x"].__setitem__(5, 10**15)),
    "a wide state of a generator": lied(lambda c: c["items"]["old"].__setitem__(6, [WIDE_STATE])),
}  # fmt: skip


@one_rank
@pytest.mark.parametrize("what", [pytest.param(what, marks=long_lane if what in SLOW else ()) for what in CHECKPOINTS])
def test_large_checkpoints(tmp_path: Path, what: str) -> None:
    program = hostile.Program(ms.OneDeviceStrategy("CPU:0"))
    program.checkpoint.save(tmp_path / "c")
    CHECKPOINTS[what](tmp_path / "c")
    _, *restored = measured(tmp_path / "c")
    assert all(said.startswith(("CheckpointDamagedError", "CheckpointMismatchError")) for said in restored)


# ------------------------------------------------------------------------------------------------ what is returned


@one_rank
def test_arrays_are_mapped_and_may_be_written_to(tmp_path: Path) -> None:
    arrays = {"a": np.arange(12.0).reshape(3, 4), "b": np.ones(5, np.int8), "c": np.asfortranarray(np.ones((2, 3)))}
    np.savez(tmp_path / "x.npz", **arrays)
    np.savez_compressed(tmp_path / "y.npz", **arrays)
    np.save(tmp_path / "x.npy", arrays["c"])
    with ms.OneDeviceStrategy("CPU:0").scope():
        ms.Checkpoint(**arrays, odd=np.ones(3, bool), wide=np.ones(3, np.longdouble)).save(tmp_path / "c")
    for name in ("x.npz", "y.npz", "c"):
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        found = ms.Checkpoint.arrays(tmp_path / name)
        for key, array in arrays.items():
            assert found[key].tolist() == array.tolist()
            assert found[key].flags.writeable
            assert found[key].flags.aligned
            found[key][...] = 7
        assert {file: file.read_bytes() for file in before} == before
    assert ms.Checkpoint.arrays(tmp_path / "x.npy")[""].flags.f_contiguous
    odd = ms.Checkpoint.arrays(tmp_path / "c" / shard_name(0))["odd"]
    shutil.rmtree(tmp_path / "c")
    assert odd.tolist() == [True] * 3, "what is mapped outlives its file"


@one_rank
def test_a_damaged_bit_of_an_archive_is_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(1000))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[4000] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(ms.errors.CheckpointDamagedError, match="CRC"):
        ms.Checkpoint.arrays(tmp_path / "x.npz")


@one_rank
def test_what_is_too_long_to_be_read_is_not_saved(tmp_path: Path) -> None:
    with ms.OneDeviceStrategy("CPU:0").scope():
        checkpoint = ms.Checkpoint(numbers=[[]] * 2**21)
    with pytest.raises(ms.errors.OptionError, match="Keep long lists of numbers in arrays"):
        checkpoint.save(tmp_path / "c")
    assert os.listdir(tmp_path) == []
    assert SIZE == 1
