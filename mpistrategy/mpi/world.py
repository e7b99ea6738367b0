"""All ranks of the job, before any strategy: is this the job that was asked for, and how does it end?"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpistrategy.mpi import abort, launch
from mpistrategy.mpi.control_channel import MpiControlChannel
from mpistrategy.mpi.guard import Guard
from mpistrategy.mpi.path_files import library_name


def check(where: str, comm: Any = None) -> None:
    """Raise LaunchError on a rank that MPI takes for the only one while a launcher started several.

    Args:
        where: the public name that the error speaks of.
        comm: what a strategy is made of: COMM_SELF is one rank on purpose.
    """
    if comm is None or comm != MPI.COMM_SELF:
        launch.check_world(MPI.COMM_WORLD.size, library_name(MPI.Get_library_version()), where)


def watch(guard: Guard, free: Any) -> None:
    """Make the end of this rank the end of the job; say goodbye to the peers of `guard` first."""
    world = MPI.COMM_WORLD
    if world.size > 1:
        abort.watch(guard, free, world.rank, world.size, world.Abort, MPI.Is_finalized)


def watch_from_now_on() -> None:
    """Watch over this process before it has a strategy.  Collective over all ranks."""
    world = MPI.COMM_WORLD
    if world.size > 1:
        channel = MpiControlChannel(world)
        watch(Guard(channel, world.rank, world.size), channel.close)
