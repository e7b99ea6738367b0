"""What torch builds on process groups gives the same parameters over mpistrategy as over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from replicas import RANK

import mpistrategy as ms

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
mst: Any = pytest.importorskip("mpistrategy.torch")

# torch's own words about names of another version
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore")]
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


def trained(make: Callable[[], Any], how: Callable[[Any, Any], tuple[Any, Any]], group: Any) -> Any:
    torch.manual_seed(3)
    model, optimizer = how(make(), group)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(20):
        x, y = torch.randn(4, 36, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("how", [ddp, zero, fsdp])
def test_same_parameters(groups: dict[str, Any], make: Any, how: Any) -> None:
    if how is fsdp and not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no FSDP2 in public")  # on all ranks, before any of them makes a group
    mine, other = (trained(make, how, groups[name]) for name in ("mpistrategy", "gloo"))
    for one, two in zip(mine.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(one), whole(two), rtol=1e-4, atol=1e-5)
