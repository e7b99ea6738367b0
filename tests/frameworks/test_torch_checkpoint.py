"""Checkpoints of torch's modules, optimizers, schedulers, scalers and nests of tensors; on any number of ranks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import many_writers, shared_folder

import mpistrategy as ms
from mpistrategy import errors

torch: Any = pytest.importorskip("torch")


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        schedules = torch.optim.lr_scheduler
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
        self.optimizer = optimizer = torch.optim.AdamW(self.net.parameters(), 0.1)
        self.schedulers = [
            schedules.StepLR(optimizer, 2),
            schedules.MultiStepLR(optimizer, [2, 4]),
            schedules.CosineAnnealingLR(optimizer, 10),
            schedules.OneCycleLR(optimizer, 0.1, 100),
            schedules.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
            schedules.SequentialLR(optimizer, [schedules.ConstantLR(optimizer), schedules.LinearLR(optimizer)], [2]),
        ]
        self.plateau = schedules.ReduceLROnPlateau(optimizer)
        self.scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
        self.average = OrderedDict(
            mean=torch.full((3,), float(seed)),
            others=[torch.tensor(seed), "words"],
            half=torch.ones(2, dtype=torch.bfloat16) * seed,
        )

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.net(torch.eye(4) * number).square().sum().backward()
        self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.plateau.step(1.0)
        self.scaler.scale(torch.ones(1))
        self.scaler.update(9.0 + number)

    def state(self) -> Any:
        return _plain(vars(self))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "state_dict"):
        return _plain(value.state_dict())
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def checkpoint_of(training: Training, strategy: ms.Strategy) -> ms.Checkpoint:
    with strategy.scope():
        return ms.Checkpoint(**vars(training))


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of torch 2.4's own SequentialLR
def test_everything_comes_back_on_another_number_of_ranks(strategy: ms.Strategy, tmp_path: Path) -> None:
    saved = Training(1)
    for number in range(1, 4):
        saved.step(number)
    folder = shared_folder(tmp_path) / "c"
    with many_writers():
        checkpoint_of(saved, strategy).save(folder)
    wanted = saved.state()
    for of in (strategy, ms.OneDeviceStrategy("CPU:0")):
        resumed = Training(2)
        memory = [tensor.data_ptr() for tensor in (*resumed.net.state_dict().values(), resumed.average["mean"])]
        assert resumed.state() != wanted
        checkpoint_of(resumed, of).restore(folder)
        assert resumed.state() == wanted
        assert memory == [t.data_ptr() for t in (*resumed.net.state_dict().values(), resumed.average["mean"])]
        assert type(resumed.schedulers[1].milestones) is Counter
        resumed.step(4)
    saved.step(4)
    assert resumed.state() == saved.state()


def test_another_module_is_refused_and_nothing_changes(strategy: ms.Strategy, tmp_path: Path) -> None:
    folder = shared_folder(tmp_path) / "c"
    with strategy.scope():
        ms.Checkpoint(a=torch.zeros(2), net=torch.nn.Linear(2, 3)).save(folder)
        other, first = torch.nn.Linear(2, 3, bias=False), torch.ones(2)
        with pytest.raises(errors.CheckpointMismatchError, match=r"net/state/bias: tensor .*, nothing here"):
            ms.Checkpoint(a=first, net=other).restore(folder)
        with pytest.raises(errors.CheckpointMismatchError, match="net/state/weight"):
            ms.Checkpoint(a=first, net=torch.nn.Linear(3, 3)).restore(folder)
    assert first.tolist() == [1, 1]


def test_tensors_and_arrays_of_each_other(strategy: ms.Strategy, tmp_path: Path) -> None:
    folder = shared_folder(tmp_path) / "c"
    with strategy.scope():
        ms.Checkpoint(a=torch.arange(3.0), b=np.arange(3.0, dtype=np.float32)).save(folder)
        array, tensor = np.zeros(3, np.float32), torch.zeros(3, requires_grad=True)
        ms.Checkpoint(a=array, b=tensor).restore(folder)
    assert array.tolist() == tensor.tolist() == [0, 1, 2]
    assert ms.Checkpoint.arrays(folder)["a"].tolist() == [0, 1, 2]


def test_sparse_tensors_are_refused(strategy: ms.Strategy, tmp_path: Path) -> None:
    with strategy.scope(), pytest.raises(errors.LeafError):
        ms.Checkpoint(rows=torch.eye(2).to_sparse()).save(shared_folder(tmp_path) / "c")
