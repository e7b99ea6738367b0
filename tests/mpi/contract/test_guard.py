"""The guard's channel on an MPI without persistent collectives (before MPI 4.0), and its report."""

from __future__ import annotations

import numpy as np
import pytest
from launching import a_row_a_rank
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract import mpi_channel

pytestmark = pytest.mark.mpi


class _WithoutPersistent:
    """A communicator whose MPI does not know Allreduce_init."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def Dup(self) -> _WithoutPersistent:  # noqa: N802  # MPI's name
        return _WithoutPersistent(self._comm.Dup())

    def Allreduce_init(self, *arguments: object) -> None:  # noqa: N802
        raise NotImplementedError

    def __getattr__(self, name: str) -> object:
        return getattr(self._comm, name)


def test_a_channel_without_persistent_collectives_answers_the_same(comm: MPI.Intracomm) -> None:
    channel = mpi_channel.MpiControlChannel(_WithoutPersistent(comm))  # type: ignore[arg-type]
    for number in (5, -3, 2**62 - 1):
        assert channel.all_equal(number)
        assert channel.all_equal(number + comm.rank) == (comm.size == 1)
    channel.start(7)
    while (answer := channel.finished()) is None:
        pass
    assert answer
    assert channel.allgather_text(f"é{comm.rank}") == [f"é{rank}" for rank in range(comm.size)]
    channel.close()


@pytest.mark.mpi(min_size=2)
def test_the_report_names_each_rank_its_call_and_the_line(comm: MPI.Intracomm) -> None:
    strategy = ms.MirroredStrategy(communicator=comm)

    def step() -> None:
        context = ms.get_replica_context()
        if comm.rank == 0:
            context.all_reduce("MEAN", np.zeros(3), name="a")
        else:
            context.all_reduce("SUM", np.zeros(3), name="b")

    with pytest.raises(errors.CollectiveMismatchError) as caught:
        strategy.run(step)
    text = a_row_a_rank(str(caught.value))
    assert "they differ in: op, name" in text
    for rank in range(comm.size):
        op, name = ("MEAN", "a") if rank == 0 else ("SUM", "b")
        assert f"rank {rank}: call=ReplicaContext.all_reduce  op={op}  name={name}  at {__file__}:" in text
    strategy.close()
