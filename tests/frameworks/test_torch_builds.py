"""What torch builds on process groups runs over mpistrategy: wrappers, sharded optimizers, DTensor, pipelines, DCP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
mst: Any = pytest.importorskip("mpistrategy.torch")

# torch's own words about names of another version
pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("group"),
]
nn, DDP = torch.nn, torch.nn.parallel.DistributedDataParallel
ROWS = torch.randn(4 * SIZE, 6, generator=torch.Generator().manual_seed(1))
MINE = ROWS[4 * RANK : 4 * RANK + 4]


def network(width: int = 8) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


def loss_of(model: Any, rows: Any) -> Any:
    return model(rows).square().mean()


def gradients(model: Any) -> list[Any]:
    return [each.grad for each in model.parameters()]


def alone() -> Any:
    """Return a model with the gradients of one process with all rows."""
    model = network()
    loss_of(model, ROWS).backward()
    return model


def close(found: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(mine), other, rtol=tolerance, atol=tolerance)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# --------------------------------------------------------------------------------------------------------------- DDP


def plain(model: Any) -> None:
    loss_of(model, MINE).backward()


def accumulated(model: Any) -> None:
    with model.no_sync():
        (loss_of(model, MINE) / 2).backward()
    (loss_of(model, MINE) / 2).backward()


def by_halves(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    loss_of(model, MINE).backward()


def by_a_python_hook(model: Any) -> None:
    def mean(bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer().div_(SIZE), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, lambda state, bucket: mean(bucket))
    loss_of(model, MINE).backward()


STATIC = {"gradient_as_bucket_view": True, "static_graph": True}


@pytest.mark.parametrize(
    ("backward", "options"),
    [
        (accumulated, {}),
        (by_halves, {}),
        (by_a_python_hook, {}),
        (plain, STATIC),
        (plain, {"find_unused_parameters": True}),
    ],
)
def test_ddp_has_the_gradients_of_one_process(backward: Callable[[Any], None], options: dict[str, bool]) -> None:
    model = DDP(network(), bucket_cap_mb=1e-4, **options)
    backward(model)
    close(gradients(model), gradients(alone()), 1e-2 if backward is by_halves else 1e-5)


def test_ranks_with_different_numbers_of_batches_join() -> None:
    from torch.distributed.algorithms.join import Join

    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for _ in range(RANK + 1):
            optimizer.zero_grad()
            loss_of(model, MINE).backward()
            optimizer.step()
    for mine in model.parameters():
        last = mine.detach().clone()
        dist.broadcast(last, SIZE - 1)
        assert torch.equal(mine.detach(), last)
    assert not torch.equal(model.module[0].weight, network()[0].weight)


def test_statistics_of_batches_are_those_of_the_first_rank() -> None:
    model = DDP(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
    statistics = model.module[0].running_mean
    for number in range(3):
        first = statistics.clone()
        dist.broadcast(first, 0)
        rows = MINE + number * RANK
        loss_of(model, rows).backward()
        torch.testing.assert_close(statistics, 0.9 * first + 0.1 * rows.mean(0))


# ---------------------------------------------------------------------------------------------------------- sharding


def test_an_optimizer_in_parts_trains_as_one_process() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, single, momentum = DDP(network()), network(), {"lr": 0.1, "momentum": 0.9}
    parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **momentum)
    for each, optimizer, rows in (
        (model, parts, MINE),
        (single, torch.optim.SGD(single.parameters(), **momentum), ROWS),
    ):
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(each, rows).backward()
            optimizer.step()
    close(list(model.parameters()), list(single.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fully_shard_in_mixed_precision_and_clipped(dtype: Any) -> None:
    place = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(place, "fully_shard"):
        pytest.skip("this torch has no FSDP2 in public")
    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    model = network()
    policy = place.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        place.fully_shard(layer, mesh=mesh, mp_policy=policy)
    loss_of(model, MINE).float().backward()
    single = alone()
    norm = nn.utils.clip_grad_norm_(single.parameters(), 0.01)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(whole(found), norm, rtol=tolerance, atol=tolerance)
    close(gradients(model), gradients(single), tolerance)


# ------------------------------------------------------------------------------------------- DTensor, parts of models


@pytest.mark.parametrize("shape", [(1, SIZE), (SIZE, 1)], ids=str)
def test_a_mesh_of_two_dimensions(shape: tuple[int, int]) -> None:
    from torch.distributed import tensor as of_torch

    if not hasattr(of_torch, "distribute_tensor"):
        pytest.skip("this torch has no DTensor in public, and multiplies wrong parts, on gloo too")
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    generator = torch.Generator().manual_seed(2)
    one, two = (torch.randn(6, 6, generator=generator) for _ in "ab")
    split = [of_torch.Shard(0), of_torch.Shard(1)]
    product = of_torch.distribute_tensor(one, mesh, split) @ of_torch.distribute_tensor(two, mesh, split)
    torch.testing.assert_close(product.full_tensor(), one @ two)
    again = product.redistribute(mesh, [of_torch.Replicate(), of_torch.Shard(0)])
    torch.testing.assert_close(again.full_tensor(), one @ two)


def test_tensor_parallel_layers() -> None:
    from torch.distributed.tensor import parallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    single = network(4 * SIZE)
    model = parallel.parallelize_module(network(4 * SIZE), mesh, plan)
    for each in (model, single):
        loss_of(each, ROWS).backward()
    close(gradients(model), gradients(single))


def test_a_pipeline_of_the_ranks() -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    torch.manual_seed(4)
    layers, loss_fn, target = [nn.Linear(6, 6) for _ in range(SIZE)], nn.functional.mse_loss, torch.zeros_like(ROWS)
    loss_fn(nn.Sequential(*layers)(ROWS), target).backward()
    expected = layers[RANK].weight.grad
    layers[RANK].zero_grad()
    stage = pipelining.PipelineStage(layers[RANK], RANK, SIZE, torch.device("cpu"), input_args=(ROWS[:SIZE],))
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    schedule.step(*([ROWS] if RANK == 0 else []), **({"target": target} if RANK == SIZE - 1 else {}))
    found = layers[RANK].weight.grad  # of the sum or the mean of the parts, as torch's version has it
    torch.testing.assert_close(found / found.norm(), expected / expected.norm())


# ------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_written_beside_training(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    folder = shared_folder(tmp_path) / "dcp"
    model, beside = DDP(network()), dist.new_group()
    saved = {name: each.clone() for name, each in model.module.state_dict().items()}
    writing = dcp.async_save({"model": saved}, checkpoint_id=folder, process_group=beside)
    for _ in range(3):
        loss_of(model, MINE).backward()
    writing.result()
    found = {"model": {name: torch.zeros_like(each) for name, each in saved.items()}}
    dcp.load(found, checkpoint_id=folder)
    assert all(torch.equal(found["model"][name], each) for name, each in saved.items())
    dist.destroy_process_group(beside)
