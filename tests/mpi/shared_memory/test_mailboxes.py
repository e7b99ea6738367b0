"""The mailboxes of the ranks, and waiting for a peer: its cost, and how it ends when the peer does not come."""

from __future__ import annotations

import functools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from pretended import mailboxes_of
from replicas import RANK, SIZE, bits, context, part_of

import mpistrategy as ms
from mpistrategy.arrays.dtypes import COMBINE
from mpistrategy.mpi.shared_memory import spin_wait
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.spin_wait import SpinWait
from mpistrategy.reduction.transfer import MailboxRoute

pytestmark = pytest.mark.mpi


# ------------------------------------------------------------------------------------- the protocol, rank by rank


@settings(max_examples=part_of(100))
@given(
    ranks=st.integers(2, 5),
    payload=st.sampled_from([16, 48, 64, 100, 1024]),
    digests=st.lists(st.tuples(st.integers(-5, 2**62), st.integers(0, 4)), min_size=1, max_size=8),
    data=st.data(),
)
def test_every_rank_learns_the_same_and_sees_all_payloads(
    ranks: int, payload: int, digests: list[tuple[int, int]], data: st.DataObject
) -> None:
    """A rank reads a call just before its next one, to which others may have come already."""
    them = mailboxes_of(ranks, payload)
    for number, (digest, odd_one) in enumerate([*digests, (0, 4)]):
        for come, rank in enumerate(data.draw(st.permutations(range(ranks)))):
            mailboxes = them[rank]
            if number:
                assert mailboxes.finished() == (digests[number - 1][1] >= ranks)
                for peer, seen in enumerate(mailboxes.slots[mailboxes.sequence & 1].payloads):
                    assert np.all(seen == (7 * number + peer) % 251)
            mailboxes.slots[(mailboxes.sequence + 1) & 1].payloads[rank][:] = (7 * (number + 1) + rank) % 251
            mailboxes.start(digest + 1 if rank == odd_one else digest)
            assert (mailboxes.finished() is None) == (come < ranks - 1)


def test_the_data_are_written_before_the_number_and_read_after_it() -> None:
    """Where processors reorder writes, a fence stands on both sides."""
    seen: list[tuple[int, int]] = []
    them: list[Mailboxes] = []
    them += mailboxes_of(2, 64, lambda: seen.append((them[0].slots[1].own_numbers[0], them[0].slots[1].own_numbers[1])))
    them[0].start(42)
    assert seen == [(0, 42)], "the digest is there, the number not yet"
    them[1].start(42)
    seen.clear()
    assert them[1].finished()
    assert seen == [(1, 42)], "the number has been seen, the digest is read after this"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("value", [1.0, np.ones(100_000), {"a": 1}])
def test_a_message_of_the_users_own_moves_while_a_rank_waits(
    strategy: ms.Strategy, comm: MPI.Intracomm, first: int, value: Any
) -> None:
    """A large message needs its receiver's help: rank 1 waits in a reduction until rank 0 has sent it."""
    buffer, request = np.zeros(2**20), None
    if first == RANK:
        comm.Send(np.full(2**20, 3.0), 1 - first)
    elif 1 - first == RANK:
        request = comm.Irecv(buffer, first)
    total = strategy.run(lambda: context().all_reduce("SUM", value))
    if request is not None:
        request.Wait()
        assert np.all(buffer == 3)
    assert np.all((total["a"] if isinstance(total, dict) else total) == SIZE)


@pytest.mark.one_rank
def test_who_waits_long_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer, or another program, may need this core; messages move meanwhile."""
    number, began = np.zeros(1, np.int64), time.monotonic()

    def progress() -> None:
        assert time.monotonic() - began < 5, "it only looks"

    def nap(seconds: float) -> None:
        assert 0 < seconds <= 1e-3, "so that the peer's number is seen soon"
        number[0] = 5

    monkeypatch.setattr(spin_wait, "time", SimpleNamespace(monotonic=time.monotonic, sleep=nap))
    SpinWait(progress).until(number.data, 5)
    assert number[0] == 5


@pytest.mark.one_rank
@pytest.mark.parametrize("ranks", [15, 16])
@pytest.mark.parametrize("op", [ms.ReduceOp.MAX, ms.ReduceOp.PROD, ms.ReduceOp.SUM])
@np.errstate(all="ignore")
def test_of_many_ranks_the_bits_are_those_of_one_rank_after_the_other(ranks: int, op: ms.ReduceOp) -> None:
    dice = np.random.default_rng(ranks)
    for dtype in map(np.dtype, ("f4", "f8", "i1", "i8", "u4") if op is ms.ReduceOp.MAX else ("f4", "c16", "i1", "u4")):
        for shape in ((), (1,), (3,), (1, 2), (64,)):
            values = (dice.normal(size=(ranks, *shape)) * 10.0 ** dice.integers(0, 9, (ranks, *shape))).astype(dtype)
            if dtype.kind == "f" and shape:
                values.reshape(ranks, -1)[:, 0] = -0.0  # whose sum is not 0.0
            them = mailboxes_of(ranks, 2048)
            routes = [MailboxRoute(mailboxes, ((dtype, shape),), op) for mailboxes in them]
            memory = [route.bring([value]) for route, value in zip(routes, values, strict=True)]
            for mailboxes in them:
                mailboxes.start(1)
            [found] = routes[0].run([values[0]], memory[0])
            assert bits(found) == bits(functools.reduce(COMBINE[op._on_the_wire], values)), (dtype, shape)
