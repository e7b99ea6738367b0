"""One rank, one GPU: which of them, on 20 and more layouts, and what is refused on every rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import gpu_here
import launching
import pytest
from gpu_here import visible
from hypothesis import given
from hypothesis import strategies as st
from replicas import RANK, SIZE, all_raise, one_node, still_works

import mpistrategy as ms
from mpistrategy.errors import DeviceError, FallbackWarning, OptionTypeError
from mpistrategy.mpi.gpu import device_selection
from mpistrategy.mpi.gpu.device_selection import Gpu, Sight, bind

pytestmark = pytest.mark.one_rank

# ------------------------------------------------------------------------------------- the decision


def seeing(gpus: str, distances: Sequence[int] = (), host: str = "n0") -> Sight:
    """Return the sight of a rank that sees these GPUs, so far from its cores; not known: 0."""
    found = zip_longest(gpus.split(), distances, fillvalue=0)
    return Sight(tuple(Gpu(f"GPU-{name}", int(distance)) for name, distance in found), host)


FOUR = "a0 a1 a2 a3"
EACH_OF_FOUR = [seeing(name) for name in FOUR.split()]
#: From the cores of one socket and of the other: 10 is beside them, 32 on the other socket.
LEFT, RIGHT = seeing(FOUR, (10, 10, 32, 32)), seeing(FOUR, (32, 32, 10, 10))
ANYWHERE, ELSEWHERE = seeing(FOUR), seeing("b0 b1 b2 b3", host="n1")
MIG = "MIG-0 MIG-1 MIG-2 MIG-3 MIG-4 MIG-5 MIG-6"  # parts of one GPU

# name: what each rank sees, the GPU that it gets
LAYOUTS: dict[str, tuple[list[Sight], str]] = {
    "all visible, nothing known of cores": ([ANYWHERE] * 4, FOUR),
    "on two sockets": ([LEFT, LEFT, RIGHT, RIGHT], FOUR),
    "the ranks begin on the second socket": ([RIGHT, RIGHT, LEFT, LEFT], "a2 a3 a0 a1"),
    "ranks take turns on the sockets": ([LEFT, RIGHT] * 2, "a0 a2 a1 a3"),
    "more ranks on a socket than it has GPUs": ([RIGHT] * 3, "a2 a3 a0"),
    "each rank sees one: --gpus-per-task=1": (EACH_OF_FOUR, FOUR),
    "each rank sees two of its own": ([seeing("a0 a1"), seeing("a2 a3")], "a0 a2"),
    "CUDA_VISIBLE_DEVICES in another order for each rank": ([seeing("a0 a1"), seeing("a1 a0")], "a0 a1"),
    "some see all, the last one only the first": ([ANYWHERE, ANYWHERE, seeing("a0")], "a1 a2 a0"),
    "MIG devices, all visible": ([seeing(MIG)] * 7, MIG),
    "two nodes, ranks dealt out": ([ANYWHERE, ELSEWHERE] * 2, "a0 b0 a1 b1"),
    "uneven nodes": ([ANYWHERE] * 4 + [ELSEWHERE], f"{FOUR} b0"),
}


def names(sights: Sequence[Sight], *, sharing: bool = False) -> list[str]:
    """Return the name of each rank's GPU: the number is the rank's own."""
    return [sight.gpus[number].name for sight, number in zip(sights, bind(sights, sharing=sharing), strict=True)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_gets_a_gpu_of_its_own(name: str) -> None:
    sights, expected = LAYOUTS[name]
    for sharing in (False, True):  # which is allowed, and not needed
        assert [name.removeprefix("GPU-") for name in names(sights, sharing=sharing)] == expected.split()


NONE = Sight(host="n0", reason="CuPy is not installed", fix="Install the CuPy of your driver")
# name: what each rank sees, what the text says
TOO_FEW: dict[str, tuple[list[Sight], list[str]]] = {
    "more ranks than GPUs": (
        [ANYWHERE] * 6,
        ["ranks 0-5 on n0 with 4 GPUs between them: GPU-a0, GPU-a1", "at most 4 ranks"],
    ),
    "on the second node": (
        [ANYWHERE] * 2 + [seeing("b0", host="n1")] * 2,
        ["ranks 2, 3 on n1 with 1 GPU between them: GPU-b0", "srun --gpus-per-task=1", "at most 1 rank there"],
    ),
    "all are shown the same one": ([seeing("a0")] * 4, ["ranks 0-3 on n0 with 1 GPU", "no CUDA_VISIBLE_DEVICES"]),
    "two of four are shown the same one": (
        [EACH_OF_FOUR[i] for i in (0, 1, 1, 3)],
        ["ranks 1, 2 on n0 with 1 GPU between them: GPU-a1"],
    ),
    "the same MIG device": ([seeing("MIG-0")] * 2, ["MIG-0"]),
    "three for two, one for itself": (
        [seeing("a0 a1")] * 3 + [ANYWHERE],
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
    assert bind([ANYWHERE] * 6, sharing=True) == (0, 1, 2, 3, 0, 1)
    assert bind([seeing("a0")] * 3, sharing=True) == (0, 0, 0)
    assert sorted(bind([RIGHT] * 8, sharing=True)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("sights", "texts"),
    [
        ([NONE] * 3, ["found CuPy is not installed on ranks 0-2 (n0)", "Install the CuPy"]),
        ([ANYWHERE, NONE], ["CuPy is not installed on rank 1 (n0)"]),
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
    assert bind(naming([ANYWHERE] * 3, [3, 0, 1])) == (3, 0, 1)
    with pytest.raises(DeviceError, match=r"ranks 0, 2 on n0 with 1 GPU.*Name another GPU for each rank"):
        bind(naming([ANYWHERE] * 3, [1, 0, 1]))
    assert bind(naming(EACH_OF_FOUR, [0] * 4)) == (0, 0, 0, 0)
    with pytest.raises(DeviceError, match=r'GPU:1 for rank 1, which sees GPU:0 \(GPU-a1\).*devices="gpu"'):
        bind(naming(EACH_OF_FOUR, [0, 1, 2, 3]))


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=6), st.data())
def test_each_rank_has_the_nearest_that_was_free(seen: list[list[int]], data: st.DataObject) -> None:
    distances = st.lists(st.sampled_from([0, 10, 32]), min_size=6, max_size=6)
    sights = [seeing(" ".join(map(str, mine)), data.draw(distances)[: len(mine)]) for mine in seen]
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


class CudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def cuda(count: int = 0, error: CudaError | None = None, driver: int = 12080) -> SimpleNamespace:
    """Return what CuPy tells of the GPUs: how many, or what error.  CuPy cuts UUIDs off at a byte of 0."""
    return SimpleNamespace(
        CUDARuntimeError=CudaError,
        getDeviceCount=mock.Mock(side_effect=error, return_value=count),
        driverGetVersion=lambda: driver,
        deviceGetPCIBusId=lambda index: f"0000:{index + 0x3B:02X}:00.0",
        getDeviceProperties=lambda index: {"uuid": b"" if index else bytes(range(1, 5))},
    )


@pytest.mark.parametrize(
    ("runtime", "words", "is_strange"),
    [
        (cuda(2), "", False),
        (cuda(), "no GPU that this process may use", False),
        (cuda(error=CudaError(100)), "no GPU that this process may use", False),
        (cuda(error=CudaError(35), driver=0), "no NVIDIA driver here", False),
        (cuda(error=CudaError(35)), "CuPy does not work here (CudaError: status 35)", True),
        (None, "CuPy does not work here (AttributeError", True),
    ],
)
def test_what_cupy_tells(
    runtime: SimpleNamespace | None, words: str, is_strange: bool, monkeypatch: pytest.MonkeyPatch
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


def check_refused(devices: object, words: Sequence[str]) -> None:
    """Check that every rank raises a DeviceError with these words, in time, and that it leaves nothing behind."""
    began = time.monotonic()
    all_raise(DeviceError, lambda: ms.MirroredStrategy(devices), words=words)  # type: ignore[arg-type]
    assert time.monotonic() - began < 5
    with ms.MirroredStrategy() as strategy:
        assert still_works(strategy)


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
NOT_ON_THE_LAST: list[Any] = [*EACH[:-1], None]
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
            check_refused(devices, words)


@pytest.mark.mpi
@pytest.mark.parametrize("devices", ["gpus", "GPU:0", "", {"gpu"}])
def test_words_that_are_none(devices: object) -> None:
    all_raise(OptionTypeError, lambda: ms.MirroredStrategy(devices), words=["'auto', 'gpu', 'cpu', 'shared'"])  # type: ignore[arg-type]


@one_node
@TWO_OR_MORE
def test_cpus_and_gpus_in_one_list_are_refused() -> None:
    with visible(f"GPU-{RANK}"):
        check_refused(["CPU:0", *(f"GPU:{index}" for index in range(SIZE - 1))], ["either CPUs or GPUs"])


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
