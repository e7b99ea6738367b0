"""The guard's channel on an MPI without persistent collectives (before MPI 4.0), and its report."""

from __future__ import annotations

import pytest
from mpi4py import MPI

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
