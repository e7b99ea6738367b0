"""Packing: many small values travel in few messages, and every value finds its way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas import DTYPES, RANK, SIZE, value_of

import mpistrategy as ms
from mpistrategy import CommunicationOptions
from mpistrategy.arrays.dtypes import Array, host_wire_dtype
from mpistrategy.reduction.layout import packing

pytestmark = pytest.mark.mpi

arrays = st.lists(
    st.builds(
        lambda dtype, shape: value_of(0, dtype, shape),
        st.sampled_from(DTYPES),
        st.sampled_from([(), (0,), (1,), (5,), (3, 4)]),
    ),
    max_size=12,
)


@given(
    arrays=arrays,
    bytes_per_pack=st.sampled_from([0, 1, 8, 40, 1000]),
    num_packs=st.integers(0, 4),
    wire=st.sampled_from([packing.own_dtype, host_wire_dtype]),
)
def test_a_plan_holds_every_array_once_in_packs_of_one_dtype(
    arrays: list[Array], bytes_per_pack: int, num_packs: int, wire: Any
) -> None:
    """Without gaps on the host; in GPU memory each array begins at a multiple of 16 bytes."""
    alignment = 1 if wire is host_wire_dtype else packing.GPU_ALIGNMENT
    packs = packing.plan(packing.layouts_of(arrays), bytes_per_pack, num_packs, wire, alignment=alignment)
    assert num_packs != 1 or len(packs) == len({wire(array.dtype) for array in arrays})
    found: dict[int, Array] = {}
    for pack in packs:
        indices = [member.index for member in pack.members]
        assert indices == sorted(indices)
        assert {wire(arrays[index].dtype) for index in indices} == {pack.dtype}
        limit = bytes_per_pack or packing.DEFAULT_BYTES_PER_PACK
        assert num_packs or len(indices) == 1 or pack.size * pack.dtype.itemsize <= limit
        line = max(1, 16 // pack.dtype.itemsize) if wire is packing.own_dtype else 1
        end = 0
        for member in pack.members:
            assert member.start == -(-end // line) * line, "no more of a gap than is needed"
            end = member.stop
        assert pack.size == end
        buffer = np.empty(pack.size, pack.dtype)
        if wire is host_wire_dtype:
            assert pack.fill(arrays, buffer) is buffer
        else:
            for index, view in pack.views(buffer):
                view[...] = arrays[index]
        for index, view in pack.views(buffer):
            assert index not in found
            found[index] = view
    for index, array in enumerate(arrays):
        np.testing.assert_array_equal(found[index], array.astype(wire(array.dtype)))
        assert found[index].shape == array.shape


class Counting:
    """Counts the messages of a strategy by verb."""

    def __init__(self, strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        for verb in ("allreduce", "reduce", "bcast"):
            self._wrap(strategy.extended.communicator, verb, monkeypatch)

    def _wrap(self, communicator: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(communicator, verb)

        def counted(*arguments: Any) -> None:
            self.counts[verb] = self.counts.get(verb, 0) + 1
            real(*arguments)

        monkeypatch.setattr(communicator, verb, counted)


@pytest.mark.parametrize(
    ("bytes_per_pack", "messages"),
    [(0, 2), (1, 20), (8, 5 + 10), (40, 1 + 2), (10**6, 2)],
)
def test_the_number_of_messages(monkeypatch: pytest.MonkeyPatch, bytes_per_pack: int, messages: int) -> None:
    """Ten float32 and ten float64 numbers, mixed: one dtype a message, at most bytes_per_pack bytes."""
    strategy = ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice())
    values = [np.asarray(RANK + i, np.float64 if i % 2 else np.float32) for i in range(20)]
    count = Counting(strategy, monkeypatch)
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)

    def step() -> Any:
        context = ms.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", values, options)

    found = strategy.run(step)
    assert count.counts == {"reduce": messages, "bcast": messages}
    np.testing.assert_array_equal(found, [sum(range(SIZE)) + SIZE * i for i in range(20)])
    strategy.close()


def test_one_destination_needs_no_allreduce(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Counting(strategy, monkeypatch)
    strategy.extended.batch_reduce_to("SUM", [(np.ones(3), "task:0"), (np.ones(2), "task:0")])
    assert SIZE == 1 or count.counts == {"reduce": 1}
