"""One rank, one GPU: which of them, on 20 and more layouts, and what is refused on every rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gpu_here
import launching
import pytest
from gpu_here import visible
from hypothesis import given
from hypothesis import strategies as st
from replicas import RANK, SIZE, one_node, outcomes, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError, DeviceError, FallbackWarning, OptionTypeError
from mpistrategy.mpi.gpu import device_selection
from mpistrategy.mpi.gpu.device_selection import Gpu, Sight, bind

pytestmark = pytest.mark.one_rank

# ------------------------------------------------------------------------------------- the decision


@dataclass(frozen=True)
class Placed:
    """A GPU of a node, and the NUMA node that it is attached to."""

    name: str
    place: int | None = None


def node(name: str, numa_of: Sequence[int | None]) -> list[Placed]:
    """Return the GPUs of a node, in CUDA's order, by their NUMA nodes."""
    return [Placed(f"GPU-{name}{i}", place) for i, place in enumerate(numa_of)]


def seeing(seen: Sequence[Placed], distances: Mapping[int, int] | None = None, host: str = "n0") -> Sight:
    """Return the sight of a rank whose cores are so far from the NUMA nodes."""
    row = distances or {}
    return Sight(tuple(Gpu(gpu.name, 0 if gpu.place is None else row.get(gpu.place, 0)) for gpu in seen), host)


def near(place: int, nodes: int, per_socket: int = 1) -> dict[int, int]:
    """Return the distances from the cores of a NUMA node: 10 to itself, 12 within its socket, 32 to the other."""
    return {n: 10 if n == place else 12 if n // per_socket == place // per_socket else 32 for n in range(nodes)}


FOUR, EIGHT = node("a", [0, 0, 1, 1]), node("a", [0, 0, 0, 0, 1, 1, 1, 1])
PLAIN = node("a", [None] * 4)
SECOND = node("b", [0, 0, 1, 1])
REVERSED = node("a", [3, 2, 1, 0])  # the GPU of the last quarter of the cores comes first
EVERY_SECOND = node("a", [3, 1, 7, 5])  # eight NUMA nodes, GPUs at four of them
MIG = [Placed(f"MIG-{i}", 0) for i in range(7)]  # parts of one GPU
SOCKETS = [near(0, 2), near(0, 2), near(1, 2), near(1, 2)]

# name: what each rank sees, the GPU that it gets
LAYOUTS: dict[str, tuple[list[Sight], list[str]]] = {
    "1 rank, 1 GPU": ([seeing(FOUR[:1])], ["a0"]),
    "4 ranks, 4 GPUs, all visible": ([seeing(FOUR)] * 4, ["a0", "a1", "a2", "a3"]),
    "4 ranks, 4 GPUs, no NUMA information": ([seeing(PLAIN)] * 4, ["a0", "a1", "a2", "a3"]),
    "GPUs know their nodes, ranks do not": ([seeing(FOUR)] * 4, ["a0", "a1", "a2", "a3"]),
    "ranks know their nodes, GPUs do not": ([seeing(PLAIN, d) for d in SOCKETS], ["a0", "a1", "a2", "a3"]),
    "4 ranks on two sockets": ([seeing(FOUR, d) for d in SOCKETS], ["a0", "a1", "a2", "a3"]),
    "the ranks begin on the second socket": (
        [seeing(FOUR, d) for d in reversed(SOCKETS)],
        ["a2", "a3", "a0", "a1"],
    ),
    "ranks take turns on the sockets": (
        [seeing(FOUR, near(rank % 2, 2)) for rank in range(4)],
        ["a0", "a2", "a1", "a3"],
    ),
    "8 GPUs, two sockets, 8 ranks": (
        [seeing(EIGHT, near(rank // 4, 2)) for rank in range(8)],
        [f"a{rank}" for rank in range(8)],
    ),
    "8 GPUs, two sockets, 4 ranks": ([seeing(EIGHT, d) for d in SOCKETS], ["a0", "a1", "a4", "a5"]),
    "8 GPUs, 3 ranks on one socket": ([seeing(EIGHT, near(1, 2))] * 3, ["a4", "a5", "a6"]),
    "more ranks on a socket than it has GPUs": ([seeing(FOUR, near(0, 2))] * 3, ["a0", "a1", "a2"]),
    "a GPU for each quarter of the cores, the last first": (
        [seeing(REVERSED, near(rank, 4)) for rank in range(4)],
        ["a3", "a2", "a1", "a0"],
    ),
    "GPUs at every second NUMA node": (
        [seeing(EVERY_SECOND, near(rank * 2, 8, per_socket=4)) for rank in range(4)],
        ["a0", "a1", "a2", "a3"],
    ),
    "GPUs at every second NUMA node, the ranks the other way round": (
        [seeing(EVERY_SECOND, near(6 - rank * 2, 8, per_socket=4)) for rank in range(4)],
        ["a2", "a3", "a0", "a1"],
    ),
    "each rank sees one: --gpus-per-task=1": ([seeing([gpu]) for gpu in FOUR], ["a0", "a1", "a2", "a3"]),
    "each rank sees one, far from its cores": (
        [seeing([gpu], near(0, 2)) for gpu in reversed(FOUR)],
        ["a3", "a2", "a1", "a0"],
    ),
    "each rank sees two of its own": ([seeing(EIGHT[2 * r : 2 * r + 2]) for r in range(4)],
                                      ["a0", "a2", "a4", "a6"]),
    "CUDA_VISIBLE_DEVICES in another order for each rank": (
        [seeing(FOUR[r:] + FOUR[:r]) for r in range(4)],
        ["a0", "a1", "a2", "a3"],
    ),
    "some see all, the last one only the first": ([seeing(FOUR), seeing(FOUR), seeing(FOUR[:1])],
                                                   ["a1", "a2", "a0"]),
    "MIG devices on one GPU": ([seeing([part]) for part in MIG], [f"MIG-{i}" for i in range(7)]),
    "MIG devices, all visible": ([seeing(MIG)] * 7, [f"MIG-{i}" for i in range(7)]),
    "fewer ranks than GPUs": ([seeing(EIGHT)] * 2, ["a0", "a1"]),
    "two nodes": ([seeing(FOUR)] * 2 + [seeing(SECOND, host="n1")] * 2, ["a0", "a1", "b0", "b1"]),
    "two nodes, ranks dealt out": (
        [seeing(FOUR), seeing(SECOND, host="n1")] * 2,
        ["a0", "b0", "a1", "b1"],
    ),
    "uneven nodes": (
        [seeing(FOUR)] * 4 + [seeing(SECOND[:1], host="n1")],
        ["a0", "a1", "a2", "a3", "b0"],
    ),
    "each rank in a container of its own, which MPI takes for a node": (
        [seeing(FOUR)] * 4,
        ["a0", "a1", "a2", "a3"],
    ),
}  # fmt: skip


def names(sights: Sequence[Sight], *, sharing: bool = False) -> list[str]:
    """Return the name of each rank's GPU: the number is the rank's own."""
    return [sight.gpus[number].name for sight, number in zip(sights, bind(sights, sharing=sharing), strict=True)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_gets_a_gpu_of_its_own(name: str) -> None:
    sights, expected = LAYOUTS[name]
    for sharing in (False, True):  # which is allowed, and not needed
        assert [each.removeprefix("GPU-") for each in names(sights, sharing=sharing)] == expected


NONE = Sight(host="n0", reason="CuPy is not installed", fix="Install the CuPy of your driver")
# name: what each rank sees, what the text says
TOO_FEW: dict[str, tuple[list[Sight], list[str]]] = {
    "more ranks than GPUs": (
        [seeing(FOUR)] * 6,
        ["ranks 0-5 on n0 with 4 GPUs between them: GPU-a0, GPU-a1", "at most 4 ranks"],
    ),
    "on the second node": (
        [seeing(FOUR)] * 2 + [seeing(SECOND[:1], host="n1")] * 2,
        ["ranks 2, 3 on n1 with 1 GPU between them: GPU-b0", "srun --gpus-per-task=1", "at most 1 rank there"],
    ),
    "all are shown the same one": ([seeing(FOUR[:1])] * 4, ["ranks 0-3 on n0 with 1 GPU", "no CUDA_VISIBLE_DEVICES"]),
    "two of four are shown the same one": (
        [seeing([FOUR[i]]) for i in (0, 1, 1, 3)],
        ["ranks 1, 2 on n0 with 1 GPU between them: GPU-a1"],
    ),
    "the same MIG device": ([seeing(MIG[:1])] * 2, ["MIG-0"]),
    "three for two, one for itself": (
        [seeing(FOUR[:2])] * 3 + [seeing(FOUR)],
        ["ranks 0-2 on n0 with 2 GPUs between them: GPU-a0, GPU-a1", "at most 2 ranks"],
    ),
}


@pytest.mark.parametrize("name", TOO_FEW)
def test_two_ranks_on_one_gpu_are_refused_unless_asked_for(name: str) -> None:
    sights, texts = TOO_FEW[name]
    with pytest.raises(DeviceError) as refusal:
        bind(sights)
    for text in [*texts, 'devices="shared"']:
        assert text in str(refusal.value)
    assert len(bind(sights, sharing=True)) == len(sights)


def test_ranks_that_share_go_round() -> None:
    assert bind([seeing(PLAIN)] * 6, sharing=True) == (0, 1, 2, 3, 0, 1)
    assert bind([seeing(FOUR[:1])] * 3, sharing=True) == (0, 0, 0)
    assert sorted(bind([seeing(FOUR, near(1, 2))] * 8, sharing=True)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("sights", "texts"),
    [
        ([NONE] * 3, ["found CuPy is not installed on ranks 0-2 (n0)", "Install the CuPy"]),
        ([seeing(FOUR), NONE], ["CuPy is not installed on rank 1 (n0)"]),
        ([NONE, NONE._replace(host="n1")], ["on ranks 0, 1 (n0 and 1 more nodes)"]),
        (
            [NONE, NONE._replace(reason="no NVIDIA driver here", host="n7")],
            ["CuPy is not installed on rank 0 (n0)"],
        ),
    ],
)
def test_ranks_without_a_gpu(sights: list[Sight], texts: list[str]) -> None:
    for sharing in (False, True):
        with pytest.raises(DeviceError) as refusal:
            bind(sights, sharing=sharing)
        for text in [*texts, 'devices="cpu"']:
            assert text in str(refusal.value)


def naming(sights: Sequence[Sight], numbers: Sequence[int]) -> list[Sight]:
    return [sight._replace(device_index=number) for sight, number in zip(sights, numbers, strict=True)]


def test_ranks_take_the_gpus_that_the_program_names() -> None:
    assert bind(naming([seeing(FOUR)] * 3, [3, 0, 1])) == (3, 0, 1)
    with pytest.raises(DeviceError, match=r"ranks 0, 2 on n0 with 1 GPU.*Name another GPU for each rank"):
        bind(naming([seeing(FOUR)] * 3, [1, 0, 1]))
    one_each = [seeing([gpu]) for gpu in FOUR]
    assert names(naming(one_each, [0] * 4)) == [gpu.name for gpu in FOUR]
    with pytest.raises(DeviceError, match=r'GPU:1 for rank 1, which sees GPU:0 \(GPU-a1\).*devices="gpu"'):
        bind(naming(one_each, [0, 1, 2, 3]))


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=6), st.data())
def test_each_rank_has_the_nearest_that_was_free(seen: list[list[int]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=6, max_size=6))
    rows = [data.draw(st.sampled_from([{}, near(0, 2), near(1, 2)])) for _ in seen]
    all_gpus = node("a", places)
    sights = [seeing([all_gpus[i] for i in mine], row) for mine, row in zip(seen, rows, strict=True)]
    shared = bind(sights, sharing=True)
    assert all(number < len(sight.gpus) for sight, number in zip(sights, shared, strict=True))
    try:
        bound = bind(sights)
    except DeviceError:
        return
    assert shared == bound
    held = {name: rank for rank, name in enumerate(names(sights))}
    assert len(held) == len(sights)
    for rank, number in enumerate(bound):
        for nearer in (gpu for gpu in sights[rank].gpus if gpu.distance < sights[rank].gpus[number].distance):
            assert (len(seen[held[nearer.name]]), held[nearer.name]) < (len(seen[rank]), rank)


# ------------------------------------------------------------------------------------- what a process sees


def test_the_distance_of_a_gpu_from_the_cores(tmp_path: Path) -> None:
    rows = {0: ("0123", "10 12 32"), 1: ("4567", "12 10 32"), 3: ("", "32 32 10")}  # 3 is memory without cores
    for number, (those, row) in rows.items():
        folder = tmp_path / "devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text(f"{row}\n")
        for core in those:
            (tmp_path / f"devices/system/cpu/cpu{core}/node{number}").mkdir(parents=True)
    for place, text in {"0000:3b:00.0": "1\n", "0000:01:00.0": "-1\n", "0000:02:00.0": "?"}.items():
        (tmp_path / "bus/pci/devices" / place).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / place / "numa_node").write_text(text)
    found = partial(device_selection.distance, system=str(tmp_path))
    assert found("0000:3b:00.0", [3]) == 12
    assert found("0000:3b:00.0", [3, 4]) == 10
    assert found("0000:3b:00.0", [99]) == 0
    for unknown in ("0000:01:00.0", "0000:02:00.0", "0000:09:00.0", ""):
        assert found(unknown, [3]) == 0
    (tmp_path / "devices/system/node/node1/distance").write_text("10\n")
    assert found("0000:3b:00.0", [3]) == 0, "not understood"


class Runtime:
    """What CuPy tells of the GPUs: how many, or what error."""

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            super().__init__(f"status {status}")
            self.status = status

    def __init__(self, count: int, status: int = 0, driver: int = 12080) -> None:
        self.count, self.status, self.driver = count, status, driver

    def getDeviceCount(self) -> int:  # noqa: N802
        if self.status:
            raise self.CUDARuntimeError(self.status)
        return self.count

    def driverGetVersion(self) -> int:  # noqa: N802
        return self.driver

    def deviceGetPCIBusId(self, index: int) -> str:  # noqa: N802
        return f"0000:{index + 0x3B:02X}:00.0"

    def getDeviceProperties(self, index: int) -> dict[str, bytes]:  # noqa: N802
        return {"uuid": b"" if index else bytes(range(1, 5))}  # CuPy cuts off at a byte of 0


@pytest.mark.parametrize(
    ("runtime", "words", "is_strange"),
    [
        (Runtime(2), "", False),
        (Runtime(0), "no GPU that this process may use", False),
        (Runtime(0, status=100), "no GPU that this process may use", False),
        (Runtime(0, status=35, driver=0), "no NVIDIA driver here", False),
        (Runtime(0, status=35, driver=11000), "CuPy does not work here (CUDARuntimeError: status 35)", True),
        (None, "CuPy does not work here (AttributeError", True),
    ],
)
def test_what_cupy_tells(
    runtime: Runtime | None, words: str, is_strange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy: Any = ModuleType("cupy")
    if runtime is not None:
        cupy.cuda = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    sight = device_selection.look()
    assert words in sight.reason
    assert sight.is_strange is is_strange
    if not words:
        assert [gpu.name for gpu in sight.gpus] == [
            "GPU-01020304 at 0000:3b:00.0",
            f"0000:3c:00.0 on {os.uname().nodename}",
        ]


# ------------------------------------------------------------------------------------- strategies

TWO_OR_MORE = pytest.mark.mpi(min_size=2)


def refused(devices: object) -> list[str]:
    """Return the text of the DeviceError of each rank, after seeing that it came in time and left nothing behind."""
    began = time.monotonic()
    ended = outcomes(lambda: ms.MirroredStrategy(devices))  # type: ignore[arg-type]
    assert time.monotonic() - began < 5
    assert {one.error for one in ended} == {DeviceError}, ended
    with ms.MirroredStrategy() as strategy:
        assert still_works(strategy)
    return [one.text for one in ended]


@pytest.mark.mpi
@pytest.mark.parametrize("devices", ["cpu", "CPU", None, []])
def test_cpus_are_not_looked_for(devices: object) -> None:
    with visible(error=AssertionError("looked")), ms.MirroredStrategy(devices) as strategy:  # type: ignore[arg-type]
        assert strategy.devices_by_rank[RANK].endswith("CPU:0")
        assert still_works(strategy)


@pytest.mark.mpi
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    with visible(), ms.MirroredStrategy("auto") as strategy:
        assert strategy.devices_by_rank[RANK].endswith("CPU:0")
        assert still_works(strategy)


@TWO_OR_MORE
def test_auto_says_why_it_is_the_cpu_where_there_are_too_few() -> None:
    words = rf"all ranks work on CPUs.*ranks {SIZE - 2}, {SIZE - 1} on"
    warned = pytest.warns(FallbackWarning, match=words) if RANK == 0 else nullcontext()
    with visible(f"GPU-{min(RANK, SIZE - 2)}"), warned:
        strategy = ms.MirroredStrategy("auto")
    assert strategy.devices_by_rank[RANK].endswith("CPU:0")
    assert still_works(strategy)
    strategy.close()


#: What is asked for, what each rank sees or why it cannot look, and what every rank is told.
ONE_FOR_TWO = ["GPU-one" if rank in (0, SIZE - 1) else f"GPU-{rank}" for rank in range(SIZE)]
EACH = [f"GPU-{rank}" for rank in range(SIZE)]
NOT_ON_THE_LAST: list[Any] = [*EACH[:-1], DeviceError.at("GPUs", found="no driver", expected="a GPU", fix="Get one")]
BROKEN: list[Any] = [ZeroDivisionError("in the driver"), *EACH[1:]]
SHARED = [f"ranks 0, {SIZE - 1} on", "1 GPU between them: GPU-one", 'devices="shared"']
REFUSED: dict[str, tuple[list[object], list[Any], list[str]]] = {
    "a GPU for two ranks": (["gpu", ["GPU:0"] * SIZE], ONE_FOR_TWO, SHARED),
    "a rank without a GPU": (
        ["gpu", "shared", ["GPU:0"] * SIZE], NOT_ON_THE_LAST, [f"found no driver on rank {SIZE - 1}", "Get one"],
    ),
    "a number that does not exist": (
        [[f"GPU:{rank + 1}" for rank in range(SIZE)], ["GPU:99"] * SIZE], EACH, ["which sees GPU:0"],
    ),
    "a rank that breaks": (["gpu"], BROKEN, ["ZeroDivisionError: in the driver", "on rank 0"]),
}  # fmt: skip


@TWO_OR_MORE
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(what: str) -> None:
    asked, seen, words = REFUSED[what]
    mine = seen[RANK]
    with visible(mine) if isinstance(mine, str) else visible(error=mine):
        for devices in asked:
            for text in refused(devices):
                for word in words:
                    assert word in text


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("devices", "error"),
    [("gpus", OptionTypeError), ("GPU:0", OptionTypeError), ("", OptionTypeError), ({"gpu"}, OptionTypeError)],
)
def test_words_that_are_none(devices: object, error: type[Exception]) -> None:
    for one in outcomes(lambda: ms.MirroredStrategy(devices)):  # type: ignore[arg-type]
        assert one.error is error
        assert "'auto', 'gpu', 'cpu', 'shared'" in one.text


@TWO_OR_MORE
def test_different_words_are_refused_on_every_rank() -> None:
    with visible(f"GPU-{RANK}"):
        for mine, other in [
            ("gpu", "cpu"),
            ("auto", None),
            ("gpu", "shared"),
            ("gpu", ["CPU:0"] * 0),
            (["GPU:0"] * SIZE, "gpu"),
        ]:
            for one in outcomes(lambda given=mine if RANK else other: ms.MirroredStrategy(given)):
                assert one.error is CollectiveMismatchError, one


@one_node
@TWO_OR_MORE
def test_cpus_and_gpus_in_one_list_are_refused() -> None:
    with visible(f"GPU-{RANK}"):
        for text in refused(["CPU:0", *(f"GPU:{index}" for index in range(SIZE - 1))]):
            assert "either CPUs or GPUs" in text


# ------------------------------------------------------------------------------------- GPUs that are there

BOUND = """
import os, sys
from mpi4py import MPI

visible = sys.argv[2].split("/")[MPI.COMM_WORLD.rank]
if visible != "all":
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
import cupy
import mpistrategy as ms

devices = sys.argv[1].split("+")
strategy = ms.MirroredStrategy(devices[0] if len(devices) == 1 else devices)
number = cupy.cuda.runtime.getDevice()
assert strategy.devices_by_rank[strategy.rank].endswith(f"/task:{strategy.rank}/device:GPU:{number}")
sys.stdout.write(f"{strategy.rank} {cupy.cuda.runtime.deviceGetPCIBusId(number)}\\n")
"""


@gpu_here.needs_gpu
@pytest.mark.parametrize(
    ("devices", "seen", "different"),
    [
        ("gpu", "all/all", True),
        ("auto", "all/all", True),
        ("gpu", "1,0/0,1", True),
        ("gpu", "0,1/1", True),
        ("GPU:1+GPU:0", "all/all", True),
        ("shared", "0/0", False),
    ],
)
def test_each_rank_drives_another_gpu(
    launch: Callable[..., launching.Finished], tmp_path: Path, devices: str, seen: str, different: bool
) -> None:
    if gpu_here.cupy_or_skip().cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    job = launch(2, [launching.program(BOUND, tmp_path), devices, seen], timeout=60).check()
    assert len({line.split()[1] for line in job.stdout.splitlines()}) == 1 + different, job
