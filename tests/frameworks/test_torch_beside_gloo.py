"""What torch builds on process groups gives the same parameters over mpistrategy as over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import shared_folder
from replicas import RANK, SIZE

import mpistrategy as ms

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
mst: Any = pytest.importorskip("mpistrategy.torch")

# torch's own words about names of another version
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore")]
STEPS = 20
nn = torch.nn


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[dict[str, Any]]:
    with ms.MirroredStrategy() as strategy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mst.init_process_group(strategy)
        yield {"mpistrategy": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        dist.destroy_process_group()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(self.words((x[:, :5].abs() * 5).long() % 11)).mean(1))


def mlp() -> Any:
    return nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3))


def cnn() -> Any:
    layers = [nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 3))


MODELS: list[Callable[[], Any]] = [mlp, cnn, Transformer]


def ddp(model: Any, group: Any) -> tuple[Any, Any]:
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    return wrapped, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def zero(model: Any, group: Any) -> tuple[Any, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    # not Adam, which makes steps of the rounding errors of gradients that are zero
    options = {"process_group": group, "lr": 0.1, "momentum": 0.9}
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)


def fsdp(model: Any, group: Any) -> tuple[Any, Any]:
    from torch.distributed import fsdp as place
    from torch.distributed.device_mesh import DeviceMesh

    place.fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def skip_without(how: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Skip on all ranks, before any of them makes a group."""
    if how is fsdp and not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no FSDP2 in public")


def trained(make: Callable[[], Any], how: Callable[[Any, Any], tuple[Any, Any]], group: Any) -> Any:
    torch.manual_seed(3)
    model = make()
    train(*how(model, group), STEPS)
    return model


def train(model: Any, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        x, y = torch.randn(4, 36, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("how", [ddp, zero, fsdp])
def test_same_parameters(groups: dict[str, Any], make: Any, how: Any) -> None:
    skip_without(how)
    mine, other = (trained(make, how, groups[name]) for name in ("mpistrategy", "gloo"))
    for one, two in zip(mine.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(one), whole(two), rtol=1e-4, atol=1e-5)


def resumed(make: Callable[[], Any], backend: str, ranks: tuple[int, int], folder: Path) -> list[Any] | None:
    """Return the parameters after a checkpoint half way, with other ranks from there on; None on the others."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    for part, count in enumerate(ranks):
        found = None
        group = dist.new_group(list(range(count)), backend=backend)
        if count > RANK:
            torch.manual_seed(3 + part)
            model, optimizer = fsdp(make(), group)
            if part:
                train(model, optimizer, 1)  # makes the optimizer's state, which is restored in place
                states = dict(zip("mo", state_dict.get_state_dict(model, optimizer), strict=True))
                dcp.load(states, checkpoint_id=folder, process_group=group)
                state_dict.set_state_dict(model, optimizer, model_state_dict=states["m"], optim_state_dict=states["o"])
            train(model, optimizer, STEPS // 2)
            states = dict(zip("mo", state_dict.get_state_dict(model, optimizer), strict=True))
            if not part:
                dcp.save(states, checkpoint_id=folder, process_group=group)
            found = [whole(each).clone() for each in model.state_dict().values()]
        dist.barrier()  # the groups live on: torch finds what it has kept for a mesh by their names
    return found


@pytest.mark.parametrize("make", [mlp, Transformer])
@pytest.mark.parametrize("ranks", [(SIZE, SIZE - 1), (SIZE - 1, SIZE)], ids=["fewer", "more"])
def test_a_checkpoint_of_torchs_goes_on_with_another_number_of_ranks(
    tmp_path: Path, make: Any, ranks: tuple[int, int]
) -> None:
    skip_without(fsdp)
    folder = shared_folder(tmp_path)
    mine, other = (resumed(make, backend, ranks, folder / backend) for backend in ("mpistrategy", "gloo"))
    assert bool(mine) == bool(other) == (ranks[1] > RANK)
    for one, two in zip(mine or (), other or (), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
