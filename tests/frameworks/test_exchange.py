"""Variables as arrays of other libraries, and tensors that want gradients wherever an array is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, new_variable

import mpistrategy as ms

torch: Any = pytest.importorskip("torch")
shares = pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="this torch takes a variable for a sequence")


@shares
def test_torch_shares_the_memory_of_a_variable(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.arange(6, dtype=np.float32).reshape(2, 3))
    for take in (torch.as_tensor, torch.from_dlpack, torch.asarray):
        tensor = take(variable)
        assert tensor.data_ptr() == variable.local_view.ctypes.data
        assert tensor.shape == (2, 3)
    variable.assign(np.ones((2, 3), np.float32))
    assert tensor.sum() == 6


def test_read_only_is_said(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.arange(3.0))
    for array in (np.from_dlpack(variable), np.asarray(variable)):
        assert np.shares_memory(array, variable.local_view)
        assert not array.flags.writeable
    with pytest.raises(BufferError):
        variable.__dlpack__()  # the protocol's first version cannot say it
    lazy = torch.ones(2, dtype=torch.complex64).conj()  # the result would go into a copy
    with strategy.scope(), pytest.raises(ms.errors.ShapeError, match="lazy"):
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", lazy, out=lazy))


def test_autograd_learns_of_a_result_that_is_written(strategy: ms.Strategy) -> None:
    factor = torch.ones(3)
    product = torch.ones(3, requires_grad=True) * factor
    strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", torch.ones(3), out=factor))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@shares
def test_a_sum_that_nothing_holds_is_not_pointed_at(strategy: ms.Strategy) -> None:
    counted = new_variable(strategy, 1.0, synchronization="ON_READ", aggregation="SUM")
    small = new_variable(strategy, np.ones(2), dtype="bfloat16")
    assert np.asarray(counted) == SIZE
    assert torch.as_tensor(counted) == SIZE
    assert np.asarray(small).dtype.name == "bfloat16"


def test_gradients_are_left_out_of_metrics_and_steps(strategy: ms.Strategy) -> None:
    with strategy.scope():
        mean, accuracy = ms.metrics.Mean(), ms.metrics.Accuracy()
        weights = ms.Variable(np.zeros(2))
        optimizer = ms.optimizers.SGD(1.0)

    def step() -> Any:
        wants = torch.full((2,), float(RANK), dtype=torch.float64, requires_grad=True) * 1.0
        mean.update_state(wants)
        accuracy.update_state(torch.tensor([0, 1]), wants.reshape(2, 1).expand(2, 2) * torch.eye(2) + 0.0)
        optimizer.apply_gradients([(wants, weights)])
        return ms.get_replica_context().all_reduce("SUM", {"loss": wants})

    result = strategy.run(step)
    total = sum(range(SIZE))
    assert type(result["loss"]) is torch.Tensor
    assert not result["loss"].requires_grad
    assert result["loss"].tolist() == [total, total]
    assert mean.result() == total / SIZE
    assert weights.numpy().tolist() == [-total, -total]


@pytest.mark.parametrize("pad", [False, True])
def test_datasets_of_tensors_yield_tensors(strategy: ms.Strategy, pad: bool) -> None:
    rows = torch.arange(10.0).reshape(5, 2)
    dataset = ms.Dataset.from_arrays({"x": rows, "y": np.arange(5)}, 4)
    batches = list(strategy.experimental_distribute_dataset(dataset, pad=pad))
    assert {type(batch["x"]) for batch in batches} == {torch.Tensor}
    own = torch.cat([batch["x"] for batch in batches])
    everyones = torch.as_tensor(strategy.gather(own, 0))
    assert everyones[:, 0].sum() == rows[:, 0].sum()
    batches[0]["x"][...] = -1
    next(iter(strategy.experimental_distribute_dataset([rows], pad=pad)))[...] = -1
    assert rows.min() == 0, "a step may write into its batch"
