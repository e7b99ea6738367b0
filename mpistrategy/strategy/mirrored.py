"""The strategies that a program makes: one replica on every MPI rank, or one replica without MPI."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpistrategy.arrays.devices import Device, parse
from mpistrategy.cross_device_ops.algorithms import CrossDeviceOps
from mpistrategy.errors import DeviceError, MpiStrategyError, OptionError
from mpistrategy.mpi import over_threads
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import ALWAYS, level_of, time_limit_of
from mpistrategy.mpi.faults import injection
from mpistrategy.mpi.gpu.device_selection import activate, check_exists, choose_devices, requested
from mpistrategy.mpi.interface.ranks import Alone
from mpistrategy.mpi.job.launcher import start, warn_of_unknown
from mpistrategy.mpi.over_threads import Threads
from mpistrategy.objects.other_names import refuses
from mpistrategy.objects.settings import checked_type, one_of
from mpistrategy.options import CheckLevel, CommunicationOptions, OnError
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.strategy import Strategy

if TYPE_CHECKING:
    from mpistrategy.mpi.over_mpi.ranks import MpiRanks


#: Modules that are imported at their use, in calls, in errors and in alarms.
_USED_LATER = ("difflib", "fcntl", "hashlib", "json", "numpy.random", "termios")


class MirroredStrategy(Strategy):
    """One replica on every MPI rank.  Creation is collective over the communicator, and starts MPI.

    Make it early: some MPIs (MPICH's under ``srun --mpi=pmi2``) fail to start after large packages were imported.
    Started without a launcher (plain ``python``), it has one replica.  Errors are raised on every rank.  While MPI
    starts, Python's one timer of faulthandler ends a rank that waits too long; it is the program's afterwards.

    Args:
        devices: what the ranks drive.  "cpu", None or []: CPUs.  "gpu": each rank gets a GPU of its own, the one
            nearest to its cores; use by processes outside the communicator is not checked.  "shared": as "gpu", but
            ranks share GPUs where there are too few.  "auto": GPUs where "gpu" finds one for each rank, else CPUs.
            A list: one device string for each rank of this node, in order.  CuPy and the NVIDIA driver are loaded
            only for "auto", "gpu", "shared" and the device string of a GPU.  On GPUs variables are CuPy arrays, and
            the rank's GPU becomes CuPy's current device.
        cross_device_ops: the reduction algorithm; None means `MpiAllReduce`.
        communicator: the mpi4py communicator whose ranks take part; None means all ranks.  The strategy works on a
            Dup of it.  Disjoint sub-communicators give independent groups.
        communication_options: the default options of every collective.
        check: whether calls are compared between nodes, before their data moves: "always", or "off".  None means what
            MPISTRATEGY_CHECK says, else "always".  Within a node calls are always compared, in the message that carries
            the data.
        on_error: what happens after an error that a rank's program does not catch.  "abort" ends the whole job: all of
            COMM_WORLD.  "raise" ends this strategy alone: the other ranks of its communicator raise RemoteError, other
            communicators go on, and the rank waits in MPI_Finalize for the others; for ensembles.  An error that leaves
            the with block does the same, whether it is caught outside or not.  All calls are compared then.  A late
            collective raises CollectiveTimeoutError, where the rank that waits can leave it.
        name: is compared between the ranks instead of the call site.

    Raises:
        LaunchError: when no MPI library can be loaded; when a launcher started several ranks that MPI does not see;
            when the ranks run different versions of Python or of this package; when MPI has not been initialized; in a
            worker of multiprocessing that a rank has started.
        LaunchError: after MPI.Finalize().
        ForkedProcessError: in a forked child of a rank.
        DeviceError: for devices that do not exist, a repeated one, or fewer than the node has ranks; for GPUs, where
            a rank sees none, and where two would share one unasked.
        OptionTypeError: for arguments of the wrong type.
        OptionError: for an unknown `check` or `on_error`; for a malformed plan in MPISTRATEGY_INJECT, level in
            MPISTRATEGY_CHECK or number in MPISTRATEGY_TIMEOUT_SECONDS.
    """

    @refuses(
        cluster_resolver="Leave it out: mpiexec or srun tells the ranks who they are.",
        communication="Write communication_options=CommunicationOptions(implementation=...).",
    )
    def __init__(
        self,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communicator: Any = None,
        communication_options: CommunicationOptions | None = None,
        check: CheckLevel | None = None,
        on_error: OnError = "abort",
        name: str | None = None,
    ) -> None:
        where = "MirroredStrategy"
        contains_errors = str(on_error).lower() == "raise"
        ranks = _connect(communicator, contains_errors)
        try:
            with Call(ranks.guard, where, called=name) as call:
                if not isinstance(ranks, Threads):
                    injection.arm()
                algorithms, options = (CrossDeviceOps, type(None)), (CommunicationOptions, type(None))
                checked_type(where, "cross_device_ops", cross_device_ops, algorithms, "a CrossDeviceOps")
                checked_type(where, "communication_options", communication_options, options, "a CommunicationOptions")
                reaction = one_of(where, "on_error", on_error, ("abort", "raise"))
                level = ALWAYS if contains_errors and check is None else level_of(check)
                if contains_errors and level != ALWAYS:
                    raise OptionError.at(
                        where, found=f'on_error="raise" with check={check!r}', expected='check="always", or None'
                    )
                limit = time_limit_of(communication_options and communication_options.timeout_seconds)
                request = requested(devices, ranks.local_rank, ranks.local_size)
                call.agree(
                    "create a strategy",
                    op=getattr(cross_device_ops, "_configuration", type(cross_device_ops).__name__),
                    destination=str(communication_options),
                    options=f"devices={request.word}, check={level}, on_error={reaction}",
                )
                ranks.guard.check_as(level)
                ranks.guard.timeout = limit
                if request.word == "cpu":  # as all ranks have agreed
                    ranks.devices = tuple(Device(rank, "CPU", 0) for rank in range(ranks.size))
                else:
                    try:
                        ranks.devices = choose_devices(request, ranks)
                    except DeviceError as error:  # raised on all ranks alike
                        ranks.guard.reported = error
                        raise error from None
                    activate(ranks.devices[ranks.rank], ranks.guard)
        except MpiStrategyError:
            ranks.free()
            raise
        super().__init__(StrategyExtended(self, ranks, cross_device_ops, communication_options))
        if ranks.rank == 0:
            warn_of_unknown()


def _connect(comm: Any, contains_errors: bool) -> MpiRanks | Threads:
    replicas = over_threads.replicas_here.get()
    if replicas is not None and comm is None:
        return replicas.duplicate()
    start("MirroredStrategy")
    from mpistrategy.mpi.job import world
    from mpistrategy.mpi.over_mpi.ranks import MpiRanks

    with world.joining("MirroredStrategy", comm):
        for name in _USED_LATER:  # in a call one rank alone might fail, which cannot open a file
            import_module(name)
        return MpiRanks(comm, contains_errors=contains_errors)


class OneDeviceStrategy(Strategy):
    """One replica on one device of this rank; never starts MPI.  The specification of every other strategy.

    Args:
        device: a device string such as ``"CPU:0"`` or ``"GPU:0"``; a GPU becomes CuPy's current device.

    Raises:
        DeviceError: for a device that does not exist.
        OptionTypeError: when `device` is not a string.
    """

    def __init__(self, device: str = "CPU:0") -> None:
        checked_type("OneDeviceStrategy", "device", device, str, "a device string")
        pattern = parse(device, "OneDeviceStrategy", "device")
        complete = Device(0, pattern.kind or "CPU", pattern.index or 0)
        check_exists(complete, "OneDeviceStrategy")
        only = Alone(devices=(complete,))
        activate(complete, only.guard)
        super().__init__(StrategyExtended(self, only))
