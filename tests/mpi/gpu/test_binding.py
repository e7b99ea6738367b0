"""One rank, one GPU: which of them, on 20 and more layouts, and what is refused on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cupy_double
import gpu_doubles
import launching
import pytest
from gpu_doubles import PretendedGpus, pretended
from hypothesis import given
from hypothesis import strategies as st
from replicas import RANK, SIZE, gather_texts, one_node, outcomes, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError, DeviceError, FallbackWarning, OptionTypeError
from mpistrategy.mpi.gpu import inventory, numa
from mpistrategy.mpi.gpu.binding import bind, bind_if_possible
from mpistrategy.mpi.gpu.cuda_driver import NoGpus
from mpistrategy.mpi.gpu.inventory import Gpu, Sight
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.one_rank

# ------------------------------------------------------------------------------------- the decision


def node(name: str, numa_of: Sequence[int | None]) -> list[Gpu]:
    """Return the GPUs of a node, in CUDA's order, by their NUMA nodes."""
    return [Gpu(i, f"GPU-{name}{i}", f"0000:{i + 1:02x}:00.0", place) for i, place in enumerate(numa_of)]


def seeing(seen: Sequence[Gpu], distances: Mapping[int, int] | None = None, host: str = "n0") -> Sight:
    """Return the sight of a rank: what it sees has its numbers from 0 on."""
    own = tuple(replace(gpu, index=index) for index, gpu in enumerate(seen))
    return Sight(own, tuple((distances or {}).items()), host)


def near(place: int, nodes: int, per_socket: int = 1) -> dict[int, int]:
    """Return the distances from the cores of a NUMA node: 10 to itself, 12 within its socket, 32 to the other."""
    return {n: 10 if n == place else 12 if n // per_socket == place // per_socket else 32 for n in range(nodes)}


FOUR, EIGHT = node("a", [0, 0, 1, 1]), node("a", [0, 0, 0, 0, 1, 1, 1, 1])
PLAIN = node("a", [None] * 4)
SECOND = node("b", [0, 0, 1, 1])
REVERSED = node("a", [3, 2, 1, 0])  # the GPU of the last quarter of the cores comes first
EVERY_SECOND = node("a", [3, 1, 7, 5])  # eight NUMA nodes, GPUs at four of them
MIG = [Gpu(0, f"MIG-{i}", "0000:01:00.0", 0) for i in range(7)]  # parts of one GPU
NAMELESS = [Gpu(i, "", f"0000:0{i}:00.0") for i in range(2)]
NUMBERS = [Gpu(0), Gpu(1)]
SOCKETS = [near(0, 2), near(0, 2), near(1, 2), near(1, 2)]

# name: what each rank sees, the node of each, the UUID that it gets
LAYOUTS: dict[str, tuple[list[Sight], list[int], list[str]]] = {
    "1 rank, 1 GPU": ([seeing(FOUR[:1])], [0], ["a0"]),
    "4 ranks, 4 GPUs, all visible": ([seeing(FOUR)] * 4, [0] * 4, ["a0", "a1", "a2", "a3"]),
    "4 ranks, 4 GPUs, no NUMA information": ([seeing(PLAIN)] * 4, [0] * 4, ["a0", "a1", "a2", "a3"]),
    "GPUs know their nodes, ranks do not": ([seeing(FOUR)] * 4, [0] * 4, ["a0", "a1", "a2", "a3"]),
    "ranks know their nodes, GPUs do not": ([seeing(PLAIN, d) for d in SOCKETS], [0] * 4, ["a0", "a1", "a2", "a3"]),
    "4 ranks on two sockets": ([seeing(FOUR, d) for d in SOCKETS], [0] * 4, ["a0", "a1", "a2", "a3"]),
    "the ranks begin on the second socket": (
        [seeing(FOUR, d) for d in reversed(SOCKETS)],
        [0] * 4,
        ["a2", "a3", "a0", "a1"],
    ),
    "ranks take turns on the sockets": (
        [seeing(FOUR, near(rank % 2, 2)) for rank in range(4)],
        [0] * 4,
        ["a0", "a2", "a1", "a3"],
    ),
    "8 GPUs, two sockets, 8 ranks": (
        [seeing(EIGHT, near(rank // 4, 2)) for rank in range(8)],
        [0] * 8,
        [f"a{rank}" for rank in range(8)],
    ),
    "8 GPUs, two sockets, 4 ranks": ([seeing(EIGHT, d) for d in SOCKETS], [0] * 4, ["a0", "a1", "a4", "a5"]),
    "8 GPUs, 3 ranks on one socket": ([seeing(EIGHT, near(1, 2))] * 3, [0] * 3, ["a4", "a5", "a6"]),
    "more ranks on a socket than it has GPUs": ([seeing(FOUR, near(0, 2))] * 3, [0] * 3, ["a0", "a1", "a2"]),
    "a GPU for each quarter of the cores, the last first": (
        [seeing(REVERSED, near(rank, 4)) for rank in range(4)],
        [0] * 4,
        ["a3", "a2", "a1", "a0"],
    ),
    "GPUs at every second NUMA node": (
        [seeing(EVERY_SECOND, near(rank * 2, 8, per_socket=4)) for rank in range(4)],
        [0] * 4,
        ["a0", "a1", "a2", "a3"],
    ),
    "GPUs at every second NUMA node, the ranks the other way round": (
        [seeing(EVERY_SECOND, near(6 - rank * 2, 8, per_socket=4)) for rank in range(4)],
        [0] * 4,
        ["a2", "a3", "a0", "a1"],
    ),
    "each rank sees one: --gpus-per-task=1": ([seeing([gpu]) for gpu in FOUR], [0] * 4, ["a0", "a1", "a2", "a3"]),
    "each rank sees one, far from its cores": (
        [seeing([gpu], near(0, 2)) for gpu in reversed(FOUR)],
        [0] * 4,
        ["a3", "a2", "a1", "a0"],
    ),
    "each rank sees two of its own": ([seeing(EIGHT[2 * r : 2 * r + 2]) for r in range(4)], [0] * 4,
                                      ["a0", "a2", "a4", "a6"]),
    "CUDA_VISIBLE_DEVICES in another order for each rank": (
        [seeing(FOUR[r:] + FOUR[:r]) for r in range(4)],
        [0] * 4,
        ["a0", "a1", "a2", "a3"],
    ),
    "some see all, the last one only the first": ([seeing(FOUR), seeing(FOUR), seeing(FOUR[:1])], [0] * 3,
                                                   ["a1", "a2", "a0"]),
    "MIG devices on one GPU": ([seeing([part]) for part in MIG], [0] * 7, [f"MIG-{i}" for i in range(7)]),
    "MIG devices, all visible": ([seeing(MIG)] * 7, [0] * 7, [f"MIG-{i}" for i in range(7)]),
    "fewer ranks than GPUs": ([seeing(EIGHT)] * 2, [0] * 2, ["a0", "a1"]),
    "two nodes": ([seeing(FOUR)] * 2 + [seeing(SECOND, host="n1")] * 2, [0, 0, 1, 1], ["a0", "a1", "b0", "b1"]),
    "two nodes, ranks dealt out": (
        [seeing(FOUR), seeing(SECOND, host="n1")] * 2,
        [0, 1] * 2,
        ["a0", "b0", "a1", "b1"],
    ),
    "uneven nodes": (
        [seeing(FOUR)] * 4 + [seeing(SECOND[:1], host="n1")],
        [0, 0, 0, 0, 1],
        ["a0", "a1", "a2", "a3", "b0"],
    ),
    "each rank in a container of its own, which MPI takes for a node": (
        [seeing(FOUR)] * 4,
        [0, 1, 2, 3],
        ["a0", "a1", "a2", "a3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_gets_a_gpu_of_its_own(name: str) -> None:
    sights, node_of, expected = LAYOUTS[name]
    for sharing in (False, True):  # which is allowed, and not needed
        bound = bind(sights, node_of, sharing=sharing)
        assert [gpu.uuid.removeprefix("GPU-") for gpu in bound] == expected
        for gpu, sight in zip(bound, sights, strict=True):
            assert sight.gpus[gpu.index] == gpu, "the number is the rank's own"
    assert bind_if_possible(sights, node_of) == (bound, "")


def test_there_are_20_layouts() -> None:
    assert len(LAYOUTS) >= 20


def test_gpus_without_a_name_are_told_apart_by_place_and_number() -> None:
    for seen in (NAMELESS, NUMBERS):
        assert [gpu.index for gpu in bind([seeing(seen)] * 2, [0, 0])] == [0, 1]
        assert [gpu.index for gpu in bind([seeing(seen[:1])] * 2, [0, 1])] == [0, 0], "on two nodes"
    with pytest.raises(DeviceError, match="ranks 0, 1 on n0 with 1 GPU between them"):
        bind([seeing(NUMBERS[:1])] * 2, [0, 0])


NONE = Sight(host="n0", reason="CuPy is not installed", fix="Install the CuPy of your driver")
# name: what each rank sees, the node of each, what the text says
TOO_FEW: dict[str, tuple[list[Sight], list[int], list[str]]] = {
    "more ranks than GPUs": (
        [seeing(FOUR)] * 6,
        [0] * 6,
        ["ranks 0-5 on n0 with 4 GPUs between them: GPU-a0, GPU-a1", "at most 4 ranks"],
    ),
    "on the second node": (
        [seeing(FOUR)] * 2 + [seeing(SECOND[:1], host="n1")] * 2,
        [0, 0, 1, 1],
        ["ranks 2, 3 on n1 with 1 GPU between them: GPU-b0", "srun --gpus-per-task=1", "start one rank there"],
    ),
    "all are shown the same one": (
        [seeing(FOUR[:1])] * 4,
        [0] * 4,
        ["ranks 0-3 on n0 with 1 GPU", "no CUDA_VISIBLE_DEVICES"],
    ),
    "two of four are shown the same one": (
        [seeing([FOUR[i]]) for i in (0, 1, 1, 3)],
        [0] * 4,
        ["ranks 1, 2 on n0 with 1 GPU between them: GPU-a1"],
    ),
    "the same one in two containers": ([seeing(FOUR[:1])] * 2, [0, 1], ["ranks 0, 1 on n0 with 1 GPU"]),
    "the same MIG device": ([seeing(MIG[:1])] * 2, [0, 0], ["MIG-0"]),
    "three for two, one for itself": (
        [seeing(FOUR[:2])] * 3 + [seeing(FOUR)],
        [0] * 4,
        ["ranks 0-2 on n0 with 2 GPUs between them: GPU-a0, GPU-a1", "at most 2 ranks"],
    ),
}


@pytest.mark.parametrize("name", TOO_FEW)
def test_two_ranks_on_one_gpu_are_refused_unless_asked_for(name: str) -> None:
    sights, node_of, texts = TOO_FEW[name]
    with pytest.raises(DeviceError) as refusal:
        bind(sights, node_of)
    for text in [*texts, 'devices="shared"']:
        assert text in str(refusal.value)
    bound, reason = bind_if_possible(sights, node_of)
    assert not bound
    assert reason == str(refusal.value)
    shared = bind(sights, node_of, sharing=True)
    assert [sight.gpus[gpu.index] for sight, gpu in zip(sights, shared, strict=True)] == list(shared)


def test_ranks_that_share_go_round() -> None:
    assert [gpu.index for gpu in bind([seeing(PLAIN)] * 6, [0] * 6, sharing=True)] == [0, 1, 2, 3, 0, 1]
    assert [gpu.index for gpu in bind([seeing(FOUR[:1])] * 3, [0] * 3, sharing=True)] == [0, 0, 0]
    near_one = [seeing(FOUR, near(1, 2))] * 8
    assert sorted(gpu.index for gpu in bind(near_one, [0] * 8, sharing=True)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("sights", "texts"),
    [
        ([NONE] * 3, ["found CuPy is not installed on ranks 0-2 (n0)", "Install the CuPy"]),
        ([seeing(FOUR), NONE], ["CuPy is not installed on rank 1 (n0)"]),
        ([NONE, replace(NONE, host="n1")], ["on ranks 0, 1 (n0 and 1 more nodes)"]),
        (
            [NONE, replace(NONE, reason="no NVIDIA driver here", host="n7")],
            ["CuPy is not installed on rank 0 (n0); no NVIDIA driver here on rank 1 (n7)"],
        ),
    ],
)
def test_ranks_without_a_gpu(sights: list[Sight], texts: list[str]) -> None:
    for sharing in (False, True):
        with pytest.raises(DeviceError) as refusal:
            bind(sights, range(len(sights)), sharing=sharing)
        for text in [*texts, 'devices="cpu"']:
            assert text in str(refusal.value)
    bound, reason = bind_if_possible(sights, range(len(sights)))
    assert not bound
    assert bool(reason) is any(sight.gpus for sight in sights), "nobody wonders where there is none at all"


def test_a_broken_driver_is_worth_a_word() -> None:
    broken = replace(NONE, reason="an NVIDIA driver that does not work", is_strange=True)
    assert "does not work on rank 1" in bind_if_possible([NONE, broken], [0, 0])[1]


def test_ranks_take_the_gpus_that_the_program_names() -> None:
    bound = bind([seeing(FOUR)] * 3, [0] * 3, named=[3, 0, 1])
    assert [gpu.index for gpu in bound] == [3, 0, 1]
    with pytest.raises(DeviceError, match=r"ranks 0, 2 on n0 with 1 GPU.*Name another GPU for each rank"):
        bind([seeing(FOUR)] * 3, [0] * 3, named=[1, 0, 1])
    one_each = [seeing([gpu]) for gpu in FOUR]
    assert [gpu.uuid for gpu in bind(one_each, [0] * 4, named=[0] * 4)] == [gpu.uuid for gpu in FOUR]
    with pytest.raises(DeviceError, match=r'GPU:1 for rank 1, which sees GPU:0 \(GPU-a1\).*devices="gpu"'):
        bind(one_each, [0] * 4, named=[0, 1, 2, 3])


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=6), st.data())
def test_each_rank_has_the_nearest_that_was_free(seen: list[list[int]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=6, max_size=6))
    rows = [data.draw(st.sampled_from([{}, near(0, 2), near(1, 2)])) for _ in seen]
    all_gpus = node("a", places)
    sights = [seeing([all_gpus[i] for i in mine], row) for mine, row in zip(seen, rows, strict=True)]
    bound, reason = bind_if_possible(sights, [0] * len(seen))
    assert bool(reason) is not bool(bound)
    held = {int(gpu.uuid[-1]): rank for rank, gpu in enumerate(bound)}
    assert len(held) == len(bound)
    for index, rank in held.items():
        distances = {other: rows[rank].get(places[other], 0) for other in seen[rank]}  # type: ignore[arg-type]
        for nearer in (other for other in seen[rank] if distances[other] < distances[index]):
            assert (len(seen[held[nearer]]), held[nearer]) < (len(seen[rank]), rank)
    shared = bind(sights, [0] * len(seen), sharing=True)
    assert [sight.gpus[gpu.index] for sight, gpu in zip(sights, shared, strict=True)] == list(shared)
    assert not bound or shared == bound


def test_many_ranks_take_little_time() -> None:
    nodes = [node(f"n{number}-", [0, 0, 0, 0, 1, 1, 1, 1]) for number in range(128)]
    sights = [seeing(nodes[rank // 8], near(rank % 8 // 4, 2)) for rank in range(1024)]
    began = time.perf_counter()
    assert [gpu.index for gpu in bind(sights, [rank // 8 for rank in range(1024)])] == [r % 8 for r in range(1024)]
    assert time.perf_counter() - began < 2


# ------------------------------------------------------------------------------------- what a process sees


def test_a_sight_survives_its_text() -> None:
    for sight in (seeing(FOUR, near(0, 2)), NONE, Sight(MIG[:1] and tuple(MIG[:1]), (), "ü", is_strange=True)):
        assert Sight.read(sight.text()) == sight


def test_what_is_seen_is_told_with_the_distances_of_this_process() -> None:
    with inventory.seen_through(lambda: PretendedGpus(FOUR)):
        sight = inventory.look()
    assert list(sight.gpus) == FOUR
    assert sight.host
    assert all(distance >= 10 for _, distance in sight.distances)


def test_looking_never_raises() -> None:
    with gpu_doubles.raising(lambda: NoGpus("none here", "Get one")):
        assert inventory.look() == Sight(host=inventory.look().host, reason="none here", fix="Get one")
    with gpu_doubles.raising(lambda: OSError("no such bus")):
        sight = inventory.look()
    assert sight.is_strange
    assert "OSError: no such bus" in sight.reason
    with pretended():
        assert "no GPU that this process may use" in inventory.look().reason


def test_the_distances_of_numa_nodes(tmp_path: Path) -> None:
    rows = {0: ("0-3,8", "10 12 32"), 1: ("4-7", "12 10 32"), 3: ("", "32 32 10")}  # 3 is memory without cores
    for number, (cores, row) in rows.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
        (tmp_path / f"node{number}" / "distance").write_text(f"{row}\n")
    assert numa.distances([8], tmp_path) == {0: 10, 1: 12, 3: 32}
    assert numa.distances([3, 4], tmp_path) == {0: 10, 1: 10, 3: 32}
    assert numa.distances([99], tmp_path) == {}
    (tmp_path / "node1" / "distance").write_text("10\n")
    assert numa.distances([4], tmp_path) == {}, "not understood"
    assert numa.distances([0], tmp_path / "absent") == {}


def test_the_numa_node_of_a_pci_device(tmp_path: Path) -> None:
    for bus_id, text in {"0000:3b:00.0": "1\n", "0000:01:00.0": "-1\n", "0000:02:00.0": "?"}.items():
        (tmp_path / bus_id).mkdir()
        (tmp_path / bus_id / "numa_node").write_text(text)
    assert numa.node_of_pci("0000:3B:00.0", tmp_path) == 1
    for unknown in ("0000:01:00.0", "0000:02:00.0", "0000:09:00.0", ""):
        assert numa.node_of_pci(unknown, tmp_path) is None


# ------------------------------------------------------------------------------------- strategies

TWO_OR_MORE = pytest.mark.mpi(min_size=2)
ASKED = ["gpu", "GPU", "shared", "auto", ["GPU:0"] * SIZE]


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
    with gpu_doubles.raising(lambda: AssertionError("looked")), ms.MirroredStrategy(devices) as strategy:  # type: ignore[arg-type]
        assert strategy.devices_by_rank[RANK].endswith("CPU:0")
        assert still_works(strategy)


@pytest.mark.mpi
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    for nothing in (gpu_doubles.raising(lambda: NoGpus("no NVIDIA driver here", "Ask for one")), pretended()):
        with nothing, ms.MirroredStrategy("auto") as strategy:
            assert strategy.devices_by_rank[RANK].endswith("CPU:0")
            assert still_works(strategy)


@TWO_OR_MORE
def test_auto_says_why_it_is_the_cpu_where_there_are_too_few() -> None:
    words = rf"all ranks work on CPUs.*ranks {SIZE - 2}, {SIZE - 1} on"
    warned = pytest.warns(FallbackWarning, match=words) if RANK == 0 else nullcontext()
    with pretended(f"GPU-{min(RANK, SIZE - 2)}"), warned:
        strategy = ms.MirroredStrategy("auto")
    assert strategy.devices_by_rank[RANK].endswith("CPU:0")
    assert still_works(strategy)
    strategy.close()


@TWO_OR_MORE
@pytest.mark.parametrize("devices", ["gpu", ["GPU:0"] * SIZE])
def test_a_shared_gpu_is_refused_on_every_rank(devices: object) -> None:
    with pretended("GPU-one" if RANK in (0, SIZE - 1) else f"GPU-{RANK}"):
        texts = refused(devices)
    for text in texts:
        assert f"ranks 0, {SIZE - 1} on" in text
        assert "1 GPU between them: GPU-one" in text
        assert 'devices="shared"' in text


@TWO_OR_MORE
def test_more_ranks_than_gpus_are_refused_on_every_rank() -> None:
    with pretended(*(f"GPU-{index}" for index in range(SIZE - 1))):
        for text in refused("gpu"):
            assert f"with {SIZE - 1} GPU" in text
            assert all(f"{rank}" in text for rank in range(SIZE))


@TWO_OR_MORE
@pytest.mark.parametrize("devices", ["gpu", "shared", ["GPU:0"] * SIZE])
def test_a_rank_without_a_gpu_is_refused_on_every_rank(devices: object) -> None:
    last = RANK == SIZE - 1
    with gpu_doubles.raising(lambda: NoGpus("no driver", "Get one")) if last else pretended(f"GPU-{RANK}"):
        for text in refused(devices):
            assert f"found no driver on rank {SIZE - 1}" in text
            assert "Get one" in text


@pytest.mark.mpi
@pytest.mark.parametrize("devices", ASKED, ids=str)
def test_every_rank_has_the_gpu_that_it_sees(devices: object) -> None:
    with pretended("GPU-all" if devices == "shared" else f"GPU-{RANK}"), ms.MirroredStrategy(devices) as strategy:  # type: ignore[arg-type]
        assert strategy.devices_by_rank == tuple(
            f"/job:worker/replica:0/task:{rank}/device:GPU:0" for rank in range(SIZE)
        )


@pytest.mark.mpi
def test_each_rank_is_told_its_own_number_of_a_gpu() -> None:
    seen = [f"GPU-{index}" for index in range(SIZE)]
    mine = [*seen[RANK:], *seen[:RANK]]
    with pretended(*mine), ms.MirroredStrategy("gpu") as strategy:
        number = int(strategy.extended.worker_devices[0].rpartition(":")[2])
        assert sorted(gather_texts(mine[number])) == seen


@one_node
@pytest.mark.mpi
@pytest.mark.parametrize("devices", ["gpu", "auto", [f"GPU:{(index + 1) % SIZE}" for index in range(SIZE)]], ids=str)
def test_the_device_of_each_rank_is_the_one_that_it_is_bound_to(devices: object) -> None:
    with pretended(*(f"GPU-{index}" for index in range(SIZE))), ms.MirroredStrategy(devices) as strategy:  # type: ignore[arg-type]
        numbers = [(rank + isinstance(devices, list)) % SIZE for rank in range(SIZE)]
        assert strategy.devices_by_rank == tuple(
            f"/job:worker/replica:0/task:{rank}/device:GPU:{number}" for rank, number in enumerate(numbers)
        )
        assert cupy_double.cupy.cuda.runtime.getDevice() == numbers[RANK]


@pytest.mark.mpi
@pytest.mark.parametrize("devices", [[f"GPU:{index + 1}" for index in range(SIZE)], ["GPU:99"] * SIZE])
def test_a_number_that_does_not_exist(devices: list[str]) -> None:
    with pretended(f"GPU-{RANK}"):
        for text in refused(devices):
            assert "which sees GPU:0" in text


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
    with pretended(f"GPU-{RANK}"):
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
    with pretended(f"GPU-{RANK}"):
        for text in refused(["CPU:0", *(f"GPU:{index}" for index in range(SIZE - 1))]):
            assert "either CPUs or GPUs" in text


@TWO_OR_MORE
def test_a_rank_that_breaks_while_it_looks_leaves_nobody_waiting() -> None:
    with gpu_doubles.raising(lambda: ZeroDivisionError("in the driver")) if RANK == 0 else pretended(f"GPU-{RANK}"):
        for text in refused("gpu"):
            assert "ZeroDivisionError: in the driver" in text
            assert "on rank 0" in text
    assert len(gather_texts("all are here")) == SIZE


JOB = """
import sys
import mpistrategy as ms
from mpi4py import MPI
sys.path[:0] = {tests!r}
from gpu_doubles import pretended
with pretended("GPU-one"):
    ms.MirroredStrategy("gpu")
print("went on")
"""


@pytest.mark.slow
def test_a_job_whose_ranks_would_share_a_gpu_ends(launch: Callable[..., launching.Finished]) -> None:
    job = launch(3, JOB.format(tests=launching.HELPERS), timeout=30)
    assert job.returncode == 1
    assert "went on" not in job.stdout
    assert "ranks 0-2 on" in job.stderr
    assert "with 1 GPU between them: GPU-one" in job.stderr


def test_pretended_replicas_share_the_gpus_of_their_process() -> None:
    if SIZE > 1:
        pytest.skip("runs in the session on 1 rank")

    def program(devices: str) -> str:
        try:
            return ms.MirroredStrategy(devices).extended.worker_devices[0][-5:]
        except DeviceError as refusal:
            return str(refusal)

    with pretended("GPU-0", "GPU-1"):
        assert all("ranks 0-2" in text for text in run_replicas(lambda: program("gpu"), 3))
        assert run_replicas(lambda: program("shared"), 3) == ["GPU:0", "GPU:1", "GPU:0"]
        assert run_replicas(lambda: program("gpu"), 2) == ["GPU:0", "GPU:1"]
