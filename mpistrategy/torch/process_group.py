"""The backend "mpistrategy" of torch.distributed: a process group whose ranks, store and messages are MPI's.

Up to torch 2.13 only a ProcessGroup can be written in Python, from 2.14 on a Backend, behind torch's own group.  What a
call does is in `mpistrategy.torch.group`.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpistrategy.errors import ContextError, LaunchError, UnsupportedError
from mpistrategy.mpi.contract import call_sites
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import time_limit
from mpistrategy.mpi.over_mpi.ranks import MpiRanks
from mpistrategy.strategy.mirrored import MirroredStrategy
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.torch.group import Group, chosen_seconds, completed_work

# What can be written in Python.
if TYPE_CHECKING or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
    from torch.distributed import ProcessGroup as _Base
else:
    _Base = torch._C._distributed_c10d.Backend

NAME = "mpistrategy"
_WHERE = "mpistrategy.torch.init_process_group"

#: References to groups: C++ holds them, too, but falls back to its base class once their Python half is gone.
_references: list[Any] = []
#: The strategy whose ranks the next default group has.
_pending_strategies: list[Strategy] = []


class ProcessGroupMPI(Group, _Base):  # type: ignore[misc]
    """A process group of torch, or a backend of one, in which the ranks of a communicator meet.

    Args:
        communicator: the ranks.
        store: made by torch.
    """

    def __init__(self, communicator: MpiRanks, store: Any) -> None:
        _Base.__init__(self, communicator.rank, communicator.size)
        Group.__init__(self, communicator)
        self._store = store

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME

    name: Any = getBackendName
    # torch asks for these properties; in C++, some call themselves without end
    supports_splitting = supports_coalescing = supports_time_estimate = supports_tensor_alloc = False

    # the names before torch 2.13
    allgather_into_tensor_coalesced: Any = Group.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced: Any = Group.reduce_scatter_single_coalesced
    _allgather_base: Any = Group.all_gather_single
    _reduce_scatter_base: Any = Group.reduce_scatter_single
    alltoall_base: Any = Group.all_to_all_single

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; after the timeout the late ranks are named, as in every call."""
        self.barrier(opts)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls wait for the other ranks."""
        self.communicator.guard.timeout = time_limit(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Free the group's communicators."""
        atexit.unregister(self._background.end)
        try:
            self._background.free()
        finally:
            self.communicator.free()
            _references[:] = [group for group in _references if group is not self]

    def abort(self) -> None:
        """Take no more calls."""
        self.communicator.guard.closed = True

    # what C++ cannot do for a group that is written in Python, up to torch 2.13
    #: The name that torch gives the group.
    group_name: str = ""
    _device_types: tuple[Any, ...] = (torch.device("cpu"), torch.device("cuda"))

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    _set_group_name = setGroupName

    def _get_backend(self, device: Any) -> Any:
        return self

    get_backend = _get_backend

    def split_group(self, *arguments: Any, **more: Any) -> Any:
        raise UnsupportedError.at(
            "torch.distributed.split_group",
            found=f"the backend {NAME!r}",
            expected="a group made of ranks",
            fix="Use torch.distributed.new_group(ranks) on all ranks.",
        )

    splitGroup = split_group  # noqa: N815

    def get_group_store(self) -> Any:
        return self._store

    def _start_coalescing(self, device: Any) -> None:
        """Do nothing: each call of a coalescing manager is made at once."""

    def _end_coalescing(self, device: Any) -> Any:
        return completed_work([])


def _make(options: Any, strategy: Any = None) -> Any:
    """Make the group that torch asks for: the default group, or a group of some ranks, which alone call this."""
    ranks = list(options.global_ranks_in_group)
    whole = _references[0].communicator if ranks else _of_mpi(strategy or _pending_strategies.pop())
    group = ProcessGroupMPI(whole.part(ranks) if ranks else whole.duplicate(), options.store)
    if chosen_seconds(options.timeout):
        group.set_timeout(options.timeout)
    _references[:] = [*(_references if ranks else ()), group]  # torch 2.4 does not say when former groups are destroyed
    return group


def _of_mpi(strategy: Strategy) -> MpiRanks:
    communicator = strategy.extended.communicator
    if not isinstance(communicator, MpiRanks):
        raise ContextError.at(
            _WHERE, found=f"{strategy!r:.60}, whose ranks are not MPI's", expected="a MirroredStrategy"
        )
    return communicator


def _store(strategy: Strategy) -> Any:
    """Return a store that all ranks of a strategy share: rank 0 listens on a free port.  Collective."""
    communicator = _of_mpi(strategy)
    host = "127.0.0.1" if communicator.nodes == 1 else socket.gethostname()
    with Call(communicator.guard, _WHERE, anywhere=True) as call:  # the other ranks hear of an error
        store = (
            None
            if communicator.rank
            else dist.TCPStore(host, 0, communicator.size, is_master=True, wait_for_workers=False)
        )
        call.agree("make a store")
    host, port = communicator.allgather_text(f"{host} {store.port}" if store else "")[0].split()
    return store or dist.TCPStore(host, int(port), communicator.size, is_master=False)


def _refuse_other_launchers() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise LaunchError.at(
            _WHERE,
            found="a program that torchrun has started",
            expected="ranks of MPI",
            fix="Start it with `mpiexec -n 4 python program.py`, or with srun: torchrun is not needed.",
        )


def _rendezvous(url: str, timeout: timedelta | None = None, **more: Any) -> Iterator[tuple[Any, int, int]]:
    """Answer ``init_method="mpistrategy://"``."""
    _refuse_other_launchers()
    strategy = MirroredStrategy()
    _pending_strategies.append(strategy)
    yield _store(strategy), strategy.rank, strategy.num_replicas_in_sync


def init_process_group(strategy: Strategy | None = None, *, timeout: timedelta | float | None = None) -> None:
    """Make the ranks of a strategy the default process group of torch.distributed.  Collective.

    Afterwards DDP, FSDP, DTensor, `torch.distributed.checkpoint` and what else is made of process groups run over the
    strategy's MPI.  The environment needs neither MASTER_ADDR nor ports nor torchrun.  The group has messages of its
    own: collectives of the strategy may be made between torch's collectives.

    Args:
        strategy: whose ranks; None for a new MirroredStrategy of all ranks.
        timeout: how long a call waits for the other ranks before the roll call ends the job: a timedelta, or seconds;
            None for the strategy's.

    Raises:
        LaunchError: when the program was started by torchrun; as MirroredStrategy.
        ContextError: when there is a default process group already.

    >>> import torch, torch.distributed as dist, mpistrategy.torch as mst
    >>> mst.init_process_group()
    >>> dist.get_backend()
    'mpistrategy'
    >>> dist.destroy_process_group()
    """
    _refuse_other_launchers()
    if dist.is_initialized():
        raise ContextError.at(
            _WHERE,
            found="a default process group",
            expected="none",
            fix="Call torch.distributed.destroy_process_group() before, or use the group that there is.",
        )
    group_strategy = MirroredStrategy() if strategy is None else strategy
    dist.init_process_group(
        NAME,
        store=_store(group_strategy),
        rank=group_strategy.rank,
        world_size=group_strategy.num_replicas_in_sync,
        timeout=timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout,
        pg_options=group_strategy,
    )


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
dist.register_rendezvous_handler(NAME, _rendezvous)
call_sites.pass_over(os.path.dirname(torch.__file__))
